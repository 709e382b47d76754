"""Few-shot classification on frozen features, by big_vision's protocol (paper, section 4.1): some
images of each class are drawn, least squares sends their features to their classes, and all of
the test part is classified. (big_vision/evaluators/fewshot_lsr.py)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitcli import __version__
from vitcli.atomic import write_text
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.info import CheckpointInfo, ancestry
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.save import write_config
from vitcli.config import Architecture, FewshotConfig, ModelConfig
from vitcli.data.dataset import Splits, open_data
from vitcli.data.source import Source
from vitcli.errors import ConfigError, DataError, OutputError
from vitcli.features import FeatureCache, cache_name, representation, source_features
from vitcli.hub.card import model_card
from vitcli.prediction import Predictor
from vitcli.ridge import Ints, LinearHead, RidgeSolver

Features = npt.NDArray[np.floating]

AUTO_L2 = tuple(2.0**power for power in range(-10, 20))
"""What is chosen from where no l2 is given: the sweep of the authors' code."""


class Draw(NamedTuple):
    """A training subset."""

    shots: int
    seed: int
    examples: Ints
    """Indices into the training part."""


@dataclass(frozen=True)
class Trial:
    """What came of one training subset at one l2; accuracy in [0, 1]."""

    shots: int
    seed: int
    l2: float
    accuracy: float


@dataclass(frozen=True)
class Report:
    """What `measure` found."""

    trials: tuple[Trial, ...]
    """By shots, then seed, then l2, in the order they were asked for."""
    splits: Splits
    images: int
    """Of the test part."""
    saved: Saved | None
    """Where a head was to be kept."""


@dataclass(frozen=True)
class Saved:
    """The trial of the most shots and the first seed and l2, and its head."""

    trial: Trial
    head: LinearHead
    """Its logits are scaled to where their softmax fits left-out examples best."""


def measure(
    predictor: Predictor,
    config: FewshotConfig,
    batch_size: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    keep_head: bool = False,
) -> Report:
    """Measures a model by a few images of each class.

    Args:
        predictor: gives from now on the features that were measured.
        on_progress: called with the images whose features are there and all those needed.
        keep_head: for `save_head`.

    Raises:
        ConfigError: the model cannot be read so, no checkpoint can hold the head that is to be
            kept, or the l2 cannot be used.
        DataError: the data cannot be used, or a class has too few images.
        CheckpointError: the model's features are not finite numbers.
    """
    predictor.info = representation(predictor.info, config.pool, config.layer, config.preprocess)
    if keep_head:
        check_savable(predictor.info.model)
    splits = open_data(config.data, select=False)
    train, test = splits.train, splits.test or splits.val
    if not test:
        raise DataError(
            "nothing is left to test on",
            where=config.data.path,
            hint="add a test part, or hold some out, as in --val-fraction 0.2",
        )
    check_shots(train, max(config.shots), config.data.path)
    draws = [
        Draw(shots, seed, choose_shots(train.labels, len(train.classes), shots, seed))
        for shots in config.shots
        for seed in config.seeds
    ]
    # Of a large training part, only what is drawn is ever looked at.
    used = np.unique(np.concatenate([draw.examples for draw in draws]))
    draws = [draw._replace(examples=np.searchsorted(used, draw.examples)) for draw in draws]
    train, done, name = train.select(used), 0, cache_name(predictor)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, len(train) + len(test))

    learnt, tested = (
        (source_features(predictor, part, FeatureCache(name), batch_size, advance), part.labels)
        for part in (train, test)
    )
    trials, saved = list[Trial](), None
    for trial, head, solver in run_trials(draws, learnt, tested, len(train.classes), config.l2):
        trials.append(trial)
        wanted = keep_head and (trial.shots, trial.seed) == (max(config.shots), config.seeds[0])
        if wanted and saved is None:
            saved = Saved(trial, head.scaled(solver.sharpness(trial.l2)))
    return Report(tuple(trials), splits, len(test), saved)


def check_shots(train: Source, shots: int, where: object = None) -> None:
    """Raises DataError where a class has fewer training images than shots. Classes without any
    image, as a long list of classes may have, are left alone."""
    counts = train.counts()
    short = np.flatnonzero((counts > 0) & (counts < shots))
    if len(short):
        worst = short[counts[short].argmin()]
        such = f" ({len(short):,} such classes)" if len(short) > 1 else ""
        raise DataError(
            f"'{train.classes[worst].name}' has {counts[worst]} training images, too few for "
            f"{shots} shots{such}",
            where=where,
            hint=f"take --shots up to {counts[worst]}",
        )


def choose_shots(labels: Ints, num_classes: int, shots: int, seed: int) -> Ints:
    """Indices of `shots` examples of each class (or all that it has), class by class.

    One generator permutes the examples of all classes in order, so more shots with the same seed
    hold the fewer ones.
    """
    rng = np.random.default_rng(seed)
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=num_classes))
    members = np.split(order, ends[:-1])
    return np.concatenate([rng.permutation(some)[:shots] for some in members])


def run_trials(
    draws: Sequence[Draw],
    train: tuple[Features, Ints],
    test: tuple[Features, Ints],
    num_classes: int,
    l2s: Sequence[float] = FewshotConfig.l2,
) -> Iterator[tuple[Trial, LinearHead, RidgeSolver]]:
    """Solves for each draw and tests on all of `test`.

    Args:
        train, test: features (N, D) and labels (N,).
        l2s: each is tried; none: one is chosen by its left-out errors, never on the test part.

    Raises:
        ConfigError: an l2 cannot be used.
    """
    for shots, seed, examples in draws:
        solver = RidgeSolver(train[0][examples], train[1][examples], num_classes)
        for l2 in l2s or [solver.best_l2(AUTO_L2)]:
            head = solver.solve(l2)
            accuracy = float((head.predict(test[0]) == test[1]).mean())
            yield Trial(shots, seed, l2, accuracy), head, solver


# ---------------------------------------------------------------------------------------------
# A checkpoint of it


def check_savable(model: Architecture) -> None:
    """Raises ConfigError where no checkpoint can hold a head on what is read of the model."""
    if isinstance(model, ModelConfig) and model.distill_token and model.pool != "token":
        raise ConfigError(
            f"a head on pool '{model.pool}' cannot be saved: the heads of a distilled model read "
            "its class and distillation tokens",
            hint="leave --save out, or take --pool token, which is the mean of both",
        )


def model_file(path: Path) -> Path:
    """The file that `save_head` writes the model to."""
    return path if path.suffix == ".safetensors" else path / "model.safetensors"


def save_head(
    predictor: Predictor, config: FewshotConfig, report: Report, path: Path, command: str = ""
) -> CheckpointInfo:
    """Writes the model with the head that `measure` kept: an ordinary checkpoint, whose decisions
    are those that were measured. A model cut after a layer is saved as it was cut.

    Args:
        path: a .safetensors file, or a folder, which gets config.json, the card and the split too.
        command: how the user called it, for the card.

    Raises:
        OutputError: it cannot be written.
    """
    assert report.saved is not None
    trial, head = report.saved.trial, report.saved.head
    read, classes = predictor.info, report.splits.classes
    model = read.model.with_classes(len(classes))
    provenance = ancestry(read, predictor.name) | {
        "made_by": f"vit fewshot (vitcli {__version__})",
        "command": command,
        "data": Path(config.data.path).name,
        "train_images": trial.shots * len(classes),
        "seed": trial.seed,
        "note": f"{trial.shots} shots, least squares with l2 {trial.l2:g} on frozen features",
        "metrics": {"test_top1": trial.accuracy},
    }
    info = CheckpointInfo(model, read.preprocess, classes, "softmax", provenance)
    found = open_checkpoint(predictor.file).tensors
    rows = {"weight": head.weight.astype(np.float32), "bias": head.bias.astype(np.float32)}
    tensors = {
        name: rows[name.rpartition(".")[2]].reshape(shape)
        if name.startswith("head")  # both of a distilled model, whose logits are their mean
        else found[name]
        for name, shape in model.tensor_shapes().items()
    }
    file = model_file(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot be made: {error.strerror or error}", where=file.parent
        ) from error
    tensor_file.write(file, tensors, info.to_metadata())
    if file != path:
        write_config(path / "config.json", info)
        write_text(path / "README.md", model_card(info))
        write_text(path / "split.json", json.dumps(report.splits.record, indent=2) + "\n")
    return info
