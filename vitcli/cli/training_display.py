"""A training run on the screen: its events as text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitcli.cli import output
from vitcli.train_config import TrainConfig

if TYPE_CHECKING:
    from vitcli.train.loop import Outcome


def event_text(event: Mapping[str, Any]) -> str | None:
    """What a user reads of an event; None where that is nothing."""
    kind = event["event"]
    if kind == "note":
        return str(event["text"])
    if kind == "plan":
        return plan_text(event)
    if kind == "evaluation":
        return evaluation_text(event)
    if kind == "trial":
        return f"learning rate {event['lr']:g}, {event['number']} of {event['of']}"
    if kind == "trial_result":
        return f"learning rate {event['lr']:g}: {event['failure'] or _trial_text(event)}"
    return None


def _trial_text(event: Mapping[str, Any]) -> str:
    return f"validation accuracy {event['val_top1']:.2%} at step {event['best_step']:,}"


def evaluation_text(event: Mapping[str, Any]) -> str:
    """An evaluation in one line."""
    step = event["step"]
    when = f"step {step:,}" if step else "before step 1"
    average = f", of the average {event['ema_val_top1']:.2%}" if "ema_val_top1" in event else ""
    return f"{when}: validation accuracy {event['val_top1']:.2%}{average}"


def plan_text(event: Mapping[str, Any]) -> str:
    """The plan in a few lines."""
    size, patch = event["resolution"], event["patch_size"]
    trained = event["trained_parameters"]
    some = f" ({trained:,} trained)" if trained < event["parameters"] else ""
    parts = f" in {event['accumulate']} parts" if event["accumulate"] > 1 else ""
    rate, runs = f"learning rate {event['lr'] or 0:g}", ""
    if event.get("sweep"):
        rate = f"learning rates {numbers(event['sweep'])}"
        then = ", then the best on everything" if event["retrain"] else ""
        runs = f" for {len(event['sweep'])} runs{then}"
    lines = {
        "model": f"{event['model']}, {event['parameters']:,} parameters{some}, {size[0]} x "
        f"{size[1]} px in patches of {patch[0]}: {event['tokens']:,} tokens an image",
        "data": f"{event['train_images']:,} images to train on, {event['val_images']:,} to "
        f"validate, {event['classes']:,} classes",
        "plan": f"{event['steps']:,} steps of {event['batch_size']}{parts} ({event['epochs']:.3g} "
        f"epochs), {event['optimizer']}, {rate}, warm-up {event['warmup']} steps",
        "machine": f"{event['device']}, {event['precision']}; about "
        f"{output.duration(event['estimated_seconds'])}{runs}",
    }
    return "\n".join(_line(name, text) for name, text in lines.items())


def _line(name: str, text: str) -> str:
    return output.entry(name, text, 11, sys.stderr)


def stored_text(outcome: Outcome) -> str:
    """Which weights a run left in its folder."""
    what = "the averaged weights" if outcome.stored_averaged else "the weights"
    text = f"stored: {what} of step {outcome.stored_step:,}"
    if "val_top1" in outcome.figures:
        text += ", the best on validation"
    if outcome.config.patience and outcome.step < (outcome.config.steps or 0):
        text += f"; {outcome.config.patience} evaluations without a better one ended the run"
    return text


_PRESET_FIELDS = (
    *("steps", "batch_size", "warmup", "resolution", "optimizer", "momentum", "weight_decay"),
    *("clip_norm", "schedule"),
)


def preset_event(name: str, given: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """A preset's values, and which of them options replaced."""
    values: dict[str, Any] = {
        "lr": config.sweep or (config.lr,),
        "val_fraction": config.data.val_fraction,
    }
    values |= {field: getattr(config, field) for field in _PRESET_FIELDS}
    overridden = sorted(
        key for key in {**given, **given.get("data", {})} if key in values or key == "epochs"
    )
    return {"event": "preset", "preset": name, **values, "overridden": overridden}


def preset_text(event: Mapping[str, Any]) -> str:
    """The preset in a line, and one for what replaces some of it."""
    height, width = event["resolution"]
    length = "steps by --epochs" if event["steps"] is None else f"{event['steps']:,} steps"
    warmup = "by the auto rule" if event["warmup"] is None else f"{event['warmup']} steps"
    told = (
        f"{event['preset']}: {length} of {event['batch_size']}, {height} x {width} px, "
        f"learning rate {numbers(event['lr'])}, warm-up {warmup}, {event['schedule']} decay, "
        f"{event['optimizer']}, momentum {event['momentum']:g}, weight decay "
        f"{event['weight_decay']:g}, clipped at norm {event['clip_norm']:g}, "
        f"{event['val_fraction']:.0%} held out"
    )
    lines = [_line("preset", told)]
    if event["overridden"]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in event["overridden"])
        lines.append(_line("", f"overridden: {names}"))
    return "\n".join(lines)


def show_sweep(event: Mapping[str, Any], quiet: bool) -> None:
    """The table of a sweep, on stdout; what comes next, on stderr."""
    rows = []
    for trial in event["trials"]:
        mark = "best" if trial["lr"] == event["lr"] else ""
        figures = [trial["failure"] or "", "", ""]
        if trial["val_top1"] is not None:
            figures = [f"{trial['val_top1']:.2%}", _loss(trial["val_loss"])]
            figures.append(f"{trial['best_step']:,}")
        rows.append([f"{trial['lr']:g}", *figures, mark])
    output.table(["learning rate", "val top1", "val loss", "best step", ""], rows, (0, 1, 2, 3))
    if event["retrain"]:
        output.note(f"learning rate {event['lr']:g}, on everything", quiet)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def numbers(values: list[float]) -> str:
    """0.003, 0.01 and 0.03"""
    words = [f"{value:g}" for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
