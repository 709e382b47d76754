"""The end of a run: figures of the stored model, pictures, and the model card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitcli import plots
from vitcli.atomic import write_text
from vitcli.checkpoints import card
from vitcli.checkpoints.load import load
from vitcli.checkpoints.save import rewrite_info
from vitcli.evaluate import evaluate_model
from vitcli.metrics import Evaluation
from vitcli.train.folder import RunFolder, config_to_json
from vitcli.train.state import Progress

if TYPE_CHECKING:
    from vitcli.train.run import Run


def finish(run: Run, folder: RunFolder, progress: Progress) -> dict[str, float]:
    """Evaluates the file as stored on what was not trained on, and writes what a reader wants.

    Returns:
        Those of `Evaluation.figures`, as val_top1 and test_top1, of the parts there are.
    """
    figures: dict[str, float] = {}
    shown: Evaluation | None = None
    model = load(str(folder.path), device=str(run.device))
    for name, part in (("val", run.val), ("test", run.test)):
        if part is None:
            continue
        batch = min(run.config.batch_size or 64, 64)
        shown = evaluate_model(
            model, part, model.preprocess, batch, run.device, run.dtype, score=model.score
        )
        figures |= shown.figures(f"{name}_")
    info = run.stored_info(progress, figures)
    rewrite_info(folder.path, info, train=config_to_json(run.config))
    plots.training_curves(folder.read_metrics(), folder.curves)
    pictures = {"Loss, accuracy and learning rate": folder.curves.name}
    if shown is not None:
        names = [info.classes[i].name for i in shown.seen]
        if len(names) <= plots.DRAWN:
            plots.confusion_matrix(shown.confusion_of(shown.seen), names, folder.confusion)
            pictures["Confusion matrix"] = folder.confusion.name
        plots.reliability(shown.calibration, folder.reliability)
        pictures["Reliability"] = folder.reliability.name
    write_text(folder.card, card.model_card(info, shown, name=folder.name, pictures=pictures))
    return figures
