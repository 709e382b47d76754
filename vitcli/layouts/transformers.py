"""The layout of transformers: ViT, DeiT, MAE, MSN, I-JEPA, DINOv2, DINOv3, and the image towers of
SigLIP and CLIP models, with their `config.json` and `preprocessor_config.json`.

Sources: transformers/models/*/modeling_*.py, configuration_*.py, and each image processor.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitcli.architectures.vit import RELATIVE
from vitcli.checkpoints.info import CheckpointInfo, unique_names
from vitcli.checkpoints.tensor_file import LazyTensor, Store, to_lazy
from vitcli.config import (
    Activation,
    Architecture,
    ClassLabel,
    ModelConfig,
    Preprocess,
    Score,
    Size,
)
from vitcli.errors import CheckpointError, warn
from vitcli.layouts.foreign_json import ForeignJson, read_json
from vitcli.layouts.layout import (
    CLIP,
    IMAGENET,
    Layout,
    Match,
    find_prefix,
    tensors_under,
    unsupported_fields,
    with_key_biases,
)
from vitcli.layouts.table import Row, add_prefix, rows

CONFIG = "config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files that specify the preprocessing; the second has it under "image_processor"."""


class ModelType(NamedTuple):
    """The defaults of a model_type in transformers."""

    norm_eps: float
    activation: Activation
    preprocess: Preprocess
    """The authors' preprocessing, used if no file specifies it; its size is ignored."""
    processor: str = "ViT"
    """The image processor, if the file does not name one; a key of `IMAGE_PROCESSORS`."""
    square_only: bool = False
    """Whether it accepts only square images."""
    any_size: bool = False
    """Whether it interpolates its position embeddings for images of other sizes."""


_CROPPED = Preprocess((224, 224), *IMAGENET, "bicubic", 0.875)
_SQUASHED = Preprocess((224, 224), *IMAGENET, "bilinear", crop_mode="squash")
_VIT = ModelType(1e-12, "gelu", Preprocess(interpolation="bilinear", crop_mode="squash"))
_DINO = ModelType(1e-6, "gelu", _CROPPED, "Bit", square_only=True, any_size=True)
_DINO3 = ModelType(1e-5, "gelu", _SQUASHED, "DINOv3ViT", any_size=True)
_CLIP = ModelType(1e-5, "quick_gelu", Preprocess((224, 224), *CLIP), "CLIP", square_only=True)
_BEIT = ModelType(1e-12, "gelu", Preprocess(crop_mode="squash"), "Beit")
_SIGLIP = ModelType(1e-6, "gelu_tanh", Preprocess(crop_mode="squash"), "Siglip", square_only=True)

MODEL_TYPES = {
    "vit": _VIT,
    "deit": ModelType(1e-12, "gelu", _CROPPED, "DeiT"),
    "vit_mae": ModelType(1e-12, "gelu", _SQUASHED, square_only=True),
    "vit_msn": _VIT._replace(norm_eps=1e-6),
    "ijepa": _VIT,
    "dinov2": _DINO,
    "dinov2_with_registers": _DINO,
    "dinov3_vit": _DINO3,
    "beit": _BEIT,
    "data2vec-vision": _BEIT,
    "siglip_vision_model": _SIGLIP,
    "clip_vision_model": _CLIP,
    "metaclip_2_vision_model": _CLIP,
    "altclip_vision_model": _CLIP,
    "chinese_clip_vision_model": _CLIP,
}
"""By model_type; a two-tower model ("clip") has that of its image tower."""


IMAGE_PROCESSORS = {
    "ViT": Preprocess(interpolation="bilinear", crop_mode="squash"),
    "DeiT": Preprocess(crop_pct=0.875, crop_mode="squash"),
    "DINOv3ViT": _SQUASHED,
    "Beit": Preprocess(crop_mode="squash"),
    "Siglip": Preprocess(crop_mode="squash"),
    **dict.fromkeys(("Bit", "CLIP", "ChineseCLIP"), Preprocess((224, 224), *CLIP)),
}
"""The defaults of an image processor, by class name without the suffix."""

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}
"""Pillow's numbers for filters."""
_SCORES: dict[str, Score] = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "none",
}
"""problem_type -> the score function that transformers' pipeline applies to logits."""

# ---------------------------------------------------------------------------------------------
# Tables. Rows for the same tensor of ours are alternatives: a file has the names of one of them.

_VIT_TABLE = """
cls_token                embeddings.cls_token
reg_token                embeddings.register_tokens
pos_embed                embeddings.position_embeddings
patch_embed.proj.*       embeddings.patch_embeddings.projection.*
blocks.{i}.norm1.*       {layer}.layernorm_before.*
blocks.{i}.attn.qkv.*    {layer}.attention.attention.[query,key,value].*
blocks.{i}.attn.proj.*   {layer}.attention.output.dense.*
blocks.{i}.norm2.*       {layer}.layernorm_after.*
blocks.{i}.mlp.fc1.*     {layer}.intermediate.dense.*
blocks.{i}.mlp.fc2.*     {layer}.output.dense.*
norm.*                   layernorm.*
fc_norm.*                pooler.layernorm.*
pre_logits.fc.*          pooler.dense.*
"""
_DINO_TABLE = """
blocks.{i}.norm1.*       {layer}.norm1.*
blocks.{i}.ls1.gamma     {layer}.layer_scale1.lambda1
blocks.{i}.norm2.*       {layer}.norm2.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.fc1.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.fc2.*
blocks.{i}.ls2.gamma     {layer}.layer_scale2.lambda1
"""
_GATED_TABLE = """
blocks.{i}.mlp.fc1.*     {layer}.mlp.weights_in.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.weights_out.*
"""
_READ_TABLE = """
patch_embed.proj.*       embeddings.patch_embeddings.*
blocks.{i}.attn.qkv.*    {layer}.attention.[q_proj,k_proj,v_proj].*
blocks.{i}.attn.proj.*   {layer}.attention.o_proj.*
blocks.{i}.attn.relative_position_bias_table {layer}.attention.attention.{bias}
blocks.{i}.attn.relative_position_bias_table {layer}.{bias}
blocks.{i}.ls1.gamma     {layer}.lambda_1
blocks.{i}.mlp.fc1.*     {layer}.mlp.[gate_proj,up_proj].*
blocks.{i}.mlp.fc1.*     {layer}.mlp.up_proj.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.down_proj.*
blocks.{i}.ls2.gamma     {layer}.lambda_2
norm.*                   norm.*
"""
"""Names of BEiT, of DINOv3, and of all models in 5.x, which reads both and writes those of 4.x."""
_LAYERS = ("encoder.layer.{i}", "layers.{i}", "layer.{i}", "model.layer.{i}")
"""Names of a block; the first is the one that is written."""

_CLIP_TABLE = """
cls_token                embeddings.class_embedding                vector
patch_embed.proj.*       embeddings.patch_embedding.*
pos_embed                embeddings.position_embedding.weight      table
norm_pre.*               pre_layrnorm.*
blocks.{i}.norm1.*       {layer}.layer_norm1.*
blocks.{i}.attn.qkv.*    {layer}.self_attn.[q_proj,k_proj,v_proj].*
blocks.{i}.attn.proj.*   {layer}.self_attn.out_proj.*
blocks.{i}.norm2.*       {layer}.layer_norm2.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.fc1.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.fc2.*
norm.*                   post_layernorm.*
attn_pool.latent         head.probe
attn_pool.q.weight,attn_pool.kv.weight  head.attention.in_proj_weight
attn_pool.q.bias,attn_pool.kv.bias      head.attention.in_proj_bias
attn_pool.proj.*         head.attention.out_proj.*
attn_pool.norm.*         head.layernorm.*
attn_pool.mlp.fc1.*      head.mlp.fc1.*
attn_pool.mlp.fc2.*      head.mlp.fc2.*
"""
_HEAD = rows("head.*  classifier.*")
_TEACHER_HEADS = rows("head.*  cls_classifier.*\nhead_dist.*  distillation_classifier.*")


def _rows_to_read(prefix: str, table: str = "") -> tuple[Row, ...]:
    """Return all rows that a ViT, DINOv2, DINOv3 or BEiT may have, and those of another table."""
    table = _VIT_TABLE + _DINO_TABLE + _GATED_TABLE + _READ_TABLE + table
    bias = f"relative_position_bias.{RELATIVE}"
    alternatives = [row for layer in _LAYERS for row in rows(table, layer=layer, bias=bias)]
    # 5.x saves the blocks of ViTMSNForImageClassification without the prefix.
    blocks = (row for row in alternatives if prefix and "{i}" in row.theirs[0])
    return (*add_prefix(alternatives, prefix), *blocks)


# ---------------------------------------------------------------------------------------------
# Reading

Tensors = Mapping[str, LazyTensor]
_DISTILLATION_TOKEN = "embeddings.distillation_token"
_PATCHES = "embeddings.patch_embedding"
_ANCHORS = (f"{_PATCHES}.weight", f"{_PATCHES}s.projection.weight", f"{_PATCHES}s.weight")
"""Names that identify a CLIP, a ViT and a DINOv3."""


class Transformers(Layout):
    """Models are written as ViT, or with layer scale as Dinov2 or Dinov2WithRegisters."""

    name = "transformers"
    library = "transformers"
    config_files = (CONFIG, *PROCESSORS)
    projections = r"visual_projection"
    suffixes = ("",)

    def find(self, store: Store) -> Match | None:
        prefixes = (find_prefix(store.tensors, anchor) for anchor in _ANCHORS)
        candidates = zip(prefixes, (_find_clip, _find_vit, _find_dino3), strict=True)
        prefix, find = next((c for c in candidates if c[0] is not None), (None, _find_vit))
        if prefix is None:
            return None
        config = read_config(store.path.parent)
        outer_prefix = _classifier_prefix(store, prefix)
        tensors = tensors_under(store, outer_prefix)
        name, match = find(tensors, prefix.removeprefix(outer_prefix), config)
        family = MODEL_TYPES[config.get("model_type", str, name)]
        match = dataclasses.replace(match, default=family.preprocess)
        fields = {"activation": family.activation, "norm_eps": family.norm_eps, **match.fields}
        if "model_type" not in config:
            assumed = frozenset({"num_heads", "activation", "norm_eps"})
            return dataclasses.replace(match, fields=fields, assumed=assumed)
        fields["num_heads"] = config.integer("num_attention_heads", 12)
        fields["norm_eps"] = config.get("layer_norm_eps", float, family.norm_eps, 0, 1)
        if "hidden_act" in config:
            gated = config.get("use_gated_mlp", bool, False)  # by SiLU, the only one we support
            activations = {"silu": fields["activation"]} if gated else _ACTIVATIONS
            fields["activation"] = config.choice("hidden_act", activations)
        if "image_size" in config:
            fields["image_size"] = config.size("image_size")
        preprocess = _read_preprocess(store.path.parent, family, fields.get("image_size"))
        if family is _DINO3 and preprocess:  # whose position embeddings fit any size
            fields["image_size"] = preprocess.size
        size, image_size = preprocess.size if preprocess else None, fields.get("image_size")
        return dataclasses.replace(
            match,
            fields=fields,
            preprocess=preprocess,
            input_size=size if family.any_size and image_size and size != image_size else None,
            classes=_read_classes(config),
            score=_read_score(config),
        )

    # -----------------------------------------------------------------------------------------
    # Writing

    def unsupported(self, model: Architecture) -> list[str]:
        if not isinstance(model, ModelConfig):
            return ["a BiT ResNet"]
        dino, headless = model.layer_scale, not model.num_classes
        unsupported = unsupported_fields(
            model,
            pool=("token",) if headless or not dino else ("token+gap",),
            num_registers=None if dino else (0,),
            posemb_tokens=("class",) if model.num_registers else ("all", "class"),
            pre_logits=(0, model.width) if headless and not dino else (0,),
            layer_scale=None,
            qkv_bias=None,
            activation=_ACTIVATIONS.values(),
            swiglu=None if dino else (False,),
            norm_eps=None,
        )
        height, width = model.image_size
        remainder = (height % model.patch_size[0], width % model.patch_size[1])
        checks = {
            "patches that are not square": model.patch_size[0] != model.patch_size[1],
            f"an MLP of {model.mlp_dim}": dino and _mlp_ratio(model) is None,
            "images that are not square": dino and height != width,
            "images whose size is not a multiple of the patch size": remainder != (0, 0),
        }
        return unsupported + [reason for reason, applies in checks.items() if applies]

    def warnings(self, info: CheckpointInfo) -> list[str]:
        preprocess, notes = info.preprocess, []
        height, width = preprocess.size
        if preprocess.crop_mode == "border":
            notes.append("transformers has no crop mode 'border': it squashes images")
        if preprocess.crop_mode == "center" and height != width:
            notes.append(
                f"transformers pads images with black where they do not fill {height} x {width} "
                "pixels"
            )
        if preprocess.interpolation in ("nearest", "box"):
            notes.append(
                f"transformers resizes images with '{preprocess.interpolation}' only with "
                'AutoImageProcessor.from_pretrained(..., backend="pil")'
            )
        if not preprocess.antialias:
            notes.append(
                "transformers always resizes images with antialiasing; this model expects none"
            )
        return notes

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        assert isinstance(model, ModelConfig)
        gated = _GATED_TABLE if model.swiglu else ""
        table = gated + (_DINO_TABLE if model.layer_scale else "") + _VIT_TABLE
        return (*add_prefix(rows(table, layer=_LAYERS[0]), _prefix(model)), *_HEAD)

    def extra(self, model: Architecture, dtype: str) -> dict[str, LazyTensor]:
        """Return a mask token, or an identity as the pooler of a model without one: AutoModel would
        create a random one."""
        assert isinstance(model, ModelConfig)
        import numpy as np

        arrays: dict[str, np.ndarray] = {}
        if model.num_registers:
            arrays[f"{_prefix(model)}embeddings.mask_token"] = np.zeros((1, model.width))
        elif not (model.num_classes or model.layer_scale or model.pre_logits):
            arrays["pooler.dense.weight"] = np.eye(model.width)
            arrays["pooler.dense.bias"] = np.zeros(model.width)
        return {name: to_lazy(array, dtype) for name, array in arrays.items()}

    def configs(self, info: CheckpointInfo) -> dict[str, dict[str, Any]]:
        height, width = info.provenance.get("input_size", info.preprocess.size)
        processor = _processor_config(dataclasses.replace(info.preprocess, size=(height, width)))
        # For computation; transformers would otherwise use the stored dtype.
        config = {**_model_config(info), "dtype": "float32"}
        return {PROCESSORS[0]: processor, CONFIG: config}

    def resized_config(
        self, name: str, config: ForeignJson, info: CheckpointInfo
    ) -> dict[str, Any] | None:
        size = info.model.image_size
        if name == PROCESSORS[1] and "image_processor" not in config:
            return None
        if name in PROCESSORS:
            return _resized_processor(config, info.preprocess)
        if "model_type" not in config or "architecture" in config:
            return None
        fields = {"image_size": size[0] if size[0] == size[1] else list(size)}
        keys = [key for key in ("vision_config", "vision_config_dict") if key in config]
        nested = {key: config.nested(key).values | fields for key in keys}
        return {**config.values, **(nested or fields)}


def read_config(directory: Path) -> ForeignJson:
    """Read the config.json in a directory, of a two-tower model its image tower; empty if it is not
    transformers'.

    Raises:
        CheckpointError: its model_type is not supported, or it is not JSON.
    """
    config = read_json(directory / CONFIG)
    if config is None or "model_type" not in config:
        return ForeignJson({})
    name = config.get("model_type", str)
    model_type = name if name in MODEL_TYPES else f"{name}_vision_model"
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"the transformers model_type '{name}' is not supported",
            where=config.where,
            hint=f"supported: {', '.join(MODEL_TYPES)}",
        )
    # The older key replaces the newer one entirely.
    use_older = "vision_config_dict" in config and MODEL_TYPES[model_type] is _CLIP
    vision = config.nested("vision_config_dict" if use_older else "vision_config")
    outer = {key: config.values[key] for key in ("id2label", "problem_type") if key in config}
    return config.merged({**vision.values, **outer, "model_type": model_type})


def _classifier_prefix(store: Store, prefix: str) -> str:
    """Return the prefix that a training framework adds to all names of a model with a classifier:
    "module.", or Lightning's "model."."""
    heads = ("cls_classifier.weight", "classifier.weight")
    prefixes = (n.removesuffix(head) for n in store.tensors for head in heads if n.endswith(head))
    return max((outer for outer in prefixes if prefix.startswith(outer)), key=len, default="")


def _find_vit(tensors: Tensors, prefix: str, config: ForeignJson) -> tuple[str, Match]:
    """Match a ViT, a DINOv2 or a BEiT, and return its likely model_type with the match."""
    dino = any(name.endswith("layer_scale1.lambda1") for name in tensors)
    beit = any(name.endswith((".lambda_1", RELATIVE)) for name in tensors)
    teacher = "cls_classifier.weight" in tensors
    has_classifier = teacher or "classifier.weight" in tensors
    # A distillation token that no head reads acts as a register.
    table = _rows_to_read(prefix, f"{'dist' if teacher else 'reg'}_token {_DISTILLATION_TOKEN}")
    table += _TEACHER_HEADS if teacher else _HEAD
    drop = r"mask_token$|^decoder\.|position_ids$|relative_position_index$"
    if has_classifier or not _has_tanh_pooler(tensors, prefix, config):
        drop += r"|pooler\."
        table = tuple(row for row in table if not row.ours[0].startswith("pre_logits"))
    fields: dict[str, Any] = {}
    if f"{prefix}embeddings.cls_token" in tensors and dino and not has_classifier:
        fields["pool"] = "token"
    if beit:
        num_stored, tensors = len(tensors), with_key_biases(tensors)
        fields["key_bias"] = len(tensors) == num_stored
    model_type = "dinov2" if dino else "beit" if beit else "vit"
    return model_type, Match(table, tensors, droppable=drop, fields=fields)


def _has_tanh_pooler(tensors: Tensors, prefix: str, config: ForeignJson) -> bool:
    """Whether there is a pooler with tanh. A linear one must be the identity that `extra` writes.

    Raises:
        CheckpointError: it is neither.
    """
    weight, bias = (tensors.get(f"{prefix}pooler.dense.{n}") for n in ("weight", "bias"))
    if weight is None or bias is None:
        return False
    if (act := config.get("pooler_act", str, "tanh")) == "tanh":
        return True
    import numpy as np

    shift = bias.read()
    if act != "linear" or np.any(shift) or not np.array_equal(weight.read(), np.eye(len(shift))):
        config.refuse("pooler_act", "tanh")
    return False


def _find_clip(tensors: Tensors, prefix: str, config: ForeignJson) -> tuple[str, Match]:
    """Match the image tower of a CLIP or a SigLIP, likewise."""
    siglip = f"{prefix}embeddings.class_embedding" not in tensors
    table = add_prefix(rows(_CLIP_TABLE, layer="encoder.layers.{i}"), prefix)
    drop = r"position_ids$|^text_model\.|_projection\.weight$|^logit_(scale|bias)$"
    fields: dict[str, Any] = {}
    if "classifier.weight" in tensors:  # of the patches' mean, not of the pooled output
        unused = "attn_pool." if siglip else "norm."
        table = tuple(row for row in table if not row.ours[0].startswith(unused)) + _HEAD
        fields = {"pool": "gap", "fc_norm": False}
        drop += r"|(^|\.)head\." if siglip else r"|(^|\.)post_layernorm\."
    model_type = "siglip_vision_model" if siglip else "clip_vision_model"
    return model_type, Match(table, tensors, droppable=drop, fields=fields)


def _find_dino3(tensors: Tensors, prefix: str, config: ForeignJson) -> tuple[str, Match]:
    """Match a DINOv3, likewise. Keys have no bias; queries and values may have one."""
    queries = config.get("query_bias", bool, True)
    if config.get("value_bias", bool, True) != queries:
        config.refuse("value_bias", f"{queries}, like query_bias")
    if config.get("rope_theta", float, 100.0) != 100:
        config.refuse("rope_theta", "100")
    drop = r"mask_token$|rope_embeddings\.inv_freq$"
    fields = {"rope": "dinov3", "pool": "token", "norm_eps": 1e-5}
    num_stored, tensors = len(tensors), with_key_biases(tensors)
    fields["key_bias"] = len(tensors) == num_stored
    return "dinov3_vit", Match(_rows_to_read(prefix), tensors, droppable=drop, fields=fields)


def _read_classes(config: ForeignJson) -> tuple[ClassLabel, ...]:
    """Return the class labels; empty if they are only numbered."""
    id2label = config.nested("id2label")
    names = [id2label.get(str(i), str, f"LABEL_{i}") for i in range(len(id2label.values))]
    if all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        return ()
    unique = len(set(names)) == len(names)
    return tuple(ClassLabel(n if unique else f"{n} {i}", n) for i, n in enumerate(names))


def _read_score(config: ForeignJson) -> Score | None:
    """Return the score function, if the config specifies it; for a single output, sigmoid."""
    if "problem_type" in config:
        return config.choice("problem_type", _SCORES)
    return "sigmoid" if len(config.nested("id2label").values) == 1 else None


# ---------------------------------------------------------------------------------------------
# Preprocessing


def _read_preprocess(directory: Path, family: ModelType, size: Size | None) -> Preprocess | None:
    """Read the image processor's file, with its own image size if the model supports it; None if
    there is no such file."""
    config, outer = read_json(directory / PROCESSORS[0]), read_json(directory / PROCESSORS[1])
    if outer is not None and "image_processor" in outer:  # transformers 5 prefers this one
        config = outer.nested("image_processor")
    if config is None or not config.values:
        return None
    name = config.get("image_processor_type", str, config.get("feature_extractor_type", str, ""))
    name = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name or family.processor)
    processor = name if name in IMAGE_PROCESSORS else family.processor
    defaults = dataclasses.replace(IMAGE_PROCESSORS[processor], size=size or (224, 224))
    mean: Any = (0.0, 0.0, 0.0)
    std: Any = (1.0, 1.0, 1.0)
    if config.get("do_normalize", bool, True):
        mean = config.triple("image_mean", defaults.mean)
        std = config.triple("image_std", defaults.std, low=1e-6)
    do_rescale = config.get("do_rescale", bool, True)
    factor = config.get("rescale_factor", float, 1 / 255, 1e-9, 1e6) if do_rescale else 1.0
    if (scale := factor * 255) != 1:  # mean and std are for pixels from 0 to 1
        mean, std = (tuple(value / scale for value in values) for values in (mean, std))
    fields: dict[str, Any] = {"mean": mean, "std": std}
    if "resample" in config:
        fields["interpolation"] = config.choice("resample", _FILTERS)
    crop, input_size, exact = _read_crop(config, processor)
    fields |= crop
    if input_size and size and input_size != size and not family.any_size:
        warn(
            f"specifies images of {input_size[0]} x {input_size[1]} pixels, which transformers "
            f"rejects for this model; using {size[0]} x {size[1]}",
            config.where,
        )
    elif not exact or name not in IMAGE_PROCESSORS:
        warn(
            "its resizing and cropping cannot be reproduced exactly; "
            f"using crop_mode={crop['crop_mode']} with crop_pct={crop['crop_pct']:.4g}",
            config.where,
        )
    if input_size and size and family.any_size:
        fields["size"] = input_size
    return dataclasses.replace(defaults, **fields)


def _read_crop(config: ForeignJson, processor: str) -> tuple[dict[str, Any], Size | None, bool]:
    """Read how images are resized and cropped: `Preprocess` fields, the size of the model's input
    (None: it depends on the image), and whether these fields give the same pixels."""
    defaults = IMAGE_PROCESSORS[processor]
    side = math.floor(defaults.size[0] / defaults.crop_pct)
    resized = _read_size(config, "size") or (side, side)
    input_size = _read_size(config, "crop_size") or defaults.size
    size = config.values.get("size")
    if isinstance(size, dict):
        squashed, exact = "height" in size, "longest_edge" not in size
    else:
        # SigLIP's default size is a square, but a single number means the shorter side.
        squashed = defaults.crop_mode == "squash" and not (size and processor == "Siglip")
        exact = True
    exact = exact and config.get("do_resize", bool, True)
    crops = defaults.crop_mode == "center" or defaults.crop_pct < 1
    if not config.get("do_center_crop", bool, crops):
        crop = {"crop_mode": "squash", "crop_pct": 1.0}
        return crop, resized if squashed else None, exact and squashed
    crop_pct = min(map(_crop_pct, input_size, resized))
    implied = tuple(math.floor(side / crop_pct) for side in input_size)
    exact = exact and implied == resized and (squashed or input_size[0] == input_size[1])
    mode = "squash" if squashed else "center"
    return {"crop_mode": mode, "crop_pct": crop_pct, "crop_rounding": "down"}, input_size, exact


def _crop_pct(cropped: int, resized: int) -> float:
    """Return the crop_pct for which floor(cropped / crop_pct) is `resized`; at most 1."""
    fraction = min(cropped / resized, 1.0)
    exact = math.floor(cropped / fraction) == max(resized, cropped)
    return fraction if exact else math.nextafter(fraction, 0.0)


def _read_size(config: ForeignJson, key: str) -> Size | None:
    """Read a size as (height, width): a number, or an object with both sides or one edge."""
    if not isinstance(config.values.get(key), dict):
        return config.size(key) if key in config else None
    size = config.nested(key)
    edge = next((size.integer(n) for n in ("shortest_edge", "longest_edge") if n in size), None)
    if edge is None and not {"height", "width"} & set(size):
        return None
    return (edge, edge) if edge else (size.integer("height"), size.integer("width"))


def _processor_config(preprocess: Preprocess) -> dict[str, Any]:
    size = dict(zip(("height", "width"), preprocess.size, strict=True))
    resized = {key: math.floor(side / preprocess.crop_pct) for key, side in size.items()}
    center = preprocess.crop_mode == "center"
    cropped = center or resized != size
    resample_codes = {name: number for number, name in _FILTERS.items()}
    return {
        "image_processor_type": "BitImageProcessor" if cropped else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": min(resized.values())} if center else resized,
        "resample": resample_codes[preprocess.interpolation],
        "do_center_crop": cropped,
        **({"crop_size": size} if cropped else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }


def _resized_processor(config: ForeignJson, preprocess: Preprocess) -> dict[str, Any]:
    """Update the sizes in a processor's file to produce this input; keep everything else."""
    processor = config.nested("image_processor") if "image_processor" in config else config
    keys = ("size", "do_center_crop", "crop_size")
    sizes = {k: value for k, value in _processor_config(preprocess).items() if k in keys}
    values = {**processor.values, **sizes}
    return values if processor is config else {**config.values, "image_processor": values}


# ---------------------------------------------------------------------------------------------
# config.json


def _prefix(model: ModelConfig) -> str:
    return f"{_model_type(model)}." if model.num_classes else ""


def _model_type(model: ModelConfig) -> str:
    if not model.layer_scale:
        return "vit"
    return "dinov2_with_registers" if model.num_registers else "dinov2"


def _mlp_ratio(model: ModelConfig) -> int | None:
    """Return the integer ratio that gives this MLP in transformers' DINOv2, or None: a gated one
    has two thirds of that width, rounded up to a multiple of 8."""
    for ratio in range(1, 33):
        size = model.width * ratio
        if (2 * ((size * 2 // 3 + 7) // 8 * 8) if model.swiglu else size) == model.mlp_dim:
            return ratio
    return None


def _model_config(info: CheckpointInfo) -> dict[str, Any]:
    """Build the config.json of a model that transformers can express."""
    model = info.model
    assert isinstance(model, ModelConfig)
    model_type = _model_type(model)
    classes = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
    activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    height, width = model.image_size
    config: dict[str, Any] = {
        "architectures": [
            classes[model_type] + ("ForImageClassification" if model.num_classes else "Model")
        ],
        "model_type": model_type,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.num_heads,
        "hidden_act": activations[model.activation],
        "layer_norm_eps": model.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": model.patch_size[0],
        "num_channels": 3,
        "qkv_bias": model.qkv_bias,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if model_type == "vit":
        pooler = "tanh" if model.pre_logits or model.num_classes else "linear"
        config |= {"intermediate_size": model.mlp_dim, "pooler_act": pooler}
    else:
        config |= {"mlp_ratio": _mlp_ratio(model), "use_swiglu_ffn": model.swiglu}
        config |= {"layerscale_value": 1.0}
        registers = {"num_register_tokens": model.num_registers}
        config |= registers if model.num_registers else {"use_mask_token": False}
    if model.num_classes:
        names = unique_names(info.classes) or [f"LABEL_{i}" for i in range(model.num_classes)]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
        problem_types = {score: name for name, score in _SCORES.items()}
        if (info.score, model.num_classes) != ("softmax", 1):  # which transformers rejects
            config["problem_type"] = problem_types[info.score]
    return config
