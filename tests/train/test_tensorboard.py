"""TensorBoard logs, read with TensorBoard's own reader."""

import dataclasses
import signal

import pytest

from train.runs import Killed, interrupt_at, kill_at
from vitcli.train.directory import RunDirectory
from vitcli.train.loop import train

pytest.importorskip("tensorboard")


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """{tag: [(step, value), ...]} as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def assert_as_metrics(run) -> None:
    """Check that the scalars match the lines of metrics.jsonl, without repeats."""
    folder = RunDirectory(run.output)
    found, lines = scalars(folder.tensorboard), folder.lines(folder.metrics)
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("val/top1", "val_top1")):
        expected = [(line["step"], pytest.approx(line[key])) for line in lines if key in line]
        assert found[tag] == expected
    assert not {"train/step", "train/eta", "train/event"} & set(found)


def test_scalars_match_metrics_without_repeats(tiny_run):
    run = tiny_run(tensorboard=True, save_every=4, ema=0.5)
    with pytest.raises(Killed):
        train(run, on_event=kill_at(7))  # after the state of step 4
    last, _ = scalars(RunDirectory(run.output).tensorboard)["train/loss"][-1]
    assert last == 7
    assert train(run, resume=True, on_event=interrupt_at(9)).stopped_by == signal.SIGTERM
    train(run, resume=True)
    assert_as_metrics(run)
    found = scalars(RunDirectory(run.output).tensorboard)
    assert {tag.partition("/")[0] for tag in found} == {"train", "val", "ema_val"}
    assert len(found["train/loss"]) == 12
    train(dataclasses.replace(run, steps=2), force=True)  # replaces the old logs
    assert_as_metrics(run)
