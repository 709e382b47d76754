"""The end of a run: figures of the stored model, images, and the model card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitcli import plots
from vitcli.atomic import write_text
from vitcli.checkpoints.load import load
from vitcli.checkpoints.save import rewrite_info
from vitcli.evaluate import evaluate_model
from vitcli.hub import card
from vitcli.metrics import Evaluation
from vitcli.train.directory import RunDirectory, config_to_json
from vitcli.train.inputs import Report, counting
from vitcli.train.state import Progress

if TYPE_CHECKING:
    from vitcli.train.run import Run


def finish(run: Run, folder: RunDirectory, progress: Progress, report: Report) -> dict[str, float]:
    """Evaluates the file as stored on what was not trained on, and writes what a reader wants.

    Returns:
        Those of `Evaluation.figures`, as val_top1 and test_top1, of the parts there are.
    """
    figures, shown = _evaluate(run, folder, report)
    info = run.stored_info(progress, figures)
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
    return figures


def _evaluate(
    run: Run, folder: RunDirectory, report: Report
) -> tuple[dict[str, float], Evaluation | None]:
    """The figures, and the evaluation of the last part. The model goes with this call: it is its
    file, mapped into memory, which Windows would not let us replace."""
    figures: dict[str, float] = {}
    found: Evaluation | None = None
    model = load(str(folder.path), device=str(run.device))
    for name, what, part in (("val", "validation", run.val), ("test", "test", run.test)):
        if part is not None:
            found = evaluate_model(
                *(model, part, model.preprocess, min(run.part_size, 64), run.device, run.dtype),
                *(run.config.workers or 0, model.score, counting(what, len(part), report)),
            )
            figures |= found.figures(f"{name}_")
    return figures, found
