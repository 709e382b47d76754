"""Few-shot accuracy during a run, a measure of feature quality.

The protocol of `vit fewshot` (`evaluation/fewshot.py`; paper, section 4.1) with one draw: a
least-squares classifier is fitted to the features of a few training images per class, and evaluated
on the validation split. Images are preprocessed as in the run's own evaluations.
"""

import numpy as np
import numpy.typing as npt
import torch

from vitcli.data.source import Ints, Source
from vitcli.errors import NOT_FINITE, DivergedError, RunError
from vitcli.evaluation.fewshot import sample_shots
from vitcli.evaluation.ridge import RidgeSolver
from vitcli.inference import Inference, run_source
from vitcli.train.inputs import track_progress
from vitcli.train.run import Run

SHOTS = (5, 10)
"""Training images per class, up to the size of the smallest class; if that has fewer than 5, all
of its images."""
SEED, L2 = 0, 2.0**10


def shots_of(train: Source, val: Source | None) -> tuple[int, ...]:
    """Return the numbers of training images per class to use.

    Raises:
        RunError: there are fewer than two classes, or no validation images.
    """
    counts = train.counts()
    if np.count_nonzero(counts) < 2 or val is None:
        raise RunError(
            "--probe-every requires at least two classes and a validation split",
            where=train.root,
            hint="leave out --probe-every",
        )
    smallest = int(counts[counts > 0].min())
    return tuple(shots for shots in SHOTS if shots <= smallest) or (smallest,)


def measure(run: Run) -> dict[str, float]:
    """Return the few-shot accuracy of a run's model for each number of shots, always with the same
    images: probe_5shot, ... The ranks divide the images, then the numbers of shots."""
    train, val, ranks = run.splits.images, run.splits.val, run.ranks
    assert val is not None
    shots = shots_of(train, val)
    draws = [(n, sample_shots(train.labels, len(train.classes), n, SEED)) for n in shots]
    used = np.unique(draws[-1][1])  # draws with more shots include smaller ones
    inference = run.inference(run.model)
    x, read = _compute_features(run, inference, train.select(used))
    x_val, read_val = _compute_features(run, inference, val)
    images, accuracies = used[read], dict[str, float]()
    for n, draw in draws[ranks.rank :: ranks.world_size]:
        rows = np.flatnonzero(np.isin(images, draw))
        solver = RidgeSolver(x[rows], train.labels[images[rows]], len(train.classes))
        correct = solver.solve(L2).predict(x_val) == val.labels[read_val]
        accuracies[f"probe_{n}shot"] = float(correct.mean())
    return {key: value for results in ranks.gather(accuracies) for key, value in results.items()}


def _compute_features(
    run: Run, inference: Inference, source: Source
) -> tuple[npt.NDArray[np.float32], Ints]:
    """Return the features (n, D) of the readable images, and their indices in the source (n,)."""
    advance = track_progress("probe", len(source), run.on_event)
    batches = run_source(source, inference, "features", run.workers, advance, run.skip)
    _, indices, outputs = zip(*batches, strict=True)
    features = torch.cat(outputs)
    if not features.isfinite().all():
        where = run.directory.path
        raise DivergedError("the features are not finite", where=where, hint=NOT_FINITE)
    return features.numpy(), np.concatenate(indices)
