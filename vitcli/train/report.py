"""The end of a run: metrics of the stored model, plots, and the model card."""

import contextlib
import dataclasses

import numpy as np

from vitcli.atomic import write_text
from vitcli.checkpoints.info import unique_names
from vitcli.checkpoints.save import rewrite_info
from vitcli.errors import DataError
from vitcli.figures import plots
from vitcli.hub import card
from vitcli.inference import run_source
from vitcli.metrics import Evaluation
from vitcli.prediction import Predictor
from vitcli.train.events import Caution
from vitcli.train.inputs import MaskedInference, evaluate_split
from vitcli.train.masking import Masking
from vitcli.train.run import Run

NUM_IMAGES = 8
"""Number of images in a figure."""


def finish(run: Run) -> dict[str, float]:
    """Evaluate the stored model on the held-out splits, as `vit evaluate` does, and write plots and
    the model card.

    Returns:
        The metrics of each split, such as val_top1 and test_top1.
    """
    directory, path = run.directory, run.directory.path
    metrics, evaluation = _evaluate(run)
    if not run.ranks.is_first:
        return metrics
    info = run.stored_info(metrics)
    rewrite_info(path, info, train=dataclasses.asdict(run.config))
    plots.training_curves(
        directory.lines(directory.metrics), path / card.CURVES, run.progress.best_step
    )
    if evaluation is not None:
        seen, names = evaluation.seen, unique_names(info.classes)
        if len(seen) <= plots.MAX_DRAWN:
            counts = evaluation.confusion_matrix(seen)
            plots.confusion_matrix(counts, [names[i] for i in seen], path / card.CONFUSION)
        plots.reliability(*evaluation.calibration, evaluation.ece, path / card.RELIABILITY)
    text = card.model_card(info, evaluation, name=directory.name, images=card.figures_in(path))
    write_text(directory.card, text)
    return metrics


def draw(run: Run) -> None:
    """Draw the current reconstructions of a few validation images, if the objective hides patches;
    the figure of the previous evaluation is replaced."""
    objective, val = run.objective, run.splits.val
    if not isinstance(objective, Masking) or val is None:
        return
    chosen = np.array(sorted({i * len(val) // NUM_IMAGES for i in range(NUM_IMAGES)}))
    images, inference = val.select(chosen), MaskedInference(run, objective)
    with contextlib.suppress(DataError):  # none of them can be read
        for _, _, outputs in run_source(images, inference, "reconstructions", run.workers):
            if run.ranks.is_first and len(outputs):
                original, masked, reconstructed = outputs.transpose(0, 1).numpy()
                path = run.directory.path / card.RECONSTRUCTION
                plots.reconstructions(original, masked, reconstructed, path)


def _evaluate(run: Run) -> tuple[dict[str, float], Evaluation | None]:
    """Return the metrics of every held-out split, and the evaluation of the last. The model is
    freed on return, as Windows could not replace its memory-mapped file otherwise."""
    metrics: dict[str, float] = {}
    evaluation: Evaluation | None = None
    if not run.objective.classifies:  # the score that chose the stored model is its only metric
        score = run.progress.stored_score
        return {} if score is None else {"val_loss": -score}, None
    predictor = Predictor(run.directory.path, str(run.device), run.config.precision)
    splits = run.splits
    for name, title, split in (("val", "validation", splits.val), ("test", "test", splits.test)):
        if split is None:
            continue
        try:
            evaluation = evaluate_split(run, split, title, predictor)
            metrics |= evaluation.metrics(f"{name}_")
        except DataError as error:  # none of its images is readable, but the run is finished
            run.on_event(Caution(f"{title} split: {error}"))
    return metrics, evaluation
