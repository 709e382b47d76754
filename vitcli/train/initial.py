"""Initial weights of a run: random, or from a checkpoint, with a head that is new or keeps the rows
of known classes. Tensors that a checkpoint overwrites are not initialized first."""

from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitcli.checkpoints.adapt import adapt
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import Weights, load_weights
from vitcli.checkpoints.read import Fetching
from vitcli.config import Architecture, ClassLabel, ModelConfig, Preprocess
from vitcli.data.classes import ClassIndex, match_classes, quote_list
from vitcli.data.source import Ints
from vitcli.errors import ConfigError, RunError, warn
from vitcli.hub import fetch as hub
from vitcli.hub import registry
from vitcli.hub_requests import offline_switch
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train.config import TrainConfig
from vitcli.train.objectives import Objective
from vitcli.words import quote

BEST_MODEL = "vit-b16-i21k"
"""The default initial model of `vit finetune`."""
SHIPPED_MODEL = "default-pretrained"
"""The default when offline: a registry alias of the model included in the package."""

HEAD_PREFIXES = ("head.", "head_dist.")
"""Prefixes of parameters that have a row per class."""


def choose_model(offline: bool) -> str:
    """Choose the best released model if it is cached or the Hub responds within 3 s, else ours."""
    entry = registry.entries()[BEST_MODEL]
    if hub.cached(entry.repo):
        return BEST_MODEL
    switch, reason, when = offline_switch(offline), "cannot reach the Hub", "online"
    if switch:
        reason, when = f"{switch} is set and {BEST_MODEL} is not downloaded", f"without {switch}"
    elif hub.reachable(timeout=3.0, repo=entry.repo):
        return BEST_MODEL
    shipped = registry.aliases()[SHIPPED_MODEL]
    warn(
        f"{reason}: starting from {shipped}, the small model included with vit; "
        f"{when}, the same command starts from {BEST_MODEL}, which is much better"
    )
    return shipped


def read_weights(config: TrainConfig, **fetching: Unpack[Fetching]) -> Weights:
    """Load the checkpoint to start from; without one, return metadata and no tensors."""
    if config.model is not None:
        return load_weights(config.model, **fetching)
    model = config.new_architecture()
    return Weights(CheckpointInfo(model, Preprocess(size=model.image_size)), {})


def kept_rows(start: CheckpointInfo, classes: tuple[ClassLabel, ...], config: TrainConfig) -> Ints:
    """Map each class of the data to the row of the checkpoint's head to keep, int64 (K,); -1: none.

    Continued pre-training on the same classes keeps the head; `keep_head` keeps the rows of the
    classes that the checkpoint has, matched by id, then by unique name.

    Raises:
        ConfigError: `keep_head`, but the checkpoint has no head, no class names, or no such class.
        DataError: names that match several classes; all are listed.
    """
    if config.task == "pretrain" and start.classes == classes:
        return np.arange(len(classes))
    if not config.keep_head:
        return np.full(len(classes), -1)
    start.require_head(config.model, "leave out --keep-head")
    if not start.classes:
        raise ConfigError(
            "--keep-head requires a checkpoint with class names",
            where=config.model,
            hint="leave out --keep-head, or write a copy with names: "
            f"`vit convert {quote(str(config.model))} DST --classes FILE`",
        )
    index = ClassIndex(start.classes)
    known = [i for i, label in enumerate(classes) if index.find(label)]
    if not known:
        raise ConfigError(
            f"the model has none of the classes {quote_list(label.name for label in classes)}",
            where=config.model,
            hint="leave out --keep-head; the model has "
            f"{quote_list((label.name for label in start.classes), 8)}",
        )
    rows = np.full(len(classes), -1)
    known_labels = [classes[i] for i in known]
    rows[known] = match_classes(known_labels, start.classes, config.data.path, "the model")
    return rows


def build_model(start: Weights, info: CheckpointInfo, rows: Ints, config: TrainConfig) -> ViT | BiT:
    """Build the model that `info` describes, on the CPU in float32: with random weights, or with
    those of a checkpoint, resampled, of whose head `rows` are kept.

    Raises:
        RunError: the checkpoint's tensors do not match the model.
    """
    model = build_empty(info.model, config)
    if not start.tensors:
        model.to_empty(device="cpu").init_weights(config.seed, config.head_bias)
        return model
    backbone = {name: t for name, t in start.tensors.items() if not name.startswith(HEAD_PREFIXES)}
    if isinstance(info.model, ModelConfig) and not info.model.pre_logits:
        backbone = {name: t for name, t in backbone.items() if not name.startswith("pre_logits.")}
    state = adapt(backbone, start.info.model, info.model, config.posemb_method)
    for name, empty in model.state_dict().items():
        if name.startswith(HEAD_PREFIXES):
            old = start.tensors.get(name)
            state[name] = _init_head(name, empty.shape, old, rows, config.head_bias)
    # Copied, because the checkpoint's tensors are memory-mapped from its file.
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in state.items()}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise RunError(
            f"the initial weights do not match the model: {error}", where=config.model
        ) from error
    return model


def load_aux_state(objective: Objective, config: TrainConfig) -> str | None:
    """Load the weights that are trained with the model but are not part of it from the run that
    `config.model` names, if it has a decoder.safetensors; return a message about it.

    Raises:
        RunError: the file cannot be read.
    """
    expected = objective.aux_state()
    file = Path(config.model or "") / "decoder.safetensors"
    if not expected or config.model is None or not file.is_file():
        return None
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot be read: {error}", where=file) from error
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in expected.items()}:
        return f"decoder: new weights, because {file} is for another objective or size"
    objective.load_state_dict(state, strict=False)
    return f"decoder: weights from {file}"


def build_empty(model: Architecture, config: TrainConfig) -> ViT | BiT:
    """Build a model on the meta device, without storage."""
    with torch.device("meta"):
        if isinstance(model, ModelConfig):
            return ViT(model, config.dropout, config.drop_path)
        return BiT(model, config.dropout, config.drop_path)


def _init_head(name: str, size: torch.Size, old: Tensor | None, rows: Ints, bias: float) -> Tensor:
    """Return a tensor of the head, with zeros (section 3.2) or `bias` in rows that are not kept."""
    tensor = torch.full(size, bias if name.endswith("bias") else 0.0)
    is_kept = torch.from_numpy(rows >= 0)
    if old is not None and is_kept.any():
        tensor[is_kept] = old[torch.from_numpy(rows)[is_kept]].float()
    return tensor
