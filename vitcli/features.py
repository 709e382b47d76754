"""Features of labelled images: which representation they are, and how they are remembered by
content, so that a second run computes none.

A cache is one SQLite file per model and way of computing (hash of the weights' bytes, architecture,
pre-processing, device, precision). Its rows are keyed by the hash of an image's bytes, so that of
renamed, moved and added images only the new ones cost anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitcli import __version__
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import files_of
from vitcli.config import ModelConfig, Pool
from vitcli.data.inputs import ImageInput
from vitcli.data.shards import cache_directory
from vitcli.data.source import Source
from vitcli.errors import NOT_FINITE, CheckpointError, ConfigError, DataError
from vitcli.prediction import Predictor

COMMIT_EVERY = 1000
"""Vectors after which a cache is written to disk: a kill costs no more."""


def representation(
    info: CheckpointInfo,
    pool: Literal["head", Pool] = "head",
    layer: int | None = None,
    preprocess: Literal["big_vision", "checkpoint"] = "checkpoint",
) -> CheckpointInfo:
    """A checkpoint without its head, whose features are another representation. All of its tensors
    are among the checkpoint's, so it is a model like any other: one that ends earlier.

    Args:
        pool: what is read of the tokens; head: as the checkpoint does.
        layer: blocks, from the first on, that are left; the norm behind the last one stays.
        preprocess: as in `FewshotConfig`.

    `pre_logits`, made for one representation, is left out where another is asked for.

    Raises:
        ConfigError: the model cannot be read so.
    """
    model = info.model.with_classes(0)
    if isinstance(model, ModelConfig):
        model = _reread(model, pool, layer)
    elif pool != "head" or layer is not None:
        raise ConfigError("a BiT ResNet has no tokens and no blocks to choose from")
    pixels = info.preprocess
    if preprocess == "big_vision":
        pixels = dataclasses.replace(pixels, **BIG_VISION_PIXELS)
    return dataclasses.replace(info, model=model, preprocess=pixels, classes=(), score="softmax")


BIG_VISION_PIXELS: dict[str, Any] = {
    "interpolation": "bilinear",
    "antialias": False,
    "crop_mode": "squash",
    "crop_pct": 224 / 256,
}
"""resize(256)|central_crop(224) (big_vision/configs/common_fewshot.py)."""


def _reread(model: ModelConfig, pool: Literal["head", Pool], layer: int | None) -> ModelConfig:
    if layer is not None and not 1 <= layer <= model.depth:
        raise ConfigError(f"there is no layer {layer}: the model has {model.depth} blocks")
    wanted = model.pool if pool == "head" else pool
    if wanted == "map" and model.pool != "map":
        raise ConfigError(f"the model has no attention pooling (map); its head reads {model.pool}")
    depth = model.depth if layer is None else layer
    own = pool == "head" and depth == model.depth
    pre_logits = model.pre_logits if own else 0
    return dataclasses.replace(model, pool=wanted, depth=depth, pre_logits=pre_logits)


class FeatureCache:
    """Feature vectors by image hash. A cache that cannot be opened remembers nothing."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.database: sqlite3.Connection | None = None
        self.put_since_commit = 0
        path = (folder or cache_directory().parent / "features") / f"{name}.sqlite"
        with contextlib.suppress(OSError, sqlite3.Error):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.database = sqlite3.connect(path, timeout=10.0)
            self.database.execute(
                "CREATE TABLE IF NOT EXISTS features (image BLOB PRIMARY KEY, vector BLOB)"
            )

    def get(self, image: bytes, width: int) -> npt.NDArray[np.float32] | None:
        """The vector of an image, or None."""
        row = None
        if self.database is not None:
            with contextlib.suppress(sqlite3.Error):
                query = "SELECT vector FROM features WHERE image = ?"
                row = self.database.execute(query, (image,)).fetchone()
        if row is None or len(row[0]) != 4 * width:
            return None
        return np.frombuffer(row[0], "<f4")

    def put(self, image: bytes, vector: npt.NDArray[np.float32]) -> None:
        """Remembers a vector; on disk now and then, and once `close` is called."""
        if self.database is not None:
            with contextlib.suppress(sqlite3.Error):
                row = (image, vector.astype("<f4").tobytes())
                self.database.execute("INSERT OR REPLACE INTO features VALUES (?, ?)", row)
                self.put_since_commit += 1
                if self.put_since_commit >= COMMIT_EVERY:
                    self.database.commit()
                    self.put_since_commit = 0

    def close(self) -> None:
        """Writes what was put."""
        if self.database is not None:
            with contextlib.suppress(sqlite3.Error):
                self.database.commit()
            self.database.close()
            self.database = None


def cache_name(predictor: Predictor) -> str:
    """What decides a feature beside the image, hashed."""
    digest = hashlib.sha256()
    for path in files_of(predictor.file):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    info = predictor.info
    said = (__version__, info.model, info.preprocess, *predictor.wanted)
    digest.update(repr(said).encode())
    return digest.hexdigest()[:32]


def source_features(
    predictor: Predictor,
    source: Source,
    cache: FeatureCache,
    batch_size: int | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> npt.NDArray[np.float32]:
    """The features (N, feature_dim) of a source's images, in its order.

    Raises:
        DataError: names an image that cannot be read.
        CheckpointError: the model makes something else than numbers of an image.
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
        embeddings = predictor.embed(_images(source, missing), batch_size) if missing else ()
        for i, embedding in zip(missing, embeddings, strict=True):
            if embedding.features is None:
                error = embedding.error or DataError("cannot be read")
                raise DataError(error.what, where=embedding.file, hint=error.hint)
            if not np.isfinite(embedding.features).all():
                raise CheckpointError(
                    f"its features of {embedding.file} are not finite numbers",
                    where=predictor.name,
                    hint=NOT_FINITE,
                )
            features[i] = embedding.features
            cache.put(hashes[i], features[i])
            on_progress(1)
    finally:
        cache.close()
    return features


def _images(source: Source, indices: list[int]) -> Iterator[ImageInput]:
    for i in indices:
        yield ImageInput(source.where(i), partial(source.read, i))
