"""What differs between devices: exercised here without any but the CPU."""

from __future__ import annotations

import pytest
import torch

from vitcli.devices import check_count, choose_precision, ran_out_of_memory
from vitcli.errors import ConfigError


def test_auto_precision_is_of_the_gpu_that_was_asked_for(monkeypatch):
    capability = {None: (7, 5), 0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability[gpu.index])
    chosen = [choose_precision("auto", torch.device(f"cuda{n}")) for n in ("", ":0", ":1")]
    assert chosen == [torch.float32, torch.float32, torch.bfloat16]


def test_the_words_of_every_device_for_want_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert ran_out_of_memory(caught.value)
    assert ran_out_of_memory(torch.OutOfMemoryError())
    assert ran_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8.89 GB)"))
    assert not ran_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_count(2, "auto")
    check_count(4, "cpu")
    for name, there in (("auto", 2), ("cuda:1", 1)):
        with pytest.raises(ConfigError, match=f"--devices 4, but this machine has {there} cuda"):
            check_count(4, name)
