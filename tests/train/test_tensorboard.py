"""What TensorBoard reads, by its own reader."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

from vitcli import plots
from vitcli.errors import MissingExtraError
from vitcli.train.directory import RunDirectory
from vitcli.train.loop import train

pytest.importorskip("tensorboard")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Images take longer than these runs."""
    for name in ("training_curves", "confusion_matrix", "reliability"):
        monkeypatch.setattr(plots, name, lambda *arguments: None)


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """{tag: (step, value)} as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def assert_as_metrics(run) -> None:
    """The scalars are the lines of metrics.jsonl, each once."""
    folder = RunDirectory(run.output)
    found, lines = scalars(folder.tensorboard), folder.read_metrics()
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("val/top1", "val_top1")):
        expected = [(line["step"], pytest.approx(line[key])) for line in lines if key in line]
        assert found[tag] == expected
    assert not {"train/step", "train/eta", "train/event"} & set(found)


def test_scalars_are_the_metrics(tiny_run):
    run = tiny_run(tensorboard=True, ema=0.5)
    train(run)
    assert_as_metrics(run)
    found = scalars(RunDirectory(run.output).tensorboard)
    assert {tag.partition("/")[0] for tag in found} == {"train", "val", "ema_val"}


def test_a_resumed_run_shows_each_step_once(tiny_run):
    run = tiny_run(tensorboard=True, save_every=4)

    def kill(event) -> None:
        if event.kind == "train" and event.step == 7:  # behind the state of step 4
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, on_event=kill)
    assert [step for step, _ in scalars(RunDirectory(run.output).tensorboard)["train/loss"]][
        -1
    ] == 7

    def stop(event) -> None:
        if event.kind == "train" and event.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(run, resume=True, on_event=stop).stopped_by == signal.SIGTERM
    train(run, resume=True)
    assert_as_metrics(run)
    assert len(scalars(RunDirectory(run.output).tensorboard)["train/loss"]) == 12


def test_a_new_run_starts_anew(tiny_run):
    run = tiny_run(tensorboard=True)
    train(run)
    train(run, force=True)
    assert_as_metrics(run)


def test_nothing_is_written_unasked(tiny_run):
    run = tiny_run(steps=1)
    train(run)
    assert not RunDirectory(run.output).tensorboard.exists()


def test_without_tensorboard_it_is_one_line(tiny_run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    run = tiny_run(tensorboard=True)
    with pytest.raises(MissingExtraError) as caught:
        train(run)
    assert str(caught.value) == (
        "--tensorboard needs the package 'tensorboard'\n"
        "hint: pip install 'vitcli[tensorboard]', or with pipx: pipx inject vitcli tensorboard"
    )
    assert not RunDirectory(run.output).path.exists()
