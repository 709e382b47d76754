"""The end of a run: figures of the stored model, pictures, and the model card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitcli import plots
from vitcli.atomic import write_text
from vitcli.checkpoints import card
from vitcli.checkpoints.load import load
from vitcli.checkpoints.save import rewrite_info
from vitcli.evaluate import Evaluation, evaluate_model
from vitcli.train.folder import RunFolder, config_to_json
from vitcli.train.state import Progress

if TYPE_CHECKING:
    from vitcli.train.setup import Run


def finish(run: Run, folder: RunFolder, progress: Progress) -> dict[str, float]:
    """Evaluates the file as stored on what was not trained on, and writes what a reader wants.

    Returns:
        Accuracies in [0, 1]: val_top1, val_top5, test_top1, test_top5, of the parts there are.
    """
    figures: dict[str, float] = {}
    shown: Evaluation | None = None
    model = load(str(folder.path), device=str(run.device))
    for name, part in (("val", run.val), ("test", run.test)):
        if part is None:
            continue
        batch = min(run.config.batch_size or 64, 64)
        shown = evaluate_model(model, part, model.preprocess, batch, run.device, run.dtype)
        figures |= {f"{name}_top1": shown.top1, f"{name}_top5": shown.top5}
    info = run.stored_info(progress, figures)
    rewrite_info(folder.path, info, train=config_to_json(run.config))
    plots.training_curves(folder.read_metrics(), folder.curves)
    pictures = {"Loss, accuracy and learning rate": folder.curves.name}
    if shown is not None:
        names = [label.name for label in info.classes]
        plots.confusion_matrix(shown.confusion, names, folder.confusion)
        pictures["Confusion matrix"] = folder.confusion.name
    write_text(folder.card, card.model_card(info, shown, name=folder.path.name, pictures=pictures))
    return figures
