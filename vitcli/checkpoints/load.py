"""Loading a checkpoint as a torch model."""

from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitcli.checkpoints import read
from vitcli.checkpoints.adapt import adapt, at_size
from vitcli.checkpoints.info import CheckpointInfo, warn_of_assumptions, warn_of_left_out
from vitcli.checkpoints.pickles import from_numpy
from vitcli.config import ClassLabel, ModelConfig, PosembMethod, Preprocess, Score, Size
from vitcli.devices import choose_device
from vitcli.errors import CheckpointError
from vitcli.fields import as_size, check_choice
from vitcli.hub import fetch as hub
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT


class Described:
    """Mixin for a model with the description of its checkpoint."""

    info: CheckpointInfo

    @property
    def classes(self) -> tuple[ClassLabel, ...]:
        """In the order of the logits; empty if unknown."""
        return self.info.classes

    @property
    def preprocess(self) -> Preprocess:
        """Preprocessing of the model's input images."""
        return self.info.preprocess

    @property
    def score(self) -> Score:
        """The function from logits to scores: "softmax", "sigmoid" or "none"."""
        return self.info.score

    def transform(self, image: Any) -> Tensor:
        """Preprocess an image (path, bytes or PIL) into the model's input, (3, H, W) in float32.

        Raises:
            ImageError: the image cannot be read.
        """
        from vitcli.data.transforms import EvalTransform, to_float

        return to_float(EvalTransform(self.info.preprocess)(image), self.info.preprocess)


class LoadedViT(Described, ViT):
    """A ViT or a hybrid."""


class LoadedBiT(Described, BiT):
    """A BiT ResNet."""


LoadedModel = LoadedViT | LoadedBiT
"""`model(images)` returns logits, `model.features(images)` the head's input, and
`model.transform(image)` an input for both."""


class Weights(NamedTuple):
    """A checkpoint's description and its tensors."""

    info: CheckpointInfo
    tensors: dict[str, Tensor]
    """Memory-mapped where possible: read on first access, never written back."""


def load(
    spec: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
    resolution: int | Size | None = None,
    posemb_method: PosembMethod = "bilinear",
    offline: bool = False,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
) -> LoadedModel:
    """Load a model for inference.

    Args:
        spec: a path, a model name such as "default", or a Hub repo, "org/name[@revision]".
        device: the device of the weights.
        dtype: the dtype of the weights; None keeps the file's.
        resolution: input size, if not the checkpoint's; position embeddings are resized to match.
            Accuracy drops until the model is fine-tuned at that resolution.
        posemb_method: how to resize them; bilinear is the paper's.
        offline: never use the network.
        on_progress: called with the progress of a download.
        allow_pickle: accept Hub repos that have only pickled weights; no code in them is run.

    Raises:
        ModelNotFoundError: there is no such model.
        HubError: the model cannot be downloaded from the Hub.
        CheckpointError: the file is damaged, or its tensors do not match its description.
        ConfigError: the model does not support the resolution, or there is no such device.
    """
    fetching: read.Fetching = {
        "offline": offline,
        "on_progress": on_progress,
        "allow_pickle": allow_pickle,
    }
    check_choice("posemb_method", PosembMethod, posemb_method)
    target = choose_device(str(device))
    info, stored = load_weights(spec, **fetching)
    warn_of_assumptions(info, spec)
    warn_of_left_out(info, spec)
    tensors, old, size = stored, info.model, as_size(resolution)
    if size is not None and size != old.image_size:
        info = at_size(info, size, posemb_method)
        tensors = adapt(stored, old, info.model, posemb_method)
    if dtype is None:
        tensors = {name: tensor.to(stored[name].dtype) for name, tensor in tensors.items()}
    return build(info, tensors, device=target, dtype=dtype).eval()


def load_weights(spec: str | Path, **fetching: Unpack[read.Fetching]) -> Weights:
    """Load a checkpoint's description and its tensors, which are checked against each other.

    Raises:
        VitError: as for `load`.
    """
    source = read.open_checkpoint(spec, **fetching)
    if source.layout != "vit":
        tensors = {name: from_numpy(tensor.read()) for name, tensor in source.tensors.items()}
        return Weights(source.info, tensors)
    try:
        with safe_open(str(source.file), framework="pt", device="cpu") as file:
            return Weights(source.info, {name: file.get_tensor(name) for name in source.tensors})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=source.file) from error


def build(
    info: CheckpointInfo,
    tensors: dict[str, Tensor],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> LoadedModel:
    """Build a model from tensors. It is created on the meta device and the tensors are assigned to
    it, so nothing is initialized only to be overwritten, or copied unless it must be converted.

    Raises:
        CheckpointError: a tensor is missing, unexpected or has the wrong shape.
    """
    with torch.device("meta"):
        config = info.model
        model: LoadedModel = (
            LoadedViT(config) if isinstance(config, ModelConfig) else LoadedBiT(config)
        )
    model.info = info
    state = {
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"weights do not match the model: {error}") from error
    return model
