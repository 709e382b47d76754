"""DDP over NCCL and FSDP2, with a rank for each CUDA device; one device is enough."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch


@pytest.mark.parametrize(
    "more", [(), ("--shard",), ("--compile",)], ids=["ddp", "fsdp2", "compile"]
)
def test_ranks_learn_what_one_process_learns(images, tmp_path, more):
    recipe = (
        *("--data", str(images), "--variant=Ti/8", "--set=depth=2", "--resolution=32"),
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
