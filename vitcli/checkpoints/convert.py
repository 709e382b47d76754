"""A checkpoint of any layout that we read, written in any that we write, tensor by tensor.

What a layout cannot say of a model is refused by name; what it has no place for (class names in an
.npz) is told.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitcli.atomic import write_text
from vitcli.checkpoints import hub, keymaps, native, npz, read, timm_config
from vitcli.checkpoints import transformers_config as hf
from vitcli.checkpoints.adapt import adapt_tensor
from vitcli.checkpoints.keymaps import Row
from vitcli.checkpoints.native import CheckpointInfo, LazyTensor
from vitcli.checkpoints.save import SaveDtype, write_config
from vitcli.checkpoints.shapes import tensor_shapes
from vitcli.config import ClassLabel, ModelConfig, model_config
from vitcli.errors import ConfigError, OutputError
from vitcli.posemb import sincos2d

if TYPE_CHECKING:
    import numpy as np

Format = Literal["vit", "transformers", "vit-npz", "big_vision"]
"""vit: ours, which is timm's Hub layout; vit-npz: the authors'."""
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Changes:
    """What a conversion changes beside names and layout."""

    dtype: SaveDtype | None = None
    """Of the stored floating-point tensors; None keeps each one's own."""
    drop_head: bool = False
    """Leave out the head, and `pre_logits` before it."""
    num_classes: int | None = None
    """A new head of zeros."""
    labels: tuple[ClassLabel, ...] = ()
    """The names of the classes."""
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Preprocess, as JSON values."""
    arch: str | None = None
    """A variant ("B/16") or a name of timm's, for what the file cannot tell: heads and GELU."""
    patch_size: int | None = None
    """Resample the patch embedding; the grid stays, so pictures are larger or smaller."""


@dataclass(frozen=True)
class Conversion:
    """What `write` does: read, decided and checked, but not written yet."""

    source: read.Checkpoint
    output: Path
    format: Format
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """Under the names of the target."""
    renamed: list[tuple[str, tuple[str, ...]]]
    """Our names and those of the target."""
    kind: str = ""
    """transformers' model_type."""
    warnings: list[str] = field(default_factory=list)
    nan: list[str] = field(default_factory=list)
    """Names of tensors that hold NaN, known once they are written."""


def convert(
    spec: str | Path,
    output: str | Path,
    to: Format | None = None,
    changes: Changes | None = None,
    *,
    force: bool = False,
    offline: bool = False,
) -> Path:
    """Writes a checkpoint in another layout; returns the file or folder.

    Args:
        spec: a path, a name or a Hub repo, of any layout that we read.
        output: a .safetensors or .npz file, or a folder.
        to: by default the authors' for .npz, else ours.

    Raises:
        VitError: the source cannot be read, the target cannot express it, or not be written.
    """
    conversion = plan_convert(spec, output, to, changes, offline=offline)
    write(conversion, force)
    return conversion.output


def plan_convert(
    spec: str | Path,
    output: str | Path,
    to: Format | None = None,
    changes: Changes | None = None,
    *,
    offline: bool = False,
    on_progress: hub.Progress | None = None,
) -> Conversion:
    """Reads what there is and decides what is written. Arguments and errors as `convert`."""
    located = read.locate(spec, offline, on_progress)
    source, output = read.open_checkpoint(located.file, located.entry), Path(output)
    info, tensors = change(source.info, source.tensors, changes or Changes())
    model = info.model
    target: Format = to or ("vit-npz" if output.suffix == ".npz" else "vit")
    _check_output(output, target)
    if not isinstance(model, ModelConfig):
        if target != "vit":
            raise OutputError(f"the layout {target} is written for Vision Transformers only")
        kind, problems, rows = "", [], None
    else:
        kind = "dinov2" if model.layer_scale else "vit"
        problems = not_in(target, model, kind)
        rows = _rows(target, model, kind)
    if problems:
        raise OutputError(
            f"the layout {target} cannot express this model: {', '.join(problems)}",
            where=source.file,
            hint="--drop-head leaves out the head and what stands before it"
            if any("pre_logits" in problem for problem in problems)
            else None,
        )
    warnings = _warnings(target, info, source)
    renamed: list[tuple[str, tuple[str, ...]]] = []
    if rows is None:
        renamed = [(name, (name,)) for name in tensors]
        return Conversion(source, output, target, info, dict(tensors), renamed, kind, warnings)
    assert isinstance(model, ModelConfig)
    saved: dict[str, LazyTensor] = {}
    sincos = model.posemb == "sincos2d"  # a table that the target computes
    for row in keymaps.expand(rows, model.depth):
        if sincos and row.ours == ("pos_embed",):
            continue
        if set(row.ours) <= set(tensors) and not set(row.ours) <= {n for n, _ in renamed}:
            saved |= _saved(row, tensors, model.num_heads)
            renamed += [(name, row.theirs) for name in row.ours]
    left = set(tensors) - {name for name, _ in renamed}
    if sincos:
        _check_sincos(tensors["pos_embed"], model)
        left.remove("pos_embed")
    if left:
        raise OutputError(f"the layout {target} has no place for {', '.join(sorted(left))}")
    return Conversion(source, output, target, info, saved, renamed, kind, warnings)


def _check_output(output: Path, target: Format) -> None:
    is_file = output.suffix in (".safetensors", ".npz")
    suffixes = {"vit-npz": (".npz",), "big_vision": (".npz",), "vit": ("", ".safetensors")}
    kinds = suffixes.get(target, ("",))
    if (output.suffix if is_file else "") not in kinds:
        words = {"": "a folder", ".npz": "a .npz file", ".safetensors": "a .safetensors file"}
        wanted = " or ".join(words[kind] for kind in kinds)
        raise OutputError(f"the layout {target} is written to {wanted}", where=output)


def not_in(target: Format, model: ModelConfig, kind: str = "vit") -> list[str]:
    """What of a model a layout cannot say; empty if it can."""
    if target == "vit":
        return []
    hybrid = ["a ResNet stem"] if model.stem and target != "vit-npz" else []
    if target == "transformers":
        return hybrid + hf.not_in_transformers(model, kind)
    own = target == "vit-npz"
    pools = ("token",) if model.class_token else ("gap",) if own else ("gap", "map")
    positions = "all" if own else "patches"
    checks = {
        f"pool '{model.pool}'" + (" beside a class token" if model.class_token else ""): model.pool
        not in pools,
        "a distillation token": model.distill_token,
        f"{model.num_registers} register tokens": model.num_registers > 0,
        f"position embeddings '{model.posemb}'": model.posemb
        not in (("learn",) if own else ("learn", "sincos2d")),
        f"position embeddings of {model.posemb_tokens}, not {positions}": model.class_token
        and model.posemb_tokens != positions,
        "a norm before the blocks": model.pre_norm,
        "no final norm": not model.final_norm,
        "a norm after pooling": model.fc_norm,
        "layer scale": model.layer_scale,
        "queries, keys and values without bias": not model.qkv_bias,
        "a patch embedding without bias": not model.patch_bias,
        "a gated MLP": model.swiglu,
        "quick GELU": model.activation == "quick_gelu",
    }
    return hybrid + [what for what, impossible in checks.items() if impossible]


def _rows(target: Format, model: ModelConfig, kind: str) -> tuple[Row, ...] | None:
    """The table of a target; None where its names are ours."""
    if target == "vit":
        return None
    if target == "vit-npz":
        stem = keymaps.stem_rows(model.stem.depths) if model.stem else ()
        return keymaps.flax_rows(keymaps.PRE_LINEN, keymaps.POSITIONS[0], "") + stem
    if target == "big_vision":
        return keymaps.flax_rows(keymaps.LINEN, keymaps.POSITIONS[1], "MAPHead_0/")
    rows = keymaps.TRANSFORMERS[kind]
    return (*keymaps.prefixed(rows, f"{kind}." if model.num_classes else ""), *keymaps.HEAD)


def _warnings(target: Format, info: CheckpointInfo, source: read.Checkpoint) -> list[str]:
    """What the target computes otherwise, and what is not kept."""
    model, warnings = info.model, []
    if assumed := source.info.provenance.get("assumed"):
        warnings.append(f"the file does not say, so it is assumed: {', '.join(assumed)}")
    if source.dropped:
        shown = ", ".join(source.dropped[:6]) + (", ..." if len(source.dropped) > 6 else "")
        warnings.append(f"no part of the model, left out: {shown}")
    if target in ("vit-npz", "big_vision") and isinstance(model, ModelConfig):
        if model.activation != "gelu_tanh":
            warnings.append(
                "who reads this npz computes GELU by its tanh approximation: logits differ by "
                "about 1e-4"
            )
        if model.norm_eps != 1e-6:
            warnings.append(f"who reads this npz takes 1e-6 as LayerNorm's, not {model.norm_eps}")
        if model.stem and model.stem.std_eps_in != "deviation":
            warnings.append("who reads this npz adds 1e-5 in weight standardisation: logits differ")
        warnings.append("an npz holds no class names and no pre-processing")
    if target == "vit" and (said := timm_config.not_in_timm(model)):
        warnings.append(f"timm will not load it: it does not know {', '.join(said)}")
    return warnings


def _saved(
    row: Row, tensors: Mapping[str, LazyTensor], num_heads: int
) -> Iterator[tuple[str, LazyTensor]]:
    """The target's tensors of a row."""
    import numpy as np

    ours = [tensors[name] for name in row.ours]
    count = sum(tensor.shape[0] for tensor in ours) // len(row.theirs)

    def read(k: int) -> np.ndarray:
        whole = ours[0].read() if len(ours) == 1 else np.concatenate([t.read() for t in ours])
        array: np.ndarray = row.op.save(whole[k * count : (k + 1) * count], num_heads)
        return array

    each = np.broadcast_to(np.int8(0), (count, *ours[0].shape[1:]))
    shape = row.op.save(each, num_heads).shape
    for k, name in enumerate(row.theirs):
        yield name, LazyTensor(ours[0].dtype, shape, functools.partial(read, k))


def _check_sincos(tensor: LazyTensor, model: ModelConfig) -> None:
    """big_vision computes this table: it must be the one that we have. Raises OutputError."""
    import numpy as np

    if not np.array_equal(tensor.read(), sincos2d(model.grid, model.width)):
        raise OutputError("its sine-cosine position embeddings are not the ones of big_vision")


# ---------------------------------------------------------------------------------------------
# Changes


def change(
    info: CheckpointInfo, tensors: Mapping[str, LazyTensor], changes: Changes
) -> tuple[CheckpointInfo, dict[str, LazyTensor]]:
    """A checkpoint with these changes made.

    Raises:
        ConfigError: one that this model cannot have.
    """
    model, found = info.model, dict(tensors)
    if changes.arch:
        model = _with_arch(model, changes.arch)
        rest = {k: v for k, v in info.provenance.items() if k != "assumed"}
        info = dataclasses.replace(info, provenance={**rest, "told": changes.arch})
    if changes.drop_head or changes.num_classes is not None:
        model = model.with_classes(0 if changes.drop_head else changes.num_classes or 0)
        if isinstance(model, ModelConfig) and changes.drop_head:
            pool: Any = "token" if model.pool == "token+gap" else model.pool
            model = dataclasses.replace(model, pre_logits=0, pool=pool)
        info = dataclasses.replace(info, classes=())
    old = info.model
    if changes.patch_size:
        if not isinstance(model, ModelConfig) or getattr(model, "stem", None):
            raise ConfigError("only a plain ViT's patch embedding can be resampled")
        size = (changes.patch_size, changes.patch_size)
        model = dataclasses.replace(
            model,
            patch_size=size,
            image_size=(model.grid[0] * size[0], model.grid[1] * size[1]),
        )
    wanted = tensor_shapes(model)
    changed = {}
    for name, shape in wanted.items():
        if name.startswith("head") and changes.num_classes is not None:
            changed[name] = LazyTensor("float32", shape, functools.partial(_zeros, shape))
        elif changes.patch_size and found[name].shape != shape:
            read = functools.partial(_adapted, name, found[name], old, model)
            changed[name] = LazyTensor(found[name].dtype, shape, read)
        else:
            changed[name] = found[name]
    preprocess = dataclasses.asdict(info.preprocess)
    preprocess |= {"size": list(model.image_size)} if changes.patch_size else {}
    unknown = set(changes.preprocess) - set(preprocess)
    if unknown:
        raise ConfigError(f"pre-processing has no {', '.join(sorted(unknown))}")
    preprocess = json.loads(json.dumps({**preprocess, **changes.preprocess}))
    try:
        info = dataclasses.replace(
            info,
            model=model,
            preprocess=native.from_json(type(info.preprocess), preprocess),
            classes=changes.labels or info.classes,
        )
    except ValueError as error:
        raise ConfigError(f"pre-processing cannot be so: {error}") from error
    if changes.labels and len(changes.labels) != model.num_classes:
        raise ConfigError(f"{len(changes.labels)} labels for {model.num_classes} classes")
    if changes.dtype is not None:
        changed = {name: _cast(tensor, changes.dtype) for name, tensor in changed.items()}
    return info, changed


def _with_arch(model: Any, arch: str) -> Any:
    """What the file does not say, from a variant or an architecture of timm's."""
    if not isinstance(model, ModelConfig):
        raise ConfigError("--arch is for Vision Transformers")
    known: Any = (
        model_config(arch, image_size=model.image_size)
        if "/" in arch
        else timm_config.model_from_args(arch, {})
    )
    for name in ("width", "depth", "mlp_dim"):
        if getattr(known, name) != getattr(model, name):
            raise ConfigError(
                f"{arch} has {name} {getattr(known, name)}, the file has {getattr(model, name)}"
            )
    fields = {"num_heads": known.num_heads}
    if "/" not in arch:
        fields |= {"activation": known.activation, "norm_eps": known.norm_eps}
    return dataclasses.replace(model, **fields)


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    import numpy as np

    return np.zeros(shape, np.float32)


def _adapted(name: str, tensor: LazyTensor, old: Any, new: Any) -> np.ndarray:
    array: np.ndarray = adapt_tensor(name, tensor.read(), old, new, "bilinear")
    return array


def _cast(tensor: LazyTensor, dtype: str) -> LazyTensor:
    if "float" not in tensor.dtype or tensor.dtype == dtype:
        return tensor
    wanted = native.numpy_dtype(dtype)
    return LazyTensor(dtype, tensor.shape, lambda: tensor.read().astype(wanted))


def parse_labels(lines: Sequence[str]) -> tuple[ClassLabel, ...]:
    """Classes from lines: a name, or an id, a tab and a name."""
    pairs = [line.rstrip("\n").split("\t") for line in lines if line.strip()]
    return tuple(ClassLabel(pair[0], pair[-1]) for pair in pairs)


# ---------------------------------------------------------------------------------------------
# Writing


def write(job: Conversion, force: bool = False) -> None:
    """Writes what was planned, each file whole or not at all.

    Raises:
        OutputError: the target exists (without `force`), or cannot be written.
    """
    is_file = job.output.suffix in (".safetensors", ".npz")
    if job.output.exists() and not force:
        raise OutputError("exists already", where=job.output, hint="--force replaces it")
    if not is_file:
        try:
            job.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot be made: {error.strerror or error}", where=job.output
            ) from error
    file = job.output if is_file else job.output / "model.safetensors"
    if os.path.realpath(file) == os.path.realpath(job.source.file):
        raise OutputError("is the checkpoint itself: take another name", where=file)
    tensors = {name: _watched(name, tensor, job.nan) for name, tensor in job.tensors.items()}
    if job.format in ("vit-npz", "big_vision"):
        npz.write(file, tensors)
        return
    if job.format == "transformers":
        config, processor = hf.to_transformers(job.info, job.kind)
        dtypes = {tensor.dtype for tensor in tensors.values()}
        config["dtype"] = max(dtypes, key=lambda name: native.numpy_dtype(name).itemsize)
        native.write(file, tensors, {"format": "pt"})
        for name, table in (("preprocessor_config", processor), ("config", config)):
            text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
            write_text(job.output / f"{name}.json", text)
        return
    native.write(file, tensors, job.info.to_metadata())
    if not is_file:
        write_config(job.output / "config.json", job.info)


def _watched(name: str, tensor: LazyTensor, nan: list[str]) -> LazyTensor:
    """The tensor; its name is noted when it is read and holds NaN."""

    def read() -> np.ndarray:
        array = tensor.read()
        if "float" in tensor.dtype and array.size and math.isnan(float(array.min())):
            nan.append(name)
        return array

    return LazyTensor(tensor.dtype, tensor.shape, read)
