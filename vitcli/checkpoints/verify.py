"""Verifying that a checkpoint computes the same here as in the library whose layout it has.

Both models get the same random image in float64, so that a difference is due to the models, not to
rounding. The library loads the file with its own code.
"""

import dataclasses
import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitcli.checkpoints.info import assumptions_text
from vitcli.checkpoints.load import build
from vitcli.checkpoints.pickles import from_numpy
from vitcli.checkpoints.read import Checkpoint
from vitcli.checkpoints.store import open_store
from vitcli.config import ModelConfig
from vitcli.errors import CheckpointError
from vitcli.layouts import timm as timm_layout
from vitcli.layouts.catalog import layout_of
from vitcli.layouts.foreign_json import read_json
from vitcli.layouts.transformers import read_config

TOLERANCE = 1e-6
"""Relative to the largest value. The same arithmetic agrees to about 1e-13 in float64; GELU's tanh
approximation instead of the exact function causes 1e-5 or more."""
SMALL = 1e-3
"""Lower bound of the largest value in that comparison."""

FEATURE_CLASSES = {
    "siglip_vision_model": "SiglipVisionModel",  # two towers, or one
    "clip_vision_model": "CLIPVisionModel",
    "metaclip_2_vision_model": "MetaClip2VisionModel",
    "altclip_vision_model": "AltCLIPVisionModel",
    "chinese_clip_vision_model": "ChineseCLIPVisionModel",
}
"""Model type -> class without a head in transformers, where AutoModel chooses another one."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The result of comparing our outputs with a library's."""

    file: Path
    library: str
    """Name and version."""
    what: str
    """"logits", or "features" for a model without a head."""
    difference: float
    """The largest absolute difference."""
    largest: float
    """The largest absolute value that the library computed."""
    note: str = ""
    """How both differ from the code of the file's authors."""


def check_verifiable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless an installed library can load such a checkpoint."""
    library, model = layout_of(checkpoint.layout).library, checkpoint.info.model
    hint, reason = "leave out --verify to convert without this check", ""
    if library is None:
        reason = f"there is no library to compare the {checkpoint.layout} layout with"
    elif (
        library == "timm"
        and not _is_timm_directory(checkpoint)
        and (unsupported := timm_layout.not_in_timm(timm_layout.with_timm_epsilons(model)))
    ):
        reason = f"timm does not support {', '.join(unsupported)}"
    elif library == "timm" and getattr(model, "posemb", "") == "sincos2d":
        reason = "timm does not compute sincos2d"
    else:
        try:
            importlib.import_module(library)
        except ModuleNotFoundError as error:
            reason = f"{error.name} is not installed"
            hint = f"pip install {error.name}, or with pipx: pipx inject vitcli {error.name}"
        except Exception as error:  # anything that the library raises
            reason = f"{library} cannot be imported: {error}"
    if reason:
        raise CheckpointError(f"cannot be verified: {reason}", where=checkpoint.file, hint=hint)


def _is_timm_directory(checkpoint: Checkpoint) -> bool:
    """Whether timm itself can load the file with the configuration beside it."""
    file = checkpoint.file
    config = read_json(file.with_name("config.json"))
    has_config = config is not None and "architecture" in config
    return checkpoint.layout in ("timm", "vit") and file.name == "model.safetensors" and has_config


def verify(checkpoint: Checkpoint) -> Agreement:
    """Run a random image through our model and through the library of the checkpoint's layout.

    Raises:
        CheckpointError: the results differ, or the library cannot be used.
    """
    check_verifiable(checkpoint)
    library, model, note = layout_of(checkpoint.layout).library or "", checkpoint.info.model, ""
    if library == "timm" and model != (model := timm_layout.with_timm_epsilons(model)):
        info = dataclasses.replace(checkpoint.info, model=model)
        checkpoint = dataclasses.replace(checkpoint, info=info)
        note = "with timm's epsilons"
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, *model.image_size, generator=generator, dtype=torch.float64)
    with torch.inference_mode():
        tensors = {name: from_numpy(t.read()) for name, t in checkpoint.tensors.items()}
        ours = build(checkpoint.info, tensors, dtype=torch.float64).eval()(image)
        try:
            theirs = (_run_timm if library == "timm" else _run_transformers)(checkpoint, image)
            if theirs.shape != ours.shape:
                raise ValueError(f"its output is {tuple(theirs.shape)}, not {tuple(ours.shape)}")
        except Exception as error:  # anything that the library raises
            reason = (str(error).strip().splitlines() or [repr(error)])[0]
            raise CheckpointError(
                f"cannot be verified: {library} cannot load it: {reason}", where=checkpoint.file
            ) from error
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    what, name = "logits" if model.num_classes else "features", f"{library} {version(library)}"
    if not difference <= TOLERANCE * max(largest, SMALL):  # also for NaN
        raise CheckpointError(
            f"{name} computes different {what}: the largest difference is {difference:.2g}, the "
            f"largest value {largest:.3g}",
            where=checkpoint.file,
            hint=assumptions_text(checkpoint.info),
        )
    return Agreement(checkpoint.file, name, what, difference, largest, note)


def _run_timm(checkpoint: Checkpoint, image: Tensor) -> Tensor:
    """Logits or features, (1, K), of timm's model: the one in config.json, else the best match."""
    timm: Any = importlib.import_module("timm")
    file, info = checkpoint.file, checkpoint.info
    if _is_timm_directory(checkpoint):
        model = timm.create_model(f"local-dir:{file.parent}", pretrained=True)
    else:
        config = timm_layout.to_config(info)
        num_classes, arguments = info.model.num_classes, config["model_args"]
        model = timm.create_model(config["architecture"], num_classes=num_classes, **arguments)
        if checkpoint.layout in ("timm", "vit", "open_clip"):
            module, state = importlib.import_module(type(model).__module__), _stored(checkpoint)
            if module is timm.models.vision_transformer:  # with DeiT III's names of layer scale
                state = module.checkpoint_filter_fn(state, model, adapt_layer_scale=True)
            elif hasattr(module, "checkpoint_filter_fn"):
                state = module.checkpoint_filter_fn(state, model)
            loaded = model.load_state_dict(state, strict=False)
            if loaded.missing_keys:
                raise ValueError(f"it finds no {loaded.missing_keys[0]}")
        else:
            model.load_pretrained(str(file))
    logits: Tensor = model.eval().double()(image)
    return logits


def _stored(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The file's tensors, without the prefix of timm's names, which timm does not expect."""
    ours, theirs = next((n, t.sources[0]) for n, t in checkpoint.tensors.items() if t.sources)
    prefix = theirs.removesuffix(ours) if theirs.endswith(ours) else ""
    tensors = open_store(checkpoint.file).tensors
    return {
        name.removeprefix(prefix): from_numpy(tensor.read())
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _run_transformers(checkpoint: Checkpoint, image: Tensor) -> Tensor:
    """Logits, or features for a model without a head, (1, K)."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory, model = checkpoint.file.parent, checkpoint.info.model
    assert isinstance(model, ModelConfig)
    model_type = read_config(directory).get("model_type", str, "")
    options, inputs = dict[str, Any](), dict[str, Any]()
    if model_type == "vit_mae":  # sees every patch, in order
        options["mask_ratio"] = 0.0
        inputs["noise"] = torch.arange(model.grid[0] * model.grid[1], dtype=torch.float64)[None]
    name = FEATURE_CLASSES.get(model_type, "AutoModel")
    if model.num_classes:
        name = "AutoModelForImageClassification"
    their_model = getattr(transformers, name).from_pretrained(
        directory, dtype=torch.float64, local_files_only=True, **options
    )
    outputs = their_model.eval()(image, **inputs)
    output: Tensor
    if model.num_classes:
        output = outputs.logits
    elif model.pool == "map" or model.pre_logits or model.fc_norm or "clip" in model_type:
        output = outputs.pooler_output
    elif model.pool == "token":
        output = outputs.last_hidden_state[:, 0]
    else:
        output = outputs.last_hidden_state[:, int(model.class_token) :].mean(1)
    return output
