"""Few-shot classification on frozen features, following big_vision's protocol (paper, section 4.1):
sample a few images per class, fit a linear classifier to their features by least squares, and
classify the whole test split. (big_vision/evaluators/fewshot_lsr.py)
"""

import contextlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vitcli import __version__
from vitcli.atomic import atomic_directory, make_directory, write_text
from vitcli.checkpoints.adapt import adapt, resampled_tensors
from vitcli.checkpoints.info import CheckpointInfo, ancestry
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.save import write_config, write_weights
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import FewshotConfig
from vitcli.data.dataset import Splits, open_splits
from vitcli.data.source import Source
from vitcli.errors import ConfigError, DataError, ImageError
from vitcli.evaluation.features import FeatureCache, cache_name, cached_features, representation
from vitcli.evaluation.ridge import Ints, LinearHead, RidgeSolver
from vitcli.hub.card import model_card
from vitcli.prediction import Predictor
from vitcli.words import pluralize

AUTO_L2 = tuple(2.0**power for power in range(-10, 20))
"""Candidates for automatic l2: the sweep in the authors' code."""


@dataclass(frozen=True)
class Trial:
    """Accuracy, in [0, 1], for one sample of training images and one l2."""

    shots: int
    seed: int
    l2: float
    accuracy: float


@dataclass(frozen=True)
class Report:
    """The result of `measure`."""

    model: CheckpointInfo
    """The model that computed the features: without a head, possibly truncated after a layer."""
    trials: tuple[Trial, ...]
    """Ordered by shots, then seed, then l2, as in the configuration."""
    splits: Splits
    tested: int
    """Number of test images classified."""
    unreadable: tuple[ImageError, ...]
    """Errors of skipped images."""
    saved: tuple[Trial, LinearHead] | None
    """The trial with the most shots and the first seed and l2, and its head, with logits scaled to
    minimize the leave-one-out cross-entropy."""


def measure(
    predictor: Predictor,
    config: FewshotConfig,
    batch_size: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    keep_head: bool = False,
    strict: bool = False,
    workers: int | None = None,
) -> Report:
    """Measure the few-shot accuracy of a model's features. An unreadable training image is
    replaced by another of its class.

    Args:
        on_progress: called with the number of images whose features are known, and the total.
        keep_head: keep a head for `save_head`.
        strict: raise the error of the first image that cannot be read.
        workers: number of decoding threads; None for one per core.

    Raises:
        ConfigError: the model has no such features, no checkpoint can hold a head on them, or the
            system is singular at the given l2.
        DataError: the dataset cannot be used, or a class has too few images.
        CheckpointError: the features are not finite.
    """
    info = representation(predictor.info, config)
    extractor = predictor.with_info(info)
    if keep_head:
        try:
            info.model.with_classes(1)
        except ConfigError as error:  # no checkpoint can hold a head on these features
            hint = "leave out --save, or use --pool token"
            raise ConfigError(error.what, hint=hint) from error
    splits = open_splits(config.data, select=False)
    train, test = splits.images, splits.test or splits.val
    if not test:
        raise DataError(
            "there is no test split",
            where=config.data.path,
            hint="add one, or leave out --val-fraction 0"
            if config.data.val_fraction == 0
            else "add one: no class has two images, so none can be held out",
        )
    draws = [(shots, seed) for shots in config.shots for seed in config.seeds]
    unreadable, classes = dict[int, ImageError](), len(train.classes)

    def report_from(offset: int, total: int) -> Callable[[int], None]:
        return lambda done: on_progress(offset + done, total)

    with contextlib.closing(FeatureCache(cache_name(extractor))) as cache:
        compute = partial(cached_features, extractor, cache, batch_size, workers, strict)
        while True:
            check_shots(train, max(config.shots), unreadable, config.data.path)
            samples = [sample_shots(train.labels, classes, *draw, unreadable) for draw in draws]
            # Read only the sampled images of the training split, which may be large.
            sampled = np.unique(np.concatenate(samples))
            total = len(sampled) + len(test)
            x, errors = compute(train.select(sampled), report_from(0, total))
            if not errors:
                break
            unreadable |= {int(sampled[i]): error for i, error in errors.items()}
        x_test, errors = compute(test, report_from(len(sampled), total))
    if errors:
        readable = np.setdiff1d(np.arange(len(test)), list(errors))
        test, x_test = test.select(readable), x_test[readable]
    if not len(test):
        raise DataError("no image of the test split can be read", where=config.data.path)
    y = train.labels[sampled]
    trials, saved = list[Trial](), None
    for (shots, seed), sample in zip(draws, samples, strict=True):
        rows = np.searchsorted(sampled, sample)
        solver = RidgeSolver(x[rows], y[rows], classes)
        for l2 in config.l2 or [solver.best_l2(AUTO_L2)]:
            head = solver.solve(l2)
            trial = Trial(shots, seed, l2, float((head.predict(x_test) == test.labels).mean()))
            trials.append(trial)
            is_saved = saved is None and (shots, seed) == (max(config.shots), config.seeds[0])
            if keep_head and is_saved:
                saved = trial, head.scaled(solver.logit_scale(l2))
    skipped = (*unreadable.values(), *errors.values())
    return Report(info, tuple(trials), splits, len(test), skipped, saved)


def check_shots(
    train: Source, shots: int, unreadable: Collection[int] = (), where: object = None
) -> None:
    """Raise DataError if a class has fewer readable images than `shots`. Classes without images,
    which a long list of classes may contain, are ignored."""
    counts = train.counts()
    available = counts - np.bincount(train.labels[list(unreadable)], minlength=len(counts))
    lacking = np.flatnonzero((counts > 0) & (available < shots))
    if len(lacking):
        worst = lacking[available[lacking].argmin()]
        name, count = train.classes[worst].name, int(available[worst])
        note = f" ({len(lacking):,} classes have too few)" if len(lacking) > 1 else ""
        kind = "readable training image" if unreadable else "training image"
        raise DataError(
            f"class '{name}' has {pluralize(count, kind)}, "
            f"fewer than {pluralize(shots, 'shot')}{note}",
            where=where,
            hint=f"use --shots {count} or fewer" if count else None,
        )


def sample_shots(
    labels: Ints, num_classes: int, shots: int, seed: int, unreadable: Collection[int] = ()
) -> Ints:
    """Sample `shots` readable examples of each class (all if it has fewer); return their indices,
    grouped by class.

    One generator permutes the examples of all classes in order, so with the same seed, the examples
    for fewer shots are a subset of those for more.
    """
    rng, limit = np.random.default_rng(seed), shots + len(unreadable)
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=num_classes))
    sample = list[int]()
    for members in np.split(order, ends[:-1]):
        permuted = rng.permutation(members)[:limit].tolist()
        sample += [i for i in permuted if i not in unreadable][:shots]
    return np.array(sample, np.int64)


# ---------------------------------------------------------------------------------------------
# Saving the head


def model_file(path: Path) -> Path:
    """Path of the weights file that `save_head` writes."""
    return path if path.suffix == ".safetensors" else path / "model.safetensors"


def save_head(
    predictor: Predictor, config: FewshotConfig, report: Report, path: Path, command: str = ""
) -> None:
    """Save the model with the head kept by `measure` as an ordinary checkpoint, truncated after the
    layer if one was chosen.

    Args:
        path: a .safetensors file, or a directory, which also gets config.json, the model card and
            the split.
        command: the user's command line, for the model card.

    Raises:
        OutputError: the checkpoint cannot be written.
    """
    assert report.saved is not None
    (trial, head), classes = report.saved, report.splits.classes
    model = report.model.model.with_classes(len(classes))
    provenance = ancestry(predictor.info, predictor.name) | {
        "made_by": f"vit fewshot (vitcli {__version__})",
        "command": command,
        "data": config.data.name,
        "train_images": trial.shots * int(np.count_nonzero(report.splits.images.counts())),
        "seed": trial.seed,
        "note": f"{pluralize(trial.shots, 'shot')}, "
        f"least squares with l2 {trial.l2:g} on frozen features",
        "metrics": {"test_top1" if report.splits.test else "val_top1": trial.accuracy},
    }
    if resized := predictor.info.provenance.get("posemb_resize"):
        provenance["posemb_resize"] = resized
    info = CheckpointInfo(model, report.model.preprocess, classes, "softmax", provenance)
    stored = _read_tensors(predictor)
    head_tensors = {"weight": head.weight.astype(np.float32), "bias": head.bias.astype(np.float32)}
    tensors = {
        name: head_tensors[name.rpartition(".")[2]].reshape(shape)
        if name.startswith("head")  # a distilled model has two, and averages their logits
        else stored[name]
        for name, shape in model.tensor_shapes().items()
    }
    file = model_file(path)
    if file == path:
        make_directory(file.parent)
        write_weights(file, tensors, info)
        return
    with atomic_directory(path) as directory:
        write_weights(directory / file.name, tensors, info)
        write_config(directory / "config.json", info)
        write_text(directory / "README.md", model_card(info))
        write_text(directory / "split.json", json.dumps(report.splits.record, indent=2) + "\n")


def _read_tensors(predictor: Predictor) -> dict[str, np.ndarray | LazyTensor]:
    """The checkpoint's tensors, resized for the predictor's resolution."""
    tensors = open_checkpoint(predictor.file).tensors
    old, new = predictor.stored_model, predictor.info.model
    if new == old:
        return {**tensors}
    tables = {name: tensors[name].read() for name in resampled_tensors(old)}
    return {**tensors, **adapt(tables, old, new, predictor.posemb_method)}
