"""The end of a run: metrics of the stored model, plots, and the model card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitcli import plots
from vitcli.atomic import write_text
from vitcli.checkpoints.save import rewrite_info
from vitcli.evaluate import evaluate_source
from vitcli.hub import card
from vitcli.metrics import Evaluation
from vitcli.prediction import Predictor
from vitcli.train.directory import RunDirectory, config_to_json
from vitcli.train.inputs import Report, counting
from vitcli.train.state import Progress

if TYPE_CHECKING:
    from vitcli.train.run import Run


def finish(run: Run, folder: RunDirectory, progress: Progress, report: Report) -> dict[str, float]:
    """Evaluates the stored model on the held-out splits, as `vit evaluate` does, and writes plots
    and the card.

    Returns:
        The metrics of each split, as val_top1 and test_top1.
    """
    metrics, shown = _evaluate(run, folder, report)
    info = run.stored_info(progress, metrics)
    rewrite_info(folder.path, info, train=config_to_json(run.config))
    plots.training_curves(folder.read_metrics(), folder.curves, progress.best_step)
    images = {"Loss, accuracy and learning rate": folder.curves.name}
    if shown is not None:
        names = [info.classes[i].name for i in shown.seen]
        if len(names) <= plots.DRAWN:
            plots.confusion_matrix(shown.confusion_of(shown.seen), names, folder.confusion)
            images["Confusion matrix"] = folder.confusion.name
        bins = shown.calibration
        plots.reliability(
            bins.counts, bins.confidence, bins.accuracy, bins.error, folder.reliability
        )
        images["Reliability"] = folder.reliability.name
    write_text(folder.card, card.model_card(info, shown, name=folder.name, images=images))
    return metrics


def _evaluate(
    run: Run, folder: RunDirectory, report: Report
) -> tuple[dict[str, float], Evaluation | None]:
    """The metrics of every held-out split, and the evaluation of the last. The model is dropped
    here: its file is mapped into memory, and Windows would not replace it."""
    metrics: dict[str, float] = {}
    found: Evaluation | None = None
    predictor = Predictor(folder.path, str(run.device), run.config.precision)
    for name, what, split in (("val", "validation", run.val), ("test", "test", run.test)):
        if split is not None:
            advance = counting(what, len(split), report)
            found = evaluate_source(
                predictor.load(), split, workers=run.config.workers, on_progress=advance
            )
            metrics |= found.metrics(f"{name}_")
    return metrics, found
