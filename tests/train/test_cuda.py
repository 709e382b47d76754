"""CUDA matches the CPU: golden cases, training and resuming, compilation, ranks. Run with
`make test-gpu` on a machine with a GPU."""

import functools
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from checkpoints.golden_cases import GOLDEN, TIMM_CASES, images_and_logits
from train.runs import Killed, kill_at, read_metrics
from vitcli.checkpoints.load import load
from vitcli.config import AugmentConfig
from vitcli.prediction import Predictor
from vitcli.train.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("case", TIMM_CASES)
def test_logits_match_timm(case):
    images, expected = images_and_logits(case)
    model = load(GOLDEN / case, device="cuda")
    with torch.inference_mode():
        found = model(torch.from_numpy(images).cuda()).cpu().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)  # TF32 is off


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_predictions_match_cpu(precision):
    photographs = sorted((GOLDEN.parent / "images").glob("*.jpg"))
    best = []
    for device in ("cpu", "cuda"):
        predictor = Predictor("default", device, precision if device == "cuda" else "fp32")
        best.append([p.predictions[0].label for p in predictor.predict(photographs)])
    assert best[0] == best[1]


@pytest.fixture
def cuda_run(make_run):
    """`make_run` on CUDA, with a head dimension of 32."""
    sizes = {"width": 64, "depth": 2, "num_heads": 2, "mlp_dim": 128}
    return functools.partial(make_run, device="cuda", overrides=sizes, steps=40, log_every=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_converges(cuda_run, tmp_path, precision):
    outcome = train(cuda_run(output=str(tmp_path / "run"), precision=precision, ema=0.9))
    assert outcome.metrics["val_top1"] > 0.9


def test_steps_do_not_synchronize_with_gpu(cuda_run, tmp_path):
    def waits(steps):
        rare = {"eval_every": steps, "log_every": steps, "ema": 0.9, "clip_norm": 1.0}
        mixed = AugmentConfig(mixup=0.2, cutmix=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            train(cuda_run(output=str(tmp_path / str(steps)), steps=steps, augment=mixed, **rare))
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    assert 0 < waits(20) == waits(40)


def test_killed_run_resumes(cuda_run, tmp_path):
    train(cuda_run(output=str(tmp_path / "whole"), save_every=5))
    killed = cuda_run(output=str(tmp_path / "killed"), save_every=5)
    with pytest.raises(Killed):
        train(killed, on_event=kill_at(22))
    train(killed, resume=True)
    losses = [
        {line["step"]: line["loss"] for line in read_metrics(tmp_path / name, "train")}
        for name in ("whole", "killed")
    ]
    assert losses[0].keys() == losses[1].keys()
    # the order of atomic additions in the backward pass is nondeterministic
    assert [*losses[1].values()] == pytest.approx([*losses[0].values()], rel=0.02, abs=0.01)


@pytest.mark.parametrize(
    "more", [(), ("--shard",), ("--compile",)], ids=["ddp", "fsdp2", "compile"]
)
def test_ranks_match_single_process(colors, tmp_path, more):
    """DDP over NCCL and FSDP2, with one rank per CUDA device; a single device is enough."""
    recipe = (
        *("--data", str(colors), "--variant=Ti/8", "--set=depth=2", "--resolution=32"),
        *("--steps=8", "--batch-size=16", "--precision=fp32", "--mixup=0.2", "--log-every=1"),
        *("--device=cuda", "--json"),
    )
    losses = []
    for name, devices in (("alone", ()), ("ranks", (f"--devices={torch.cuda.device_count()}",))):
        command = [sys.executable, "-m", "vitcli", "pretrain", "-o", str(tmp_path / name)]
        text = subprocess.run(
            [*command, *recipe, *devices, *(more if devices else ())],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        events = [json.loads(line) for line in text.splitlines()]
        losses.append([event["loss"] for event in events if event["event"] == "train"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
