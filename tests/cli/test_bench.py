"""`vit bench`: measurements, output formats and errors."""

import json

import pytest
import torch

from vitcli import machine
from vitcli.checkpoints.read import read_info
from vitcli.evaluation import speed
from vitcli.evaluation.speed import matrix_flops


@pytest.fixture(autouse=True)
def fast_benchmarks(monkeypatch):
    monkeypatch.setattr(speed, "matrix_flops", lambda device, dtype: 1e12)
    monkeypatch.setattr(speed, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(speed, "TRAINING_BATCH", {"cpu": 4})
    monkeypatch.setattr(speed, "MIN_GROWTH", 1)


def test_json_has_one_line_per_measurement(vit, tiny_checkpoint):
    result = vit("bench", tiny_checkpoint, "--resolution", "32,64", "--json", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["resolution"], line["work"]) for line in lines] == [
        (size, work) for size in ([32, 32], [64, 64]) for work in ("inference", "training")
    ]
    for line in lines:
        config = read_info(tiny_checkpoint)[0].model.with_image_size(tuple(line["resolution"]))
        assert line["flops"] == 2 * config.macs() and line["parameters"] == config.num_params()
        assert line["tokens"] == config.num_tokens
        passes = 3 if line["work"] == "training" else 1
        mfu = line["images_per_second"] * passes * line["flops"] / 1e12
        assert line["mfu"] == pytest.approx(mfu) and mfu > 0
        assert 1 <= line["largest_batch"] <= 4096 and line["memory"] > 10e6
    assert lines[1]["batch_size"] == 4


def test_table_and_plot_of_architectures(vit, tmp_path):
    args = ("--resolution", "32", "--no-train", "--max-batch", "2", "--batch-size", "2")
    result = vit("bench", "Ti/16", "R+Ti/16", *args, "--plot", tmp_path / "speed.png")
    assert result.exit_code == 0, result.stderr
    header, *rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:3] for row in rows] == [[m, "32", "inference"] for m in ("Ti/16", "R+Ti/16")]
    assert header[-2:] == ["largest", "batch"]
    assert all(row[-1].startswith(("1", "2")) for row in rows)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_measures_matrix_flops(monkeypatch):
    monkeypatch.setattr(speed, "MATRIX_SIZE", {"cpu": 64})
    assert matrix_flops(torch.device("cpu"), torch.float32) > 0


def test_oversized_batch_is_rejected(vit, monkeypatch):
    monkeypatch.setattr(speed, "_largest_by_estimate", lambda run, limit: 7)
    result = vit("bench", "Ti/16", "--resolution", "32", "--batch-size", "8")
    assert result.exit_code == 1 and "does not fit in memory" in result.stderr
    assert "--batch-size of 7 or less" in result.stderr
    monkeypatch.setattr(speed, "_largest_by_estimate", lambda run, limit: 0)
    result = vit("bench", "Ti/16", "--resolution", "32")
    assert result.exit_code == 1 and "a batch of 1 image of" in result.stderr


@pytest.mark.parametrize("max_fitting", [0, 1, 2, 5, 37, 64, 99])
def test_doubling_and_bisection_find_largest_batch(max_fitting):
    counts = []

    def run(count: int) -> None:
        counts.append(count)
        if count > max_fitting:
            raise RuntimeError("CUDA out of memory")

    largest = speed._largest_by_trial(run, 64)
    assert largest == min(max_fitting, 64) and len(counts) == len(set(counts)) <= 13


def test_largest_batch_on_cpu_is_estimated_from_memory(monkeypatch):
    memory = [0]
    monkeypatch.setattr(machine, "reset_peak_memory", lambda: memory.__setitem__(0, 300))
    monkeypatch.setattr(machine, "peak_memory", lambda: memory[0])
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)

    def run(count: int) -> None:
        memory[0] = 300 + 50 + 10 * count

    # 1,300 bytes in total: 350 fixed, 10 per image
    assert speed._largest_by_estimate(run, 4096) == 95
    assert speed._largest_by_estimate(run, 20) == 20


def test_peak_memory_can_be_reset():
    if machine.peak_memory() is None:
        pytest.skip("this system does not tell")
    block = bytearray(b"x") * (200 << 20)
    assert machine.peak_memory() > len(block)
    before = machine.peak_memory()
    del block
    machine.reset_peak_memory()
    assert machine.peak_memory() < before - (150 << 20)
