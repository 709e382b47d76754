"""Device and precision selection."""

import torch
from torch import Tensor
from torch.cpu import get_capabilities

from vitcli import machine
from vitcli.errors import ConfigError
from vitcli.words import pluralize

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str) -> torch.device:
    """Return the device named auto (CUDA, else Apple's MPS, else the CPU), cpu, cuda, cuda:N or
    mps. Without an index, `cuda` is the device with this process's local rank (0 if it is alone).

    Raises:
        ConfigError: the device is unknown or not available.
    """
    mps = int(torch.backends.mps.is_available())
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{machine.local_rank()}"  # torch.cuda.set_device requires an index
    device_type, colon, index = name.partition(":")
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": mps}
    if device_type not in counts or not (index if colon else "0").isdecimal():
        raise ConfigError(f"unknown device '{name}'", hint="use auto, cpu, cuda, cuda:N or mps")
    if int(index or 0) >= counts[device_type]:
        hint = (
            "use --device auto or cpu, or install torch with support for the device: "
            "https://pytorch.org/get-started/locally/"
        )
        if device_type == "cuda" and counts[device_type]:
            hint = f"torch finds {pluralize(counts[device_type], 'CUDA device')} on this machine"
            if machine.is_launched():
                hint += ": start at most as many ranks, or use --device cpu"
        raise ConfigError(f"device '{name}' is not available", hint=hint)
    if device_type == "cuda":  # by default, convolutions round float32 to TF32
        torch.backends.cudnn.allow_tf32 = False
    return torch.device(name)


def check_count(count: int, name: str) -> None:
    """Raise ConfigError if this machine has fewer than `count` devices for that many ranks."""
    device = choose_device(name)
    if device.type == "cpu":
        return
    available = torch.cuda.device_count() if device.type == "cuda" and ":" not in name else 1
    if count > available:
        raise ConfigError(
            f"--devices {count}, but this machine has "
            f"{pluralize(available, f'{device.type} device')}",
            hint=f"use --devices {available}, or --device cpu",
        )


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a precision; auto is bf16 if the hardware is fast at it, else float32."""
    if name != "auto":
        return PRECISIONS[name]
    return torch.bfloat16 if multiplies_bf16(device) else torch.float32


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error from torch means out of memory. CUDA has an exception class for it; CUDA
    libraries, MPS and the CPU only have messages ("CUBLAS_STATUS_ALLOC_FAILED", "MPS backend out of
    memory", "can't allocate memory: you tried to ...")."""
    phrases = ("out of memory", "you tried to allocate", "_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(p in str(error) for p in phrases)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16 faster than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        capabilities = get_capabilities()
        return bool(capabilities.get("amx_tile") or capabilities.get("avx512_bf16"))
    return False


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. The copy to CUDA is asynchronous, which requires pinned
    memory; on MPS, an asynchronous copy could read memory after its reuse (pytorch issue 189690).
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def free_memory(device: torch.device) -> float:
    """Free memory of a device in bytes, including memory cached by torch."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return machine.free_memory()
