"""Features of labelled pictures, remembered by content: a second run computes none.

A cache is one SQLite file per model and way of computing (hash of the weights' file,
pre-processing, precision). Its rows are keyed by the hash of a picture's bytes, so that of renamed,
moved and added pictures only the new ones cost anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitcli.data.inputs import Picture
from vitcli.data.records import Source
from vitcli.data.shards import cache_folder
from vitcli.errors import DataError
from vitcli.prediction import Predictor


class FeatureCache:
    """Feature vectors by picture hash. A cache that cannot be opened remembers nothing."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.database: sqlite3.Connection | None = None
        path = (folder or cache_folder()) / "features" / f"{name}.sqlite"
        with contextlib.suppress(OSError, sqlite3.Error):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.database = sqlite3.connect(path, timeout=10.0)
            self.database.execute(
                "CREATE TABLE IF NOT EXISTS features (picture BLOB PRIMARY KEY, vector BLOB)"
            )

    def get(self, picture: bytes, width: int) -> npt.NDArray[np.float32] | None:
        """The vector of a picture, or None."""
        row = None
        if self.database is not None:
            with contextlib.suppress(sqlite3.Error):
                query = "SELECT vector FROM features WHERE picture = ?"
                row = self.database.execute(query, (picture,)).fetchone()
        found = np.frombuffer(row[0], np.float32) if row is not None else None
        return found if found is not None and len(found) == width else None

    def put(self, picture: bytes, vector: npt.NDArray[np.float32]) -> None:
        """Remembers a vector once `close` is called."""
        if self.database is not None:
            with contextlib.suppress(sqlite3.Error):
                row = (picture, vector.astype(np.float32).tobytes())
                self.database.execute("INSERT OR REPLACE INTO features VALUES (?, ?)", row)

    def close(self) -> None:
        """Writes what was put."""
        if self.database is not None:
            with contextlib.suppress(sqlite3.Error):
                self.database.commit()
            self.database.close()
            self.database = None


def cache_name(predictor: Predictor) -> str:
    """What decides a feature beside the picture, hashed."""
    with open(predictor.file, "rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    said = f"{weights} {predictor.info.model} {predictor.info.preprocess} {predictor.precision}"
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def source_features(
    predictor: Predictor,
    source: Source,
    cache: FeatureCache,
    batch_size: int | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> npt.NDArray[np.float32]:
    """The features (N, feature_dim) of a source's pictures, in its order.

    Raises:
        DataError: names a picture that cannot be read.
    """
    width = predictor.info.model.feature_dim
    features = np.empty((len(source), width), np.float32)
    hashes: list[bytes] = []
    missing: list[int] = []
    for i in range(len(source)):
        hashes.append(hashlib.sha256(source.read(i)).digest())
        known = cache.get(hashes[i], width)
        if known is None:
            missing.append(i)
        else:
            features[i] = known
            on_progress(1)
    try:
        embeddings = predictor.embed(_pictures(source, missing), batch_size) if missing else ()
        for i, embedding in zip(missing, embeddings, strict=True):
            if embedding.features is None:
                error = embedding.error or DataError("cannot be read")
                raise DataError(error.what, where=embedding.file, hint=error.hint)
            features[i] = embedding.features
            cache.put(hashes[i], features[i])
            on_progress(1)
    finally:
        cache.close()
    return features


def _pictures(source: Source, indices: list[int]) -> Iterator[Picture]:
    for i in indices:
        yield Picture(source.where(i), partial(source.read, i))
