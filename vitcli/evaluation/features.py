"""Features of labeled images: choosing the representation, and a content-addressed cache that saves
computing them again.

There is one SQLite file per model and configuration (hash of weights, architecture, preprocessing,
device and precision). Rows are keyed by the hash of the image's bytes, so renamed and moved images
are still cached.
"""

import contextlib
import dataclasses
import hashlib
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitcli import __version__
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import files_of
from vitcli.config import FewshotConfig, ModelConfig
from vitcli.data.cache import cache_directory
from vitcli.data.image_inputs import ImageInput
from vitcli.data.source import Source
from vitcli.devices import choose_device, choose_precision
from vitcli.errors import NOT_FINITE, CheckpointError, ConfigError, ImageError
from vitcli.inference import current_ranks
from vitcli.prediction import Predictor

HASHED_IMAGES = 4096
"""Number of images to hash before their features are computed: the system still has their files in
memory then, and progress is shown soon."""
COMMIT_EVERY = 1000
"""Number of vectors between writes to disk, and the most that are lost if killed."""
BIG_VISION: dict[str, Any] = {
    "interpolation": "bilinear",
    "antialias": False,
    "crop_mode": "squash",
    "crop_pct": 224 / 256,
    "crop_rounding": "down",
}
"""resize(256)|central_crop(224) (big_vision/configs/common_fewshot.py)."""


def representation(info: CheckpointInfo, config: FewshotConfig) -> CheckpointInfo:
    """Describe a checkpoint without its head, with the pool, layer and transform from `config`. Its
    tensors are a subset of the checkpoint's. `pre_logits` is kept only with the head's own pool and
    the last layer.

    Raises:
        ConfigError: the model has no such representation.
    """
    model, preprocess = info.model.with_classes(0), info.preprocess
    if isinstance(model, ModelConfig):
        depth = model.depth if config.layer is None else config.layer + 1
        if depth > model.depth:
            raise ConfigError(
                f"--layer {depth - 1}: the model has no such block",
                hint=f"its blocks are 0 to {model.depth - 1}",
            )
        pool = model.pool if config.pool == "head" else config.pool
        if pool == "map" and model.pool != "map":
            raise ConfigError(
                f"the model has no attention pooling: its head uses {model.pool} pooling"
            )
        keep_pre_logits = config.pool == "head" and depth == model.depth
        pre_logits = model.pre_logits if keep_pre_logits else 0
        model = dataclasses.replace(model, pool=pool, depth=depth, pre_logits=pre_logits)
    elif config.pool != "head" or config.layer is not None:
        raise ConfigError("a BiT ResNet has neither tokens to pool nor transformer blocks")
    if config.transform == "big_vision":
        preprocess = dataclasses.replace(preprocess, **BIG_VISION)
    return dataclasses.replace(
        info, model=model, preprocess=preprocess, classes=(), score="softmax"
    )


class FeatureCache:
    """Feature vectors by image hash. Falls back to memory if the file cannot be used."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self.pending = dict[bytes, bytes]()
        path = (directory or cache_directory("features")) / f"{name}.sqlite"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.database = self._open(path)
        except (OSError, sqlite3.Error):
            self.database = self._open(":memory:")

    def _open(self, path: Path | str) -> sqlite3.Connection:
        database = sqlite3.connect(path, timeout=10.0)
        columns = "(image BLOB PRIMARY KEY, vector BLOB)"
        database.execute(f"CREATE TABLE IF NOT EXISTS features {columns}")
        return database

    def get(self, image_hash: bytes) -> npt.NDArray[np.float32] | None:
        """Return the vector of an image, or None if it is not cached."""
        if image_hash in self.pending:
            return np.frombuffer(self.pending[image_hash], "<f4")
        with contextlib.suppress(sqlite3.Error):
            query = "SELECT vector FROM features WHERE image = ?"
            for (vector,) in self.database.execute(query, (image_hash,)):
                return np.frombuffer(vector, "<f4")
        return None

    def put(self, image_hash: bytes, vector: npt.NDArray[np.float32]) -> None:
        """Add a vector; it is written to disk by `close` at the latest."""
        self.pending[image_hash] = vector.astype("<f4").tobytes()
        if len(self.pending) % COMMIT_EVERY == 0:
            self._write()

    def _write(self) -> None:
        """Write in one short transaction, as other processes may use the same cache."""
        with contextlib.suppress(sqlite3.Error), self.database:
            rows = self.pending.items()
            self.database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?)", rows)
            self.pending = {}

    def close(self) -> None:
        """Write pending vectors and close the database."""
        self._write()
        self.database.close()


def cache_name(predictor: Predictor) -> str:
    """Return a hash of everything but the image that affects the features."""
    digest = hashlib.sha256()
    for path in files_of(predictor.file):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    info = predictor.info
    device = choose_device(predictor.requested[0])
    precision = choose_precision(predictor.requested[1], device)
    settings = (info.model, info.preprocess, predictor.posemb_method, device.type, precision)
    digest.update(repr((__version__, *settings)).encode())
    return digest.hexdigest()[:32]


def cached_features(
    predictor: Predictor,
    cache: FeatureCache,
    batch_size: int | None,
    workers: int | None,
    strict: bool,
    source: Source,
    on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[npt.NDArray[np.float32], dict[int, ImageError]]:
    """Return the features of a source's images in order, (N, feature_dim), and the errors of those
    that cannot be read, whose rows are NaN.

    Args:
        workers: number of decoding threads; None for one per core.
        strict: raise the error of the first image that cannot be read.
        on_progress: called with the number of images done.

    Raises:
        CheckpointError: a feature is not finite.
        ImageError: an image cannot be read and `strict` is set.
    """
    ranks = current_ranks()
    is_first = ranks is None or ranks.is_first
    features = np.full((len(source), predictor.info.model.feature_dim), np.nan, np.float32)
    unreadable, done = dict[int, ImageError](), 0
    for start in range(0, len(source), HASHED_IMAGES):
        rows = slice(start, start + HASHED_IMAGES)
        hashes, missing = dict[int, bytes](), list[int]()
        for i in range(len(source))[rows] if is_first else ():
            with contextlib.suppress(ImageError):
                hashes[i] = hashlib.sha256(source.read(i)).digest()
            cached = cache.get(hashes[i]) if i in hashes else None
            if cached is None:
                missing.append(i)
            else:
                features[i] = cached
                done += 1
                on_progress(done)
        if ranks is not None:  # ranks may not share a cache
            features[rows], missing, done = ranks.broadcast((features[rows], missing, done))
        images = (ImageInput(source.where(i), partial(source.read, i)) for i in missing)
        embeddings = predictor.embed(images, batch_size, workers) if missing else ()
        for i, embedding in zip(missing, embeddings, strict=True):
            vector, error = embedding.features, embedding.error
            if error is not None:
                if strict:
                    raise error
                unreadable[i] = error
            elif vector is None or not np.isfinite(vector).all():
                raise CheckpointError(
                    f"the features of {embedding.file} are not finite",
                    where=predictor.name,
                    hint=NOT_FINITE,
                )
            else:
                features[i] = vector
                if i in hashes:
                    cache.put(hashes[i], vector)
            done += 1
            on_progress(done)
    return features, unreadable
