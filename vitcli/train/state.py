"""What a run needs to go on exactly where it stopped, in one safetensors file.

Weights, their average, optimizer slots and torch's random generators as tensors; step, best
figures, thread count and torch version as metadata. Data needs no state: every batch is a function
of the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.errors import CheckpointError, RunError
from vitcli.train_config import TrainConfig

if TYPE_CHECKING:
    from vitcli.train.run import Run


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0
    """Training time so far, evaluations included, over all parts of an interrupted run."""
    best_step: int = 0
    """Of the stored weights."""
    best_averaged: bool = False
    """Whether these are the average, not the model itself."""
    best_accuracy: float | None = None
    """On validation."""
    stale: int = 0
    """Evaluations since."""
    warnings: list[str] = field(default_factory=list)
    """What may make a resumed run differ; empty for a run in one piece."""

    def lost_patience(self, config: TrainConfig) -> bool:
        """Whether too many evaluations have passed without a better one."""
        return config.patience is not None and self.stale >= config.patience


def save_state(path: Path, run: Run, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Writes the state, whole or not at all."""
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in run.model.state_dict().items()}
    if run.averaged is not None:
        tensors |= {f"average.{k}": v for k, v in run.averaged.state_dict().items()}
    for name, slots in _slots_by_name(run.model, optimizer).items():
        for slot, value in slots.items():
            tensors[f"optimizer.{slot}.{name}"] = torch.as_tensor(value)
    tensors["rng.cpu"] = torch.get_rng_state()
    for i, state in enumerate(_cuda_rng_states()):
        tensors[f"rng.cuda.{i}"] = state
    metadata = {
        "progress": {k: v for k, v in vars(progress).items() if k != "warnings"},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": run.device.type,
        "precision": run.precision,
        "scaler": run.scaler.state_dict(),
    }
    arrays = {k: v.detach().cpu().contiguous().numpy() for k, v in tensors.items()}
    tensor_file.write(path, arrays, run.info.to_metadata() | {"vit_state": json.dumps(metadata)})


def read_state_info(path: Path) -> CheckpointInfo:
    """The model that a state is of: a resumed run needs no other checkpoint.

    Raises:
        RunError: the file is damaged.
    """
    try:
        info = CheckpointInfo.from_metadata(tensor_file.read_header(path).metadata, where=path)
    except CheckpointError as error:
        raise RunError(
            f"the state cannot be resumed: {error.what}",
            where=path,
            hint="start the run anew with --force",
        ) from error
    if info is None:
        raise RunError("does not say which model it is of", where=path)
    return info


def load_state(path: Path, run: Run, optimizer: torch.optim.Optimizer) -> Progress:
    """Fills a run's model, average, optimizer and scaler in place, sets torch's generators.

    Raises:
        RunError: the file is damaged or belongs to another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["vit_state"])
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        run.model.load_state_dict(_below("model.", tensors))
        if run.averaged is not None:
            run.averaged.load_state_dict(_below("average.", tensors))
        _fill_slots(run.model, optimizer, tensors)
        run.scaler.load_state_dict(metadata["scaler"])
        warnings = _differences(metadata, run)
        progress = Progress(**metadata["progress"], warnings=warnings)
    except Exception as error:
        raise RunError(
            f"the state cannot be resumed ({type(error).__name__}: {str(error).splitlines()[0]})",
            where=path,
            hint="start the run anew with --force",
        ) from error
    torch.set_rng_state(tensors["rng.cpu"])
    for i in range(len(_cuda_rng_states())):
        if f"rng.cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng.cuda.{i}"], i)
    return progress


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _differences(metadata: Mapping[str, Any], run: Run) -> list[str]:
    found, warnings = [], []
    if metadata.get("precision", run.precision) != run.precision:
        text = f"the run goes on in {run.precision}, and was begun in {metadata['precision']}"
        warnings.append(f"{text}: a run that is begun with --precision keeps it everywhere")
    if metadata["device"] != run.device.type:
        found.append(f"on {metadata['device']} then, on {run.device.type} now")
    if metadata["torch"] != torch.__version__:
        found.append(f"torch {metadata['torch']} then, {torch.__version__} now")
    if metadata["threads"] != torch.get_num_threads():
        found.append(f"{metadata['threads']} threads then, {torch.get_num_threads()} now")
    return warnings + [f"the last bits may differ from an unbroken run: {text}" for text in found]


def _slots_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {
        name: {k: v for k, v in optimizer.state[p].items() if v is not None}
        for name, p in model.named_parameters()
        if p in optimizer.state
    }


def _fill_slots(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, slot, name = key.split(".", 2)
            p = parameters[name]
            # A fused optimizer counts its steps on the device (torch/optim/adam.py).
            optimizer.state[p][slot] = value.to(p.device, copy=True)


def _cuda_rng_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
