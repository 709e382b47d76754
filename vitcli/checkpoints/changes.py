"""What a conversion can change besides the layout: head, dtype, patch size, preprocessing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.tensor_file import LazyTensor, numpy_dtype, to_lazy
from vitcli.config import (
    CHANGE_PREPROCESS,
    Architecture,
    BiTConfig,
    ClassLabel,
    ModelConfig,
    Preprocess,
    SaveDtype,
    architecture,
)
from vitcli.errors import ConfigError
from vitcli.fields import check_fields, key_value, option
from vitcli.layouts import timm
from vitcli.words import pluralize

if TYPE_CHECKING:
    import numpy as np


def _read_labels(path: str) -> tuple[ClassLabel, ...]:
    from vitcli.data.classes import read_classes

    return read_classes(Path(path))


@dataclass(frozen=True)
class Changes:
    """The changes that a conversion makes: options of `vit convert`."""

    dtype: SaveDtype | None = option(
        None,
        "--dtype",
        "Data type of the stored weights.  [default: the source's]",
    )
    drop_head: bool = option(
        False,
        "--drop-head",
        "Leave out the head and the pre_logits layer before it; pool token+gap becomes token.",
    )
    num_classes: int | None = option(
        None,
        "--num-classes N",
        "Replace the head with a zero-initialized one for N classes.",
        min=1,
    )
    labels: tuple[ClassLabel, ...] = option(
        (),
        "--classes --labels FILE",
        "File that lists the model's classes in index order; each line is an id, optionally "
        "followed by a tab and a name.",
        parse=_read_labels,
    )
    preprocess: dict[str, Any] = option(
        {},
        "--preprocess KEY=VALUE",
        CHANGE_PREPROCESS + " Also size (N or HxW), if the model has no position embeddings.",
        parse=key_value(Preprocess),
    )
    patch_size: int | None = option(
        None, "--patch-size N", "Resample the patch embedding to N x N pixels.", min=1, max=512
    )
    arch: str | None = option(
        None,
        "--arch NAME",
        "Architecture, if the file does not specify it: a name such as B/16, or timm's, such as "
        "vit_base_patch16_224.",
    )
    num_heads: int | None = option(
        None, "--num-heads N", "Number of attention heads, if the file does not specify it.", min=1
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.drop_head and self.num_classes:
            raise ConfigError("--drop-head and --num-classes cannot be combined")


def change(
    info: CheckpointInfo, tensors: Mapping[str, LazyTensor], changes: Changes
) -> tuple[CheckpointInfo, dict[str, LazyTensor]]:
    """Apply changes to a checkpoint, except those of `with_architecture`.

    Raises:
        ConfigError: a change is not valid for this model.
    """
    import numpy as np

    old, model = info.model, _with_head(info.model, changes)
    if changes.patch_size:
        if not isinstance(model, ModelConfig) or model.stem:
            raise ConfigError(
                "the patch embedding can only be resampled for a plain ViT, not for a hybrid or "
                "a ResNet"
            )
        patch_size = (changes.patch_size, changes.patch_size)
        image_size = (model.grid[0] * patch_size[0], model.grid[1] * patch_size[1])
        if "input_size" in info.provenance:  # keep the number of patches
            pairs = zip(info.provenance["input_size"], model.patch_size, strict=True)
            sides = [side // patch * changes.patch_size for side, patch in pairs]
            info = dataclasses.replace(info, provenance={**info.provenance, "input_size": sides})
        model = dataclasses.replace(model, patch_size=patch_size, image_size=image_size)
    info = _with_preprocess(info, model, changes)
    new_tensors = {}
    for name, shape in info.model.tensor_shapes().items():
        if name.startswith("head") and changes.num_classes is not None:
            dtype = changes.dtype or next(iter(tensors.values())).dtype
            new_tensors[name] = to_lazy(np.zeros(shape, numpy_dtype(dtype)))
            continue
        tensor = _cast(name, tensors[name], changes.dtype)
        if tensor.shape != shape:  # the resampled patch embedding
            read = functools.partial(_read_adapted, name, tensor, old, model)
            tensor = tensor._replace(shape=shape, read=read)
        new_tensors[name] = tensor
    return info, new_tensors


def with_architecture(info: CheckpointInfo, changes: Changes) -> CheckpointInfo:
    """Fill in what the file does not state: number of heads, and what else a timm name implies.

    Raises:
        ConfigError: the model is of another architecture.
    """
    if not changes.arch and not changes.num_heads:
        return info
    model, assumed = info.model, info.provenance.get("assumed", {})
    fields = _fields_from_name(changes.arch, model) if changes.arch else {}
    if changes.num_heads:
        fields["num_heads"] = changes.num_heads
    if "num_heads" in fields and not isinstance(model, ModelConfig):
        raise ConfigError("a BiT ResNet has no attention heads")
    num_heads = getattr(model, "num_heads", None)
    if fields.get("num_heads", num_heads) != num_heads and "num_heads" not in assumed:
        raise ConfigError(
            f"the model has {num_heads} attention heads, not {fields['num_heads']}",
            hint=f"leave out {'--arch' if changes.arch else '--num-heads'}",
        )
    specified = {"num_heads"}
    if changes.arch and "_" in changes.arch:
        specified |= {"activation", "norm_eps", "resnet"}
    remaining = {fact: text for fact, text in assumed.items() if fact not in specified}
    provenance = {**info.provenance, "given": changes.arch or f"{changes.num_heads} heads"}
    provenance.pop("assumed", None)
    provenance |= {"assumed": remaining} if remaining else {}
    model = dataclasses.replace(model, **fields)
    return dataclasses.replace(info, model=model, provenance=provenance)


def _fields_from_name(arch: str, model: Architecture) -> dict[str, Any]:
    """Model fields that tensor shapes do not show, taken from a variant's name or timm's."""
    is_timm = "_" in arch
    reference = timm.architecture_from_args(arch, {}) if is_timm else architecture(arch)
    if isinstance(reference, BiTConfig) or isinstance(model, BiTConfig):
        if not isinstance(reference, BiTConfig) or not isinstance(model, BiTConfig):
            raise ConfigError(f"{arch} and the model in the file are different kinds of model")
        _check_sizes(arch, reference.resnet, model.resnet, "depths", "width_factor")
        return {"resnet": reference.resnet} if is_timm else {}
    _check_sizes(arch, reference, model, "width", "depth", "mlp_dim", "patch_size")
    fields: dict[str, Any] = {"num_heads": reference.num_heads}
    if is_timm:
        fields |= {key: getattr(reference, key) for key in ("activation", "norm_eps", "stem")}
    return fields


def _check_sizes(arch: str, reference: object, actual: object, *names: str) -> None:
    for name in names:
        theirs, ours = getattr(reference, name), getattr(actual, name)
        if theirs != ours:
            raise ConfigError(
                f"{name} is {theirs} in {arch} and {ours} in the file",
                hint="leave out --arch, or give the architecture of this file",
            )


def _with_head(model: Architecture, changes: Changes) -> Architecture:
    if changes.num_classes is not None:
        return model.with_classes(changes.num_classes)
    if not changes.drop_head:
        return model
    if isinstance(model, ModelConfig):
        pool = "token" if model.pool == "token+gap" else model.pool
        model = dataclasses.replace(model, pre_logits=0, pool=pool)
    return model.with_classes(0)


def _with_preprocess(info: CheckpointInfo, model: Architecture, changes: Changes) -> CheckpointInfo:
    """The description of the changed model: preprocessing, class names and score function."""
    preprocess = info.preprocess
    if changes.patch_size:
        preprocess = dataclasses.replace(preprocess, size=model.image_size)
    new_info = dataclasses.replace(info, model=model, preprocess=preprocess)
    new_info = new_info.with_preprocess(changes.preprocess)
    model = new_info.model
    same_head = not changes.drop_head and changes.num_classes is None
    classes = changes.labels or (info.classes if same_head else ())
    if changes.labels and len(classes) != model.num_classes:
        counts = (len(classes), model.num_classes)
        listed, actual = (pluralize(count, "class", "classes") for count in counts)
        hint = "list every class once, in index order"
        raise ConfigError(
            f"--classes lists {listed}, but the model has {actual}",
            hint=hint if model.num_classes else "leave out --classes",
        )
    provenance = dict(info.provenance)
    if not same_head or (model, new_info.preprocess) != (info.model, info.preprocess):
        provenance.pop("metrics", None)  # of the old model
    score = info.score if same_head else "softmax"
    return dataclasses.replace(new_info, classes=classes, score=score, provenance=provenance)


def _read_adapted(name: str, tensor: LazyTensor, old: Any, new: Any) -> np.ndarray:
    from vitcli.checkpoints.adapt import adapt_tensor

    array: np.ndarray = adapt_tensor(name, tensor.read(), old, new, "bilinear")
    return array


def _cast(name: str, tensor: LazyTensor, dtype: str | None) -> LazyTensor:
    if dtype is None or tensor.dtype == dtype:
        return tensor

    def read() -> np.ndarray:
        import numpy as np

        values = tensor.read()
        with np.errstate(over="ignore"):
            cast = values.astype(numpy_dtype(dtype))
        if np.isinf(cast).any() and not np.isinf(values).any():
            hint = "use bfloat16 or float32" if dtype == "float16" else None
            raise ConfigError(f"'{name}' has values that are too large for {dtype}", hint=hint)
        return cast

    return tensor._replace(dtype=dtype, read=read)
