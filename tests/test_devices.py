"""What differs between devices: exercised here without any but the CPU."""

from __future__ import annotations

import pytest
import torch

from vitcli.devices import choose_precision, ran_out_of_memory


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
