"""Data parallelism (DDP, FSDP2), activation checkpointing and compilation of an objective.

All of them work block by block: FSDP2 gathers the weights of one block at a time, torch.compile
compiles one block and reuses it for the others, and checkpointing stores the input of each.
"""

import contextlib
import functools
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vitcli.distributed import Ranks
from vitcli.train.objectives import Objective


def blocks(objective: nn.Module) -> list[nn.Module]:
    """Return the blocks of all encoders, decoders and stages in an objective."""
    return [
        block
        for name, module in objective.named_modules()
        if name.rpartition(".")[2] == "blocks"
        for block in module.children()
    ]


def shard(objective: nn.Module, device: torch.device, ranks: Ranks) -> None:
    """Shard weights, gradients and optimizer state over the ranks, in place (FSDP2). Each block is
    an FSDP unit, and everything outside the blocks is another."""
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    for unit in (*blocks(objective), objective):
        fully_shard(unit, mesh=mesh)


def prepare_blocks(objective: nn.Module, checkpointing: bool, compiled: bool) -> None:
    """Make each block store only its input and recompute the rest in the backward pass
    (`checkpointing`), and compile it with torch.compile at its first call (`compiled`)."""
    all_blocks = blocks(objective)
    if compiled:  # a ResNet's blocks differ in drop rate and sizes: each is recompiled
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(all_blocks))
    for block in all_blocks:
        if compiled:
            block.forward = torch.compile(block.forward)
        if checkpointing:  # outermost: otherwise nothing inside it would be compiled
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def data_parallel(objective: Objective, device: torch.device, ranks: Ranks) -> nn.Module:
    """Return the module whose backward pass averages the gradients over the ranks."""
    if ranks.world_size == 1 or isinstance(objective, FSDPModule):
        return objective
    # With one image in a micro-batch, the gradient of a token is a strided view: only slower.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    devices = [device] if device.type == "cuda" else None
    kwargs: dict[str, Any] = {"device_ids": devices, "gradient_as_bucket_view": True}
    is_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    kwargs["forward_sync_buffers" if is_renamed else "broadcast_buffers"] = False  # torch 2.13
    return DistributedDataParallel(objective, **kwargs)


@contextlib.contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Any:
    """Make backward passes in the context average the gradients over the ranks if `enabled`, and
    otherwise only accumulate them on this rank."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
    else:
        yield


def unshard(tensor: Tensor) -> Tensor:
    """Return the full tensor of one that may be sharded; a collective operation if it is."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full
