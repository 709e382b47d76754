"""What a run needs to continue exactly where it stopped, in one safetensors file.

Weights, their average, optimizer slots and torch's random generators as tensors; progress, thread
count and torch version as metadata. Data needs no state: every batch is a function of the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.errors import CheckpointError, RunError
from vitcli.train.run import Progress, Run


def save_state(run: Run) -> None:
    """Writes the state, whole or not at all."""
    tensors: dict[str, Tensor] = dict(run.objective.state_dict())  # model.*, and what is beside it
    if run.averaged is not None:
        tensors |= {f"average.{k}": v for k, v in run.averaged.state_dict().items()}
    for name, parameter in run.objective.named_parameters():
        for slot, value in run.optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer.{slot}.{name}"] = torch.as_tensor(value)
    tensors |= {f"rng.{name}": state for name, state in _rng_states().items()}
    metadata = {
        "progress": vars(run.progress),
        "scaler": run.scaler.state_dict(),
        "precision": run.precision,
        **_environment(run),
    }
    arrays = {k: v.detach().cpu().contiguous().numpy() for k, v in tensors.items()}
    text = json.dumps(metadata)
    tensor_file.write(run.directory.state, arrays, run.info.to_metadata() | {"vit_state": text})


def read_state_info(path: Path) -> CheckpointInfo:
    """The model that a state is of: a resumed run needs no other checkpoint.

    Raises:
        RunError: the file is damaged.
    """
    try:
        info = CheckpointInfo.from_metadata(tensor_file.read_header(path).metadata, where=path)
    except CheckpointError as error:
        raise _damaged(path, error.what) from error
    if info is None:
        raise _damaged(path, "it does not describe its model")
    return info


def load_state(run: Run) -> list[str]:
    """Fills a run's model, average, optimizer, scaler and progress in place, sets torch's
    generators, and gives warnings of what may make the run differ from an uninterrupted one.

    Raises:
        RunError: the file is damaged or belongs to another model.
    """
    path = run.directory.state
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["vit_state"])
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        trained = run.objective.state_dict().keys()
        run.objective.load_state_dict({k: v for k, v in tensors.items() if k in trained})
        if run.averaged is not None:
            run.averaged.load_state_dict(_below("average.", tensors))
        parameters = dict(run.objective.named_parameters())
        for key, value in _below("optimizer.", tensors).items():
            slot, name = key.split(".", 1)
            # A fused optimizer counts its steps on the device (torch/optim/adam.py).
            p = parameters[name]
            run.optimizer.state[p][slot] = value.to(p.device, copy=True)
        run.scaler.load_state_dict(metadata["scaler"])
        run.progress = Progress(**metadata["progress"])
        warnings = _differences(metadata, run)
    except Exception as error:
        first_line = str(error).splitlines()[0] if str(error) else ""
        raise _damaged(path, f"{type(error).__name__}: {first_line}") from error
    generators = _below("rng.", tensors)
    torch.set_rng_state(generators.pop("cpu"))
    for name in generators.keys() & _rng_states().keys():
        torch.cuda.set_rng_state(generators[name], int(name.removeprefix("cuda.")))
    return warnings


def _damaged(path: Path, why: str) -> RunError:
    return RunError(
        f"the state cannot be resumed ({why})",
        where=path,
        hint="start the run again from the beginning with --force",
    )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _rng_states() -> dict[str, Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state()} | {f"cuda.{i}": s for i, s in enumerate(devices)}


def _environment(run: Run) -> dict[str, Any]:
    """What the last bits depend on, apart from the configuration."""
    return {
        "device": run.device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _differences(metadata: Mapping[str, Any], run: Run) -> list[str]:
    warnings = []
    if metadata.get("precision", run.precision) != run.precision:
        warnings.append(
            f"resumed in {run.precision}, but started in {metadata['precision']}: set "
            "--precision at the start to use the same on every machine"
        )
    for name, now in _environment(run).items():
        if metadata[name] != now:
            warnings.append(
                "results may differ in the last bits from an uninterrupted run: {name} was "
                "{metadata[name]} and is now {now}"
            )
    return warnings
