"""Device-specific behavior, tested on the CPU alone."""

import pytest
import torch

from vitcli.devices import (
    check_count,
    choose_device,
    choose_precision,
    is_out_of_memory,
)
from vitcli.errors import ConfigError


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    """Simulate a machine with two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def fake_launch(monkeypatch, local_rank: int) -> None:
    """Simulate a rank started by torchrun."""
    for name, value in (("RANK", 2), ("WORLD_SIZE", 4), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, str(value))


def test_cuda_device_index(two_gpus, monkeypatch):
    for name, device in (("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
        assert choose_device(name) == torch.device(device)
    fake_launch(monkeypatch, local_rank=1)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:1")
    fake_launch(monkeypatch, local_rank=2)
    with pytest.raises(ConfigError):
        choose_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "cpu:", "cuda:one", "cuda:9"])
def test_unknown_devices_are_rejected(name):
    with pytest.raises(ConfigError, match="device"):
        choose_device(name)


def test_auto_precision_uses_requested_gpu(monkeypatch):
    capability = {None: (7, 5), 0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability[gpu.index])
    chosen = [choose_precision("auto", torch.device(f"cuda{n}")) for n in ("", ":0", ":1")]
    assert chosen == [torch.float32, torch.float32, torch.bfloat16]


def test_out_of_memory_errors_are_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8.89 GB)"))
    failure = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(failure))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_too_many_devices_are_rejected(two_gpus):
    check_count(2, "auto")
    check_count(4, "cpu")
    for name, count in (("auto", 2), ("cuda:1", 1)):
        with pytest.raises(ConfigError, match=f"--devices 4, but this machine has {count} cuda"):
            check_count(4, name)
