"""Runs on several ranks: the same results as on one, restarts, and errors of ranks."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import wait_for
from train.runs import TINY, max_weight_difference, read_weights
from vitcli.train.directory import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

RECIPE = (
    *(f"--set={name}={value}" for name, value in TINY.items()),
    *("--variant=Ti/8", "--resolution=16", "--val-fraction=0.25", "--batch-size=13"),
    *("--optimizer=adamw", "--lr=0.003", "--mixup=0.3", "--cutmix=1", "--ema=0.8", "--seed=3"),
    *("--device=cpu", "--precision=fp32", "--grad-accum=1", "--log-every=1", "--json"),
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
VIT = (sys.executable, "-P", "-m", "vitcli")


def run_vit(*arguments: str, status: int = 0) -> str:
    """The stdout of a command, or its stderr if it is expected to fail."""
    result = subprocess.run(
        [*VIT, *arguments], capture_output=True, text=True, env=ONE_THREAD, timeout=600
    )
    assert result.returncode == status, result.stderr
    return result.stdout if status == 0 else result.stderr


def pretrain(colors: Path, output: Path, *more: str) -> list[dict]:
    """Run 8 steps and return the events."""
    recipe = ("--steps=8", "--eval-every=4", *RECIPE, *more)
    text = run_vit("pretrain", "--data", str(colors), "-o", str(output), *recipe)
    return [json.loads(line) for line in text.splitlines()]


def start_pretrain(colors: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    command = [*VIT, "pretrain", "--data", str(colors), "-o", str(output), *RECIPE, *more]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ONE_THREAD
    )


def find_rank_pid(rank: int, output: Path) -> int | None:
    """The PID of a rank of the run that writes to `output`, if it is running."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            above = (Path("/proc") / parent / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        mine = f"RANK={rank}".encode()
        # A data loading worker has the same environment as its parent.
        if str(output).encode() in command and mine in environment and mine not in above:
            return int(entry.name)
    return None


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which a process accepts connections, in hexadecimal."""
    links = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    tables = [Path("/proc/net", kind).read_text() for kind in ("tcp", "tcp6")]
    fields = [line.split() for table in tables for line in table.splitlines()]
    return {f[1].split(":")[0] for f in fields if f[3] == "0A" and f"socket:[{f[9]}]" in links}


def metrics(output: Path) -> list[dict]:
    """All lines of metrics.jsonl."""
    return RunDirectory(output).lines(output / "metrics.jsonl")


def wait_for_step(running: subprocess.Popen[str], output: Path, step: int) -> None:
    wait_for(lambda: any(line["step"] >= step for line in metrics(output)), running)


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error")]


@pytest.fixture(scope="module")
def one_rank(colors, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The directory and events of a run on one rank."""
    output = tmp_path_factory.mktemp("alone") / "run"
    return output, pretrain(colors, output)


# Gradients are summed in float32 in a different order: a relative difference of about 1e-7. AdamW
# divides by the root of their squares: each of 8 steps of at most 0.003 may differ by about 1e-5.
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "more",
    [
        ("--devices=2",),
        ("--devices=3", "--workers=2"),
        ("--devices=2", "--shard", "--grad-checkpointing"),
        ("--devices=2", "--grad-accum=13", "--grad-checkpointing"),
    ],
    ids=["2", "3", "sharded", "accumulated"],
)
def test_results_do_not_depend_on_number_of_ranks(colors, tmp_path, one_rank, more):
    events = pretrain(colors, tmp_path / "run", *more)
    (plan,) = (event for event in events if event["event"] == "plan")
    assert plan["ranks"] == int(more[0][-1])
    assert [e["event"] for e in events] == [e["event"] for e in one_rank[1]]  # each event once
    for mine, other in zip(events, one_rank[1], strict=True):
        for name in mine.keys() & {"loss", "accuracy", "val_loss", "ema_val_loss", "val_top1"}:
            assert mine[name] == pytest.approx(other[name], abs=TOLERANCE)
    assert max_weight_difference(tmp_path / "run", one_rank[0]) < TOLERANCE


def test_muon_matches_on_several_ranks(colors, tmp_path):
    """Muon orthogonalizes in bfloat16: in each of 8 steps, an update with an RMS of 0.2 * 0.003
    is rounded by 2^-9 in each of 15 products. With sharded matrices, sums of parts are rounded once
    more."""
    runs = {"one": (), "two": ("--devices=2",), "split": ("--devices=2", "--shard")}
    for name, more in runs.items():
        pretrain(colors, tmp_path / name, "--optimizer=muon", *more)
    five_deviations = 5 * 8 * 15 * 2**-9 * 0.2 * 0.003
    assert max_weight_difference(tmp_path / "one", tmp_path / "two") < five_deviations
    assert max_weight_difference(tmp_path / "one", tmp_path / "split") < 3 * five_deviations


@pytest.mark.parametrize("option", ["--lora=4", "--teacher"])
def test_finetuning_matches_on_several_ranks(colors, tmp_path, one_rank, option):
    model = str(one_rank[0])
    options = ("--model", model, option, *([model] if option == "--teacher" else []))
    runs = {"one": (), "two": ("--devices=2",), "split": ("--devices=2", "--shard")}
    for name, more in runs.items():
        recipe = ("--steps=4", *options, *RECIPE[5:], *more)
        run_vit("finetune", "--data", str(colors), "-o", str(tmp_path / name), *recipe)
        assert read_weights(tmp_path / name).keys() == read_weights(one_rank[0]).keys()
    for name in ("two", "split"):
        assert max_weight_difference(tmp_path / "one", tmp_path / name) < TOLERANCE


def torchrun_script(script: Path, code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a script that calls vit on two ranks, started by torchrun."""
    script.write_text(code)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, timeout=300)


LITTLE_MEMORY = """
import os
from vitcli.cli.main import main
from vitcli.train import plan
plan.free_memory = lambda device: 1e5 if os.environ["RANK"] == "1" else 1e12
main()
"""


def test_rank_with_least_memory_sets_micro_batches(colors, tmp_path):
    """FSDP2 communicates in each micro-batch, so ranks with different numbers would deadlock."""
    recipe = [option for option in RECIPE if not option.startswith("--grad-accum")]
    options = ("--data", colors, "-o", tmp_path / "run", "--shard", "--rank-timeout=60")
    args = ("pretrain", *options, "--steps=2", *recipe)
    result = torchrun_script(tmp_path / "vit.py", LITTLE_MEMORY, *args)
    assert result.returncode == 0, result.stderr
    events = map(json.loads, result.stdout.splitlines())
    plans = [event for event in events if "grad_accum" in event]
    assert [plan["grad_accum"] > 1 for plan in plans] == [True]


@pytest.mark.parametrize("machines", [1, 2])
def test_torchrun_matches_single_process(colors, tmp_path, one_rank, machines):
    """Two machines are simulated by two launchers on this one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = [*TORCHRUN, f"--nnodes={machines}", f"--log-dir={tmp_path}"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=run"]
    shares = [f"--nproc-per-node={2 // machines}", "-m", "vitcli", "pretrain", *RECIPE]
    run = ["--data", str(colors), "-o", str(tmp_path / "run"), "--steps=8", "--eval-every=4"]
    launchers = [
        subprocess.Popen(
            [*torchrun, *meeting, *shares, *run], stdout=subprocess.PIPE, text=True, env=ONE_THREAD
        )
        for _ in range(machines)
    ]
    printed = "".join(launcher.communicate(timeout=600)[0] for launcher in launchers)
    assert [launcher.returncode for launcher in launchers] == [0] * machines
    assert [json.loads(line)["event"] for line in printed.splitlines()].count("result") == 1
    assert max_weight_difference(tmp_path / "run", one_rank[0]) < TOLERANCE


@pytest.mark.parametrize("objective", ["mae", "masked-patch"])
def test_validation_and_probes_match_exactly(colors, tmp_path, objective):
    """The steps are too small to change any weight. Some images are unreadable."""
    data = shutil.copytree(colors, tmp_path / "data")
    for i in range(90):  # more images than fit into a batch of one rank
        shutil.copy(data / "red" / "00.png", data / "blue" / f"more-{i}.png")
        if i % 20 == 0:
            (data / "blue" / f"more-{i}.png").write_bytes(b"no image")
    options = ("--optimizer=sgd", "--lr=1e-30", "--steps=2", "--eval-every=1", "--val-fraction=0.7")
    options += ("--mixup=0", "--cutmix=0", f"--objective={objective}", "--probe-every=2")
    found = []
    for ranks in (("--devices=1",), ("--devices=3",), ("--devices=2", "--shard")):
        output = tmp_path / "-".join(ranks)
        pretrain(data, output, *options, *ranks)
        lines = [line for line in metrics(output) if line["event"] != "train"]
        found.append((lines, sorted((output / "skipped.jsonl").read_text().splitlines())))
    assert {key for line in found[0][0] for key in line} >= {
        "val_loss",
        "ema_val_loss",
        "probe_5shot",
    }
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("command", ["evaluate", "predict", "fewshot"])
def test_inference_commands_match_exactly(colors, tmp_path, one_rank, command, monkeypatch):
    model, results = ("--model", str(one_rank[0]), "--precision=fp32", "--json"), list[str]()
    arguments = {
        "evaluate": ("--data", str(colors), "--split=train", "--batch-size=7"),
        "predict": (str(colors), "--batch-size=7"),
        "fewshot": ("--data", str(colors), "--val-fraction=0.3", "--shots=1,3"),
    }[command]
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setitem(ONE_THREAD, "TMPDIR", str(scratch))
    (tmp_path / "random.py").write_text("raise ImportError('not for vit')")
    monkeypatch.chdir(tmp_path)
    for devices in (1, 2, 3):
        monkeypatch.setitem(ONE_THREAD, "XDG_CACHE_HOME", str(tmp_path / f"cache-{devices}"))
        results.append(run_vit(command, *arguments, *model, f"--devices={devices}"))
    assert not [*scratch.iterdir()]
    assert len(results[0].splitlines()) >= (60 if command == "predict" else 1)
    assert results[0] == results[1] == results[2]


def test_ranks_predict_only_missing_results(colors, tmp_path, one_rank):
    names = [path.name for path in sorted(colors.iterdir()) if path.is_dir()]
    (tmp_path / "y").mkdir()
    inputs = [str(colors / name) for name in names]
    for devices in (1, 2):
        existing = (out := tmp_path / str(devices)) / f"{names[0]}.csv"
        (out.mkdir(), existing.write_text("existing"))
        model = ("--model", str(one_rank[0]), "--precision=fp32", f"--devices={devices}")
        run_vit("predict", *inputs, "--csv", "-o", str(out), *model)
        features = ("-o", str(tmp_path / "x.parquet"), "--features", str(tmp_path / "y/x.parquet"))
        run_vit("predict", inputs[0], *features, *model)  # files of one name
    found = [{path.name: path.read_text() for path in (tmp_path / n).iterdir()} for n in "12"]
    assert found[0] == found[1] and found[0].pop(f"{names[0]}.csv") == "existing"
    assert sorted(found[0]) == [f"{name}.csv" for name in names[1:]]
    assert all(text.count("\n") > 10 for text in found[0].values())


def test_state_of_two_ranks_resumes_on_three_sharded(colors, tmp_path):
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    pretrain(colors, full, "--steps=120", "--eval-every=40")
    options = ("--steps=120", "--eval-every=40", "--devices=2", "--max-restarts=2")
    running = start_pretrain(colors, resumed, *options)
    wait_for_step(running, resumed, 10)
    process = find_rank_pid(1, resumed)
    os.kill(process, signal.SIGUSR1)  # a signal to one rank stops all, and none is restarted
    assert running.wait(600) == 128 + signal.SIGUSR1
    stopped = max(line["step"] for line in metrics(resumed))
    assert 10 <= stopped < 120
    run_vit("pretrain", "--resume", str(resumed), "--devices=3", "--shard", "--json")
    for line, expected in zip(metrics(resumed), metrics(full), strict=True):
        assert line["step"] == expected["step"]
        for key in {"loss", "val_loss"} & expected.keys():
            assert line[key] == pytest.approx(expected[key], rel=1e-4)
    # AdamW magnifies rounding errors where gradients are almost 0.
    assert max_weight_difference(full, resumed) < 5e-3


def test_run_with_killed_ranks_matches_uninterrupted(colors, tmp_path):
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    recipe = ("--steps=200", "--eval-every=50", "--save-every=5", "--dropout=0.1", "--devices=2")
    pretrain(colors, full, *recipe)
    running = start_pretrain(colors, resumed, *recipe, "--max-restarts=10")
    dice = random.Random(0)
    for step in sorted(dice.sample(range(1, 140), 10)):
        wait_for_step(running, resumed, step)
        time.sleep(dice.uniform(0, 0.5))
        while (process := find_rank_pid(dice.randrange(2), resumed)) is None:  # being restarted
            assert running.poll() is None, running.stderr and running.stderr.read()
        os.kill(process, signal.SIGKILL)
    assert running.wait(600) == 0, running.stderr and running.stderr.read()
    assert max_weight_difference(full, resumed) == 0
    values = [{k: v for k, v in line.items() if k not in ("images_per_second", "eta")}
              for output in (full, resumed) for line in metrics(output)]  # fmt: skip
    assert values[: len(values) // 2] == values[len(values) // 2 :]


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGSTOP, "died or did not respond in time"),
        (signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_error_names_hung_or_killed_rank(colors, tmp_path, number, end):
    running = start_pretrain(
        colors, tmp_path / "run", "--steps=2000", "--devices=2", "--rank-timeout=60"
    )
    wait_for_step(running, tmp_path / "run", 5)
    process = find_rank_pid(1, tmp_path / "run") or 0
    for pid in (running.pid, process, find_rank_pid(0, tmp_path / "run") or 0):
        assert listening_addresses(pid) <= {"0100007F"}  # 127.0.0.1
    os.kill(process, number)
    try:
        _, text = running.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert running.returncode == 1
    assert error_lines(text) == [f"error: rank 1 {end}"]
    assert f"continue with: vit pretrain --resume {tmp_path / 'run'} --devices 2\n" in text


def test_error_on_all_ranks_is_printed_once(colors, tmp_path):
    recipe = ("--steps=2", "--devices=3", "-o", str(tmp_path / "run"))
    text = run_vit("pretrain", "--data", str(tmp_path / "none"), *recipe, status=1)
    assert text.count("error:") == 1 and "none" in text
    text = run_vit("pretrain", "--data", str(colors), *recipe, "--batch-size=2", status=2)
    assert text.count("error:") == 1 and "2 images cannot be split over 3 ranks" in text
    data = shutil.copytree(colors, tmp_path / "data")
    for name in ("blue", "red"):  # in different ranks' shares
        (data / name / "00.png").write_bytes(b"no image")
    recipe = (*recipe, "--strict", *RECIPE, "--val-fraction=0")
    text = run_vit("pretrain", "--data", str(data), *recipe, status=1)
    assert text.count("error:") == 1 and text.count("warning:") == 2
    assert not (tmp_path / "run").exists()


def test_restart_keeps_files_of_other_launch(colors, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    recipe = ("--steps=2", "--devices=2", "--max-restarts=1", "-o", str(tmp_path), *RECIPE)
    text = run_vit("pretrain", "--data", str(colors), *recipe, status=1)
    assert "already contains config.json" in text
    assert [*tmp_path.iterdir()] == [tmp_path / "config.json"]


def test_divergence_is_not_repeated(colors, tmp_path):
    recipe = (*RECIPE, "--steps=4", "--lr=1e37", "--clip-norm=0", "--warmup=0")
    args = ("--data", str(colors), "--devices=2", "--max-restarts=2", "-o", str(tmp_path / "run"))
    text = run_vit("pretrain", *args, *recipe, status=1)
    assert len(error_lines(text)) == 1 and "resuming" not in text


def test_error_names_rank_with_different_dataset(colors, tmp_path):
    """Simulate machines with different files under the same path."""
    code = """
import os
from vitcli.cli.main import main
from vitcli.data.source import Source
fingerprint = Source.fingerprint
Source.fingerprint = lambda self: fingerprint(self) + os.environ["RANK"]
main()
"""
    args = ("pretrain", "--data", colors, "-o", tmp_path / "run", "--steps=2", *RECIPE)
    result = torchrun_script(tmp_path / "vit.py", code, *args)
    assert result.returncode == 1
    assert error_lines(result.stderr) == ["error: rank 1 has a different dataset than rank 0"]


def test_port_in_use_is_reported(colors, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        command = [*VIT, "pretrain", "--data", str(colors), "-o", str(tmp_path / "run"), *RECIPE]
        env = {**ONE_THREAD, **address, **ranks}
        result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert result.returncode == 1
    error, hint = result.stderr.splitlines()
    assert "cannot reach each other" in error and address["MASTER_PORT"] in error
    assert "torchrun" in hint
