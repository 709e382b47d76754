"""Whether a checkpoint computes here what it computes in the library whose layout it has.

Both models see the same random image in float64, so that a difference is one of the models and
not of rounding. The library reads the file by its own code; nothing of ours comes between.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitcli.checkpoints.info import assumptions
from vitcli.checkpoints.load import build
from vitcli.checkpoints.pickles import from_numpy
from vitcli.checkpoints.read import Checkpoint
from vitcli.checkpoints.save import write_config
from vitcli.config import ModelConfig
from vitcli.errors import CheckpointError
from vitcli.layouts import timm as timms
from vitcli.layouts.catalogue import layout_of
from vitcli.layouts.transformers import read_config

TOLERANCE = 1e-6
"""Of the largest value. The same arithmetic agrees to about 1e-13 in float64; GELU's tanh
approximation in place of the exact one is 1e-5 or more."""
SMALL = 1e-3
"""Values below this are compared as if they were as large."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What two libraries made of one file."""

    file: Path
    library: str
    """And its version."""
    what: str
    """"logits", or "features" where the model has no head."""
    difference: float
    """The largest, absolute."""
    largest: float
    """The largest absolute value of the library's own."""
    note: str = ""
    """What was computed otherwise than the file's authors do, in both."""


def check_verifiable(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError where no library that is installed reads such a checkpoint."""
    library, model = layout_of(checkpoint.layout).library, checkpoint.info.model
    if library is None:
        raise _unverifiable(checkpoint, f"no library reads the layout {checkpoint.layout}")
    if library == "timm" and (said := timms.not_in_timm(timms.with_timms_epsilons(model))):
        raise _unverifiable(checkpoint, f"timm does not know {', '.join(said)}")
    if library == "timm" and getattr(model, "posemb", "") == "sincos2d":
        raise _unverifiable(checkpoint, "timm does not compute sincos2d")
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise _unverifiable(
            checkpoint,
            f"{error.name} is not installed",
            f"pip install {error.name}, or with pipx: pipx inject vitcli {error.name}",
        ) from error
    except Exception as error:  # of another library's own making
        raise _unverifiable(checkpoint, f"{library} cannot be imported: {error}") from error


def _unverifiable(
    checkpoint: Checkpoint, why: str, hint: str = "leave out --verify to convert it all the same"
) -> CheckpointError:
    return CheckpointError(f"cannot be verified: {why}", where=checkpoint.file, hint=hint)


def verify(checkpoint: Checkpoint, seed: int = 0) -> Agreement:
    """Runs a random image through a checkpoint's own library and through ours.

    Raises:
        CheckpointError: they differ; or it cannot be done (see `check_verifiable`).
    """
    check_verifiable(checkpoint)
    library, model, note = layout_of(checkpoint.layout).library or "", checkpoint.info.model, ""
    if library == "timm" and model != (model := timms.with_timms_epsilons(model)):
        info = dataclasses.replace(checkpoint.info, model=model)
        checkpoint = dataclasses.replace(checkpoint, info=info)
        note = "with timm's epsilons"
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, 3, *model.image_size, generator=generator, dtype=torch.float64)
    try:
        with torch.inference_mode():
            run = _in_timm if library == "timm" else _in_transformers
            theirs = run(checkpoint, image)
    except Exception as error:  # of another library's own making
        lines = str(error).strip().splitlines() or [repr(error)]
        raise _unverifiable(checkpoint, f"{library} does not load it: {lines[0]}") from error
    with torch.inference_mode():
        tensors = {name: from_numpy(t.read()) for name, t in checkpoint.tensors.items()}
        ours = build(checkpoint.info, tensors, dtype=torch.float64).eval()(image)
    if ours.shape != theirs.shape:
        raise _unverifiable(
            checkpoint, f"{library} gives {tuple(theirs.shape)}, not {tuple(ours.shape)}"
        )
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    what, name = "logits" if model.num_classes else "features", f"{library} {version(library)}"
    if not difference <= TOLERANCE * max(largest, SMALL):  # NaN is no agreement
        raise CheckpointError(
            f"{name} computes other {what}: max |difference| {difference:.2g} (they reach "
            f"{largest:.3g})",
            where=checkpoint.file,
            hint=_assumed(checkpoint),
        )
    return Agreement(checkpoint.file, name, what, difference, largest, note)


def _assumed(checkpoint: Checkpoint) -> str | None:
    """What may be the reason."""
    assumed = ", ".join(assumptions(checkpoint.info).values())
    return f"the file does not state, so it was assumed: {assumed}" if assumed else None


def _in_timm(checkpoint: Checkpoint, image: Tensor) -> Tensor:
    """Logits, or features, (1, K): of the model that a config.json names, or that we would."""
    timm: Any = importlib.import_module("timm")
    file, info = checkpoint.file, checkpoint.info
    said = file.with_name("config.json")
    is_said = said.is_file() and "architecture" in json.loads(said.read_text("utf-8"))
    if checkpoint.layout == "vit":
        with tempfile.TemporaryDirectory() as folder:
            if file.name != "model.safetensors" or not is_said:
                Path(folder, "model.safetensors").symlink_to(file.resolve())
                write_config(Path(folder, "config.json"), info)
            else:
                folder = str(file.parent)
            model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    else:
        name, arguments = timms.best_architecture(info.model)
        model = timm.create_model(name, num_classes=info.model.num_classes, **arguments)
        if checkpoint.layout in ("timm", "open_clip"):
            renamed = timm.models.vision_transformer.checkpoint_filter_fn
            timm.models.load_checkpoint(
                model, str(file), strict=False, filter_fn=renamed, weights_only=True
            )
        else:
            model.load_pretrained(str(file))
    logits: Tensor = model.eval().double()(image)
    return logits


def _in_transformers(checkpoint: Checkpoint, image: Tensor) -> Tensor:
    """Logits, or what stands for the image where there is no head, (1, K)."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, config = checkpoint.file.parent, checkpoint.info.model
    assert isinstance(config, ModelConfig)
    said = read_config(folder)
    kind = said.text("model_type") if said is not None else ""
    names = {
        "siglip_vision_model": "SiglipVisionModel",  # two towers, or one
        "clip_vision_model": "CLIPVisionModel",
        "metaclip_2_vision_model": "MetaClip2VisionModel",
        "altclip_vision_model": "AltCLIPVisionModel",
        "chinese_clip_vision_model": "ChineseCLIPVisionModel",
    }
    loading: dict[str, Any] = {}
    seeing: dict[str, Any] = {}
    if kind == "vit_mae":  # every patch is seen, in its order
        loading["mask_ratio"] = 0.0
        seeing["noise"] = torch.arange(config.grid[0] * config.grid[1], dtype=torch.float64)[None]
    featured = names.get(kind, "AutoModel")
    name = "AutoModelForImageClassification" if config.num_classes else featured
    model = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float64, local_files_only=True, **loading
    )
    answer = model.eval()(image, **seeing)
    if config.num_classes:
        logits: Tensor = answer.logits
        return logits
    pooled: Tensor
    if config.pool == "map" or config.pre_logits or "clip" in kind:
        pooled = answer.pooler_output
    elif config.pool == "token":
        pooled = answer.last_hidden_state[:, 0]
    else:
        pooled = answer.last_hidden_state[:, int(config.class_token) :].mean(1)
    return pooled
