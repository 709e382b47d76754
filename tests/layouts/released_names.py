"""The tensor names of other releases, written by hand from the code of their authors.

Each function converts the arrays of a model from timm's names to those of a checkpoint as its
authors release it. Sources: bit_pytorch/models.py, big_vision/models/bit_paper.py,
torchvision/models/vision_transformer.py, deit/models_v2.py, dino/main_dino.py,
moco-v3/moco/builder.py, msn/src/deit.py, dinov2/models/vision_transformer.py, mae/models_mae.py,
clip/model.py, open_clip/transformer.py.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, Any]


def bit(arrays: Arrays, conv: str = "standardized_conv2d") -> Arrays:
    """BiT ResNets as released: TensorFlow's names, HWIO kernels."""
    found = {}
    for name, array in arrays.items():
        name = re.sub(r"stages\.(\d+)\.blocks\.(\d+)\.", _unit, name)
        name = re.sub(r"conv([123])\.weight", lambda m: f"{'_abc'[int(m[1])]}/{conv}/kernel", name)
        name = re.sub(r"norm([123])\.", lambda m: f"{'_abc'[int(m[1])]}/group_norm/", name)
        name = name.replace("downsample.conv.weight", f"a/proj/{conv}/kernel")
        name = name.replace("stem.conv.weight", f"root_block/{conv}/kernel")
        name = name.replace("norm.", "group_norm/").replace("head.fc.", "head/conv2d/")
        if "norm" in name:
            name = name.replace("weight", "gamma").replace("bias", "beta")
        name = name.replace("/weight", "/kernel")
        found[f"resnet/{name}"] = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array
    return found


def _unit(match: re.Match[str]) -> str:
    return f"block{int(match[1]) + 1}/unit{int(match[2]) + 1:02d}/"


def bit_paper(arrays: Arrays, flat: bool = False) -> Arrays:
    """BiT ResNets in big_vision, renamed from the original as by its own loader; `flat`: norms are
    (C,), not (1, 1, 1, C)."""
    found = {}
    for name, array in bit(arrays).items():
        name = name.removeprefix("resnet/")
        name = name.replace("root_block/standardized_conv2d", "root_block/conv_root")
        name = name.replace("a/proj/standardized_conv2d", "conv_proj")
        for number, letter in enumerate("abc", 1):
            name = name.replace(f"/{letter}/standardized_conv2d", f"/conv{number}")
            name = name.replace(f"/{letter}/group_norm", f"/gn{number}")
        name = name.replace("group_norm", "norm-pre-head").replace("head/conv2d", "head")
        name = name.replace("gamma", "scale").replace("beta", "bias")
        if name == "head/kernel":
            array = array[0, 0]
        elif not flat and ("gn" in name or "norm" in name):
            array = array[None, None, None]
        found["params/" + name] = array
    return found


def torchvision(arrays: Arrays, old: bool = False) -> Arrays:
    """torchvision's `vit_*`; `old`: its first version, which named the layers of an MLP."""
    layers = ("linear_1", "linear_2") if old else ("0", "3")
    renamed = {
        "cls_token": "class_token",
        "patch_embed.proj": "conv_proj",
        "pos_embed": "encoder.pos_embedding",
        "attn.qkv.": "self_attention.in_proj_",
        "attn.proj": "self_attention.out_proj",
        "norm1": "ln_1",
        "norm2": "ln_2",
        "mlp.fc1": f"mlp.{layers[0]}",
        "mlp.fc2": f"mlp.{layers[1]}",
        "head.": "heads.head.",
    }
    found = {}
    for name, array in arrays.items():
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        name = re.sub(r"^norm", "encoder.ln", name)
        found[re.sub(r"^blocks\.", "encoder.layers.encoder_layer_", name)] = array
    return found


def torchvision_average(arrays: Arrays) -> Arrays:
    """The averaged model of torchvision's training script: a prefix and a count."""
    found = {f"module.{name}": array for name, array in torchvision(arrays).items()}
    return found | {"n_averaged": np.array(32)}


def deit3(arrays: Arrays) -> Arrays:
    """DeiT III: its own names for layer scale."""
    return {re.sub(r"ls([12])\.gamma", r"gamma_\1", name): a for name, a in arrays.items()}


def dino(
    arrays: Arrays,
    prefix: str = "module.backbone.",
    heads: tuple[str, ...] = ("module.head.mlp.0", "module.head.last_layer"),
) -> Arrays:
    """A DINO teacher as saved in training, with a projection head that is not a classifier."""
    width = arrays["cls_token"].shape[-1]
    head = {f"{name}.weight": np.ones((2, width), "f") for name in heads}
    plain = {n: a for n, a in arrays.items() if not n.startswith("head")}
    return {prefix + n: a for n, a in plain.items()} | head


def mocov3(arrays: Arrays) -> Arrays:
    """MoCo v3: another encoder, and a projection head inside each."""
    base, momentum = "module.base_encoder.", "module.momentum_encoder."
    heads = (f"{base}head.0", f"{base}head.3", "module.predictor.0")
    return dino(arrays, base, heads) | dino(arrays, momentum, (f"{momentum}head.0",))


def msn(arrays: Arrays) -> Arrays:
    """MSN: a projection head with a name of its own."""
    return dino(arrays, "module.", ("module.fc.fc1", "module.fc.bn1"))


def dinov2(arrays: Arrays, chunked: bool = False) -> Arrays:
    """DINOv2: a mask token, and its own name for registers; `chunked`: block names as in training,
    in two chunks."""
    width = arrays["cls_token"].shape[-1]
    depth = 1 + max(int(m[1]) for n in arrays if (m := re.match(r"blocks\.(\d+)", n)))
    found = {"mask_token": np.ones((1, width), np.float32)}
    for name, array in arrays.items():
        if chunked:
            halves = re.compile(r"^blocks\.(\d+)\.")
            name = halves.sub(lambda m: f"blocks.{int(m[1]) * 2 // depth}.{m[1]}.", name)
        found["register_tokens" if name == "reg_token" else name] = array
    return found


def mae(arrays: Arrays) -> Arrays:
    """An MAE pre-training checkpoint: the encoder and its decoder."""
    width = arrays["cls_token"].shape[-1]
    found = {n: a for n, a in arrays.items() if not n.startswith("head")}
    names = ("decoder_embed.weight", "decoder_blocks.0.norm1.weight", "decoder_norm.weight")
    names += ("decoder_pred.weight", "decoder_pos_embed", "mask_token")
    return found | {name: np.ones((1, 1, width), np.float32) for name in names}


def open_clip(arrays: Arrays, openai: bool = False) -> Arrays:
    """A CLIP in open_clip: two towers, a projection and a logit scale; `openai`: as in OpenAI's own
    archive, with three scalars."""
    renamed = {
        "patch_embed.proj": "conv1",
        "norm_pre": "ln_pre",
        "blocks.": "transformer.resblocks.",
        "attn.qkv.": "attn.in_proj_",
        "attn.proj": "attn.out_proj",
        "norm1": "ln_1",
        "norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    found = {}
    for name, array in arrays.items():
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        name = re.sub(r"^norm\.", "ln_post.", name)
        found[f"visual.{name}"] = array
    found = {name: array for name, array in found.items() if "head" not in name}
    found["visual.class_embedding"] = found.pop("visual.cls_token")[0, 0]
    found["visual.positional_embedding"] = found.pop("visual.pos_embed")[0]
    width = len(found["visual.class_embedding"])
    found |= {"visual.proj": np.ones((width, 8), "f"), "logit_scale": np.ones((), "f")}
    found |= {"transformer.resblocks.0.ln_1.weight": np.ones(8, "f")}
    numbers = ("input_resolution", "context_length", "vocab_size")
    return found | ({name: np.array(32) for name in numbers} if openai else {})


RELEASES: dict[str, tuple[str, Callable[[Arrays], Arrays]]] = {
    "BiT bit.npz": ("timm_bit_resnetv2", bit),
    "big_vision BiT bit_paper.npz": ("timm_bit_resnetv2", bit_paper),
    "torchvision vit.safetensors": ("timm_vit_default", torchvision),
    "torchvision vit.pth": ("timm_vit_default", torchvision),
    "torchvision, first names vit.pth": ("timm_vit_default", lambda a: torchvision(a, old=True)),
    "torchvision, average vit.pth": ("timm_vit_default", torchvision_average),
    "DeiT deit.pth": ("timm_vit_default", dict),
    "DeiT, distilled deit.pth": ("timm_deit_distilled", dict),
    "DeiT III deit3.pth": ("timm_deit3", deit3),
    "DINO dino.pth": ("timm_vit_default", dino),
    "MoCo v3 moco.pth.tar": ("timm_vit_default", mocov3),
    "MSN msn.pth.tar": ("timm_vit_default", msn),
    "DINOv2 dinov2.pth": ("timm_dinov2", dinov2),
    "DINOv2, registers dinov2.pth": ("timm_vit_reg4_dinov2", dinov2),
    "DINOv2, in chunks dinov2.pth": ("timm_dinov2", lambda a: dinov2(a, chunked=True)),
    "MAE mae.pth": ("timm_vit_default", mae),
    "open_clip clip.safetensors": ("timm_clip_prenorm", open_clip),
    "OpenAI's CLIP clip.pt": ("timm_clip_prenorm", lambda a: open_clip(a, openai=True)),
}
"""Release and file name: (golden timm case, function that renames its tensors)."""
