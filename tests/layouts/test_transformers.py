"""transformers' config.json and preprocessor_config.json. (tests/peers compares with transformers
itself.)"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from checkpoints.golden_cases import GOLDEN
from vitcli.checkpoints.changes import Changes
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import read_info
from vitcli.config import Preprocess, Size
from vitcli.data.fit import Fit
from vitcli.errors import CheckpointError, VitWarning
from vitcli.layouts import transformers
from vitcli.prediction import Predictor

VIT, CLIP = GOLDEN / "hf_vit", GOLDEN / "hf_clip_vision"
PHOTO = Image.open(Path(__file__).parents[1] / "images" / "cat.jpg").convert("RGB")
CENTER_CROP = {"do_center_crop": True, "size": {"shortest_edge": 40}, "crop_size": 32}


def copy_case(source: Path, folder: Path, processor: Any = None, **changes: Any) -> Path:
    """Copy a golden case with changes to its config, and an image processor's config."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


INVALID = {
    "config.json": {
        "model_type": "resnet",
        "num_attention_heads": 2**70,
        "hidden_act": "swish",
        "layer_norm_eps": -1,
        "image_size": 10**30,
        "id2label": {"0": 3},
        "problem_type": "other",
    },
    "preprocessor_config.json": {
        "image_std": [0, 0, 0],
        "resample": 9,
        "rescale_factor": 0,
        "do_normalize": "no",
        "crop_size": "big",
    },
}


@pytest.mark.parametrize(
    ("file", "key"), [(file, key) for file, values in INVALID.items() for key in values]
)
def test_rejects_invalid_config_values(tmp_path: Path, file: str, key: str) -> None:
    folder = copy_case(VIT, tmp_path / "m", CENTER_CROP)
    config = json.loads((folder / file).read_text()) | {key: INVALID[file][key]}
    (folder / file).write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        read_info(folder)
    assert caught.value.where == str(folder / file)


def read_preprocess(folder: Path, **processor: Any) -> Preprocess:
    return read_info(copy_case(VIT, folder, processor))[0].preprocess


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize(("size", "crop_pct"), [((32, 32), 0.9), ((32, 32), 1.0), ((48, 32), 0.8)])
def test_preprocessing_round_trip(tmp_path: Path, mode: str, size: Size, crop_pct: float) -> None:
    fields: dict[str, Any] = {"size": size, "crop_mode": mode, "crop_pct": crop_pct}
    fields["crop_rounding"] = "down"  # as transformers does
    old = dataclasses.replace(read_preprocess(tmp_path / "a"), **fields)
    folder = copy_case(
        VIT, tmp_path / "b", transformers._processor_config(old), image_size=list(size)
    )
    new = transformers._read_preprocess(folder, transformers.MODEL_TYPES["vit"], size)
    assert new is not None and (new.crop_mode, Fit(new)(PHOTO).size) == (mode, size[::-1])
    np.testing.assert_array_equal(np.asarray(Fit(new)(PHOTO)), np.asarray(Fit(old)(PHOTO)))


def test_warns_about_sizes_that_transformers_rejects(tmp_path: Path) -> None:
    processor = {"size": {"shortest_edge": 30}, "crop_size": 24, "do_center_crop": True}
    with pytest.warns(VitWarning, match="images of 24 x 24 pixels, .*; using 32 x 32"):
        assert read_preprocess(tmp_path / "m", **processor).crop_pct == 0.8
    with pytest.warns(VitWarning, match="images of 40 x 40"):
        assert (
            read_preprocess(tmp_path / "n", size={"height": 40, "width": 40}).crop_mode == "squash"
        )


UNSUPPORTED = [
    {"do_resize": False},
    {"size": {"shortest_edge": 32}},
    {"size": {"shortest_edge": 32, "longest_edge": 64}, "crop_size": 32, "do_center_crop": True},
    {"size": 28, "crop_size": 32, "do_center_crop": True},
    {"image_processor_type": "ConvNextImageProcessor"},
]


@pytest.mark.parametrize("processor", UNSUPPORTED, ids=str)
def test_warns_about_unsupported_preprocessing(tmp_path: Path, processor: dict[str, Any]) -> None:
    with pytest.warns(VitWarning, match="cannot be reproduced exactly; using crop_mode="):
        read_preprocess(tmp_path / "m", **{"size": {"height": 32, "width": 32}, **processor})


def test_errors_name_tensors_as_the_file_does(tmp_path: Path) -> None:
    folder = copy_case(VIT, tmp_path / "m")
    tensors = load_file(VIT / "model.safetensors")
    tensors["layernorm.bias"] = tensors.pop("vit.layernorm.bias")
    tensors["vit.layernorm.weight"] = tensors["vit.layernorm.weight"][:0]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_info(folder)
    for error in (
        "missing: vit.layernorm.bias",
        "unexpected: layernorm.bias",
        "wrong shape: vit.layernorm.weight (0)",
    ):
        assert error in caught.value.what


def test_empty_register_tensor_is_ignored(tmp_path: Path) -> None:
    folder = copy_case(GOLDEN / "hf_dinov2", tmp_path / "m", model_type="dinov2_with_registers")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"dinov2.embeddings.register_tokens": torch.empty(1, 0, 48)}, file)
    assert load(file).config == load(GOLDEN / "hf_dinov2").config


def test_dinov2_runs_at_its_crop_size(tmp_path: Path) -> None:
    processor = {"size": {"shortest_edge": 36}, "crop_size": 28, "do_center_crop": True}
    for name in ("hf_dinov2", "hf_dinov2_registers"):
        folder = copy_case(GOLDEN / name, tmp_path / name, processor)
        info, _ = read_info(folder)
        assert info.provenance["input_size"] == [28, 28] != list(info.model.image_size)
        found = Predictor(folder).info
        assert found.model.image_size == found.preprocess.size == (28, 28)
        assert found.provenance["posemb_resize"]["method"][:7] == "bicubic"
        assert Predictor(folder, resolution=(42, 42)).info.preprocess.size == (42, 42)
        (written := tmp_path / f"{name} again").mkdir()
        convert(folder, written, "transformers", force=True)
        again = json.loads((written / "preprocessor_config.json").read_text())
        assert again["size"] == {"shortest_edge": 36}
        assert again["crop_size"] == {"height": 28, "width": 28}
        larger = convert(folder, tmp_path / f"{name} 16", changes=Changes(patch_size=16))
        assert Predictor(larger).info.model.image_size == (32, 32)


PREFIXES = {"vit_msn": ("vit.encoder.", "encoder."), "deit": ("", "module.model.")}
PREFIXES |= {"vit": ("", "module.model."), "dinov2": ("", "module.model.")}


@pytest.mark.parametrize("kind", PREFIXES)
def test_other_prefixes(tmp_path: Path, kind: str) -> None:
    """Without a prefix in blocks, as transformers 5 saves ViTMSNForImageClassification; with one of
    a training wrapper, as DDP and Lightning save it."""
    case = {"vit_msn": "hf_vit", "deit": "hf_deit_teacher"}.get(kind, f"hf_{kind}")
    folder = copy_case(GOLDEN / case, tmp_path / "m", model_type=kind)
    file = folder / "model.safetensors"
    expected = load(file).state_dict()
    state = {n.replace(*PREFIXES[kind], 1): tensor for n, tensor in load_file(file).items()}
    torch.save({"epoch": 3, "model_state_dict": state}, folder / "last.pth")
    found = load(folder / "last.pth").state_dict()
    assert found.keys() == expected.keys()
    assert all((found[name] == tensor).all() for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("changes", "score"),
    [
        ({"id2label": {"0": "cat"}}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({}, "softmax"),
    ],
)
def test_score_matches_pipeline(tmp_path: Path, changes: dict[str, Any], score: str) -> None:
    folder = copy_case(VIT, tmp_path / "m", **changes)
    if "id2label" in changes:
        tensors = load_file(folder / "model.safetensors")
        tensors |= {f"classifier.{n}": tensors[f"classifier.{n}"][:1] for n in ("weight", "bias")}
        save_file(tensors, folder / "model.safetensors")
    assert read_info(folder)[0].score == score
    convert(folder, tmp_path / "back", "transformers")
    assert read_info(tmp_path / "back")[0].score == score


def test_pooler_activations(tmp_path: Path) -> None:
    tensors = load_file(VIT / "model.safetensors")
    tensors = {n.removeprefix("vit."): t for n, t in tensors.items() if "classifier" not in n}
    pooler = {"pooler.dense.weight": torch.eye(48), "pooler.dense.bias": torch.zeros(48)}
    for act, size in (("tanh", 48), ("linear", 0)):
        folder = copy_case(VIT, tmp_path / act, pooler_act=act)
        save_file(tensors | pooler, folder / "model.safetensors")
        model = read_info(folder)[0].model
        assert getattr(model, "pre_logits", None) == size  # the identity changes nothing
    for act, weight in (("gelu", torch.eye(48)), ("linear", torch.ones(48, 48))):
        folder = copy_case(VIT, tmp_path / f"{act}-refused", pooler_act=act)
        save_file(tensors | pooler | {"pooler.dense.weight": weight}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="pooler_act"):
            read_info(folder)


def test_headless_model_gets_identity_pooler(tmp_path: Path) -> None:
    out = convert(VIT, tmp_path / "out", "transformers", Changes(drop_head=True))
    tensors = load_file(out / "model.safetensors")
    assert np.array_equal(tensors["pooler.dense.weight"], np.eye(48))
    assert json.loads((out / "config.json").read_text())["pooler_act"] == "linear"
    again = convert(out, tmp_path / "again", "transformers")
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(load(out)(images), load(VIT).features(images))


@pytest.mark.parametrize("kind", ["metaclip_2", "altclip", "chinese_clip_vision_model", "clip"])
def test_reads_clip_variants(tmp_path: Path, kind: str) -> None:
    folder = copy_case(CLIP, tmp_path / "m", model_type=kind)
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(load(folder)(images), load(CLIP)(images))
