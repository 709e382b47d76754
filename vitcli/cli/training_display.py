"""Terminal display of a training run: its events as text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitcli.cli import output, progress
from vitcli.train.presets import LENGTH
from vitcli.words import format_flops, format_size, join_numbers, pluralize

if TYPE_CHECKING:
    from vitcli.train.events import Choice, Event, Plan, Probe, Step, Validation
    from vitcli.train.loop import Outcome


class TrainingDisplay(progress.Display):
    """Shows events on stderr and, with --json, prints them to stdout. The first step is shown
    immediately."""

    def __init__(self, json: bool = False) -> None:
        super().__init__()
        self.json, self.step_shown = json, False
        self.download = progress.DownloadDisplay()
        self.trial: dict[str, float] = {}
        """{"trial": learning rate} during a run of a sweep."""

    def close(self) -> None:
        """Remove the bars."""
        super().close()
        self.download.close()

    def __call__(self, event: Event) -> None:
        from vitcli.train import events

        if isinstance(event, events.Download):
            super().close()
            self.download(event.transfer)
            return
        self.download.close()
        if isinstance(event, events.TrialStart | events.Trial):
            self.trial = {}
        if self.json and not isinstance(event, events.Advance):
            output.json_line(event.to_json() | self.trial)
        match event:
            case events.Advance():
                count = f"{event.done:,} of {event.total:,}"
                self.show(event.what, event.done, event.total, [count])
            case events.Step():
                self._show_step(event)
            case events.Caution():
                output.warning(event.text)
            case events.Note():
                output.note(event.text)
            case events.Plan():
                output.note(*plan_lines(event))
            case events.Validation():
                output.note(validation_text(event))
            case events.Probe():
                output.note(probe_text(event))
            case events.TrialStart():
                self.trial = {"trial": event.lr}
                self.close()  # the bar of the previous run is full
                output.note(f"learning rate {event.lr:g}, {event.number} of {event.of}")
            case events.Trial():
                result = event.failure
                if event.val_top1 is not None:
                    result = f"validation top-1 {event.val_top1:.2%} at step {event.best_step:,}"
                output.note(f"learning rate {event.lr:g}: {result}")
            case events.Choice() if not self.json:
                self.close()
                show_sweep(event)

    def _show_step(self, event: Step) -> None:
        trial = f"learning rate {self.trial['trial']:g}, " if self.trial else ""
        numbers = [
            f"{output.format_duration(event.eta)} left",
            f"loss {event.loss:.4f}",
            *([] if event.accuracy is None else [f"accuracy {event.accuracy:.1%}"]),
            f"{event.images_per_second:,.{1 if event.images_per_second < 100 else 0}f} images/s",
            f"lr {event.lr:.3g}",
        ]
        force = not self.step_shown or event.step == event.steps
        self.step_shown = True
        label = f"{trial}step {event.step:,} of {event.steps:,}"
        self.show(label, event.step, event.steps, numbers, force)


def validation_text(event: Validation) -> str:
    """Format an evaluation as one line."""
    when = f"step {event.step:,}" if event.step else "before step 1"
    key, template = "val_loss", "loss {:.4f}"
    if "val_top1" in event.metrics:
        key, template = "val_top1", "top-1 {:.2%}"
    text = f"{when}: validation {template.format(event.metrics[key])}"
    average = event.metrics.get(f"ema_{key}")
    return text if average is None else f"{text}, EMA weights {template.split()[1].format(average)}"


def probe_text(event: Probe) -> str:
    """Format few-shot accuracies as one line."""
    by_shots = {k.removeprefix("probe_").removesuffix("shot"): v for k, v in event.metrics.items()}
    listed = ", ".join(f"{value:.2%} with {shots} shots" for shots, value in by_shots.items())
    return f"step {event.step:,}: few-shot accuracy {listed}"


def plan_lines(plan: Plan) -> list[str]:
    """Format the plan as a few lines."""
    from vitcli.train.events import SweepPlan

    count = plan.trained_parameters
    trained = f" ({count:,} trained)" if count < plan.parameters else ""
    split = f" in {plan.grad_accum} micro-batches" if plan.grad_accum > 1 else ""
    rate, runs, machine = f"learning rate {plan.lr or 0:g}", "", plan.device
    if isinstance(plan, SweepPlan):
        rate = f"learning rates {join_numbers(plan.sweep)}"
        runs = f" for {len(plan.sweep)} runs{' and a final run' * plan.retrain}"
    if plan.ranks > 1:
        machine = f"{plan.ranks} x {machine.partition(':')[0]}"
    machine += f", {plan.precision}"
    if plan.estimated_seconds is not None:
        machine += f"; about {output.format_duration(max(1, plan.estimated_seconds))}{runs}"
    names = ", ".join([*plan.class_names, "..."][: plan.classes])
    classes = f"{pluralize(plan.classes, 'class', 'classes')}: {names}"
    entries = {
        "model": f"{plan.model}, {plan.parameters:,} parameters{trained}, {plan.resolution[0]} x "
        f"{plan.resolution[1]} px in patches of {format_size(plan.patch_size)}: "
        f"{pluralize(plan.tokens, 'token')} per image",
        "data": f"{pluralize(plan.train_images, 'training image')}, "
        f"{pluralize(plan.val_images, 'validation image')}, "
        + (classes if plan.classes else "labels not used"),
        "plan": f"{pluralize(plan.steps, 'step')} of {pluralize(plan.batch_size, 'image')}{split} "
        f"({plan.epochs:.3g} epoch{'s' * (plan.epochs != 1)}), "
        f"{plan.optimizer}, {rate}, warm-up {pluralize(plan.warmup, 'step')}",
        "cost": f"{format_flops(plan.flops)} per image (forward pass); "
        f"{format_flops(plan.exaflops * 1e18)} in total, including backward passes",
        "machine": machine,
    }
    return [line for name, text in entries.items() for line in _entry(name, text)]


def _entry(name: str, text: str) -> list[str]:
    return output.format_entry(name, text, 11, sys.stderr)


def stored_text(outcome: Outcome) -> str:
    """Describe which weights a run stored."""
    weights = "the EMA weights" if outcome.stored_averaged else "the weights"
    text = f"stored: {weights} of step {outcome.stored_step:,}"
    if {"val_top1", "val_loss"} & outcome.metrics.keys():
        is_last = outcome.config.store == "last"
        text += ", the last" if is_last else ", the best on the validation split"
    if outcome.config.patience and outcome.step < (outcome.config.steps or 0):
        evaluations = pluralize(outcome.config.patience, "evaluation")
        text += f"; stopped after {evaluations} without a better score"
    return text


def preset_event(name: str, preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event with the values of a preset, and the names of those that options override.

    Args:
        preset: from `presets.recipe`.
        given: the options given.
    """
    values = {name.rpartition(".")[2]: value for name, value in preset.items()}
    options = {name.rpartition(".")[2] for name in given}
    values["lr"] = values.pop("sweep", ()) or values["lr"]
    if {"steps", "epochs"} & options:
        options |= {*LENGTH}
    overridden = sorted(options & values.keys())
    return {
        "event": "preset",
        "preset": name,
        **{key: value for key, value in values.items() if key not in overridden},
        "overridden": overridden,
    }


def preset_lines(event: Mapping[str, Any]) -> list[str]:
    """Format the preset's values as an entry, and the names of those overridden as another."""
    names = [name for name in event if name not in ("event", "preset", "overridden")]
    titles = {"lr": "learning rate", "warmup": "warm-up"}
    values = [f"{titles.get(n, n)} {_format_value(n, event[n])}" for n in names]
    lines = _entry("preset", f"{event['preset']}: {', '.join(values)}".replace("_", " "))
    if event["overridden"]:
        overridden = ", ".join(event["overridden"]).replace("_", " ")
        lines += _entry("", f"overridden: {overridden}")
    return lines


def _format_value(name: str, value: Any) -> str:
    if name == "resolution":
        return format_size(value)
    if isinstance(value, tuple):
        return ",".join(f"{number:g}" for number in value)
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def show_sweep(choice: Choice) -> None:
    """Print the table of a sweep to stdout, and what follows to stderr."""
    rows = []
    for trial in choice.trials:
        cells = [trial.failure or "", "", ""]
        if trial.val_top1 is not None:
            loss = "-" if trial.val_loss is None else f"{trial.val_loss:.4f}"
            cells = [f"{trial.val_top1:.2%}", loss, f"{trial.best_step:,}"]
        rows.append([f"{trial.lr:g}", *cells, "best" if trial.lr == choice.lr else ""])
    output.table(["learning rate", "val top-1", "val loss", "step", ""], rows, (0, 1, 2, 3))
    if choice.retrain:
        output.note(
            f"training on the training and validation images with learning rate {choice.lr:g}"
        )
