"""What each layout that we write can say of a model, and the table by which it says it."""

from __future__ import annotations

from typing import Literal, get_args

from vitcli.config import Architecture, BiTConfig, ModelConfig
from vitcli.layouts import keymaps, timm_architectures
from vitcli.layouts import transformers_config as hf
from vitcli.layouts.keymaps import Row

Format = Literal["vit", "transformers", "vit-npz", "bit-npz", "big_vision"]
"""vit: ours, which is timm's Hub layout; vit-npz, bit-npz: the authors', of ViTs and hybrids and of
BiT ResNets."""
FORMATS: tuple[Format, ...] = get_args(Format)
NPZ: tuple[Format, ...] = ("vit-npz", "bit-npz", "big_vision")


def npz_of(model: Architecture) -> Format:
    """The authors' layout of a model."""
    return "bit-npz" if isinstance(model, BiTConfig) else "vit-npz"


def transformers_kind(model: Architecture) -> str:
    """transformers' model_type of a model that it can say."""
    if not isinstance(model, ModelConfig) or not model.layer_scale:
        return "vit"
    return "dinov2_with_registers" if model.num_registers else "dinov2"


def rows(target: Format, model: Architecture) -> tuple[Row, ...] | None:
    """The table of a target; None where its names are ours."""
    if target == "vit":
        return None
    if isinstance(model, BiTConfig):
        paper = target == "big_vision"
        table = keymaps.bit_rows(model.resnet.depths, paper)
        return table if paper else keymaps.prefixed(table, "resnet/")
    if target == "vit-npz":
        stem = keymaps.stem_rows(model.stem.depths) if model.stem else ()
        return keymaps.flax_rows(keymaps.PRE_LINEN, keymaps.POSITIONS[0], "") + stem
    if target == "big_vision":
        return keymaps.flax_rows(keymaps.LINEN, keymaps.POSITIONS[1], "MAPHead_0/")
    family = transformers_kind(model).partition("_")[0] + ("-swiglu" if model.swiglu else "")
    table = keymaps.prefixed(keymaps.TRANSFORMERS[family], _transformers_prefix(model))
    return (*table, *keymaps.HEAD)


def _transformers_prefix(model: ModelConfig) -> str:
    return f"{transformers_kind(model)}." if model.num_classes else ""


def unused(target: Format, model: Architecture) -> dict[str, tuple[int, ...]]:
    """Tensors that a target has to hold although no image's logits depend on them."""
    if target != "transformers" or not isinstance(model, ModelConfig) or not model.num_registers:
        return {}
    return {f"{_transformers_prefix(model)}embeddings.mask_token": (1, model.width)}


def not_in(target: Format, model: Architecture) -> list[str]:
    """What of a model a layout cannot say; empty if it can."""
    if target == "vit":
        return []
    if isinstance(model, BiTConfig):
        return _not_in_for_bit(target, model)
    if target == "bit-npz":
        return ["a Vision Transformer"]
    hybrid = ["a ResNet stem"] if model.stem and target != "vit-npz" else []
    if target == "transformers":
        return hybrid + hf.not_in_transformers(model, transformers_kind(model))
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


def _not_in_for_bit(target: Format, model: BiTConfig) -> list[str]:
    borders = {"bit-npz": "zeros", "big_vision": "-inf"}
    if target not in borders:
        return ["a BiT ResNet"]
    checks = {
        f"{model.resnet.pool_padding} around the max-pool": model.resnet.pool_padding
        != borders[target],
        f"{model.resnet.padding} padding": model.resnet.padding != "symmetric",
    }
    return [what for what, impossible in checks.items() if impossible]


def warnings(target: Format, model: Architecture) -> list[str]:
    """What those who read the target compute otherwise, in the last digits."""
    found = []
    if target == "vit" and (said := timm_architectures.not_in_timm(model)):
        name = timm_architectures.name_with_timms_epsilons(model)
        gelu = ", and exact GELU" if isinstance(model, ModelConfig) else ""
        instead = f" (--arch {name} takes timm's own{gelu})" if name else ""
        found.append(f"timm will not load it: it does not know {', '.join(said)}{instead}")
    elif target == "vit":
        found += timm_architectures.otherwise_in_timm(model)
    if target not in NPZ:
        return found
    if isinstance(model, BiTConfig):
        if (model.resnet.std_eps, model.resnet.std_eps_in) != (1e-10, "variance"):
            found.append("who reads this npz adds 1e-10 to the variance in weight standardisation")
    else:
        if model.activation != "gelu_tanh":
            found.append(
                "who reads this npz computes GELU by its tanh approximation: logits differ by "
                "about 1e-4"
            )
        if model.norm_eps != 1e-6:
            found.append(f"who reads this npz takes 1e-6 as LayerNorm's, not {model.norm_eps}")
        if model.stem and model.stem.std_eps_in != "deviation":
            found.append("who reads this npz adds 1e-5 in weight standardisation: logits differ")
    return [*found, "an npz holds no class names and no pre-processing"]
