"""Hub models on the command line: by name, in every layout, and pickles that are rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from typer.testing import Result

import vitcli
from checkpoints.golden_cases import GOLDEN
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import Preprocess, model_config
from vitcli.hub import registry
from vitcli.layouts.timm import to_config

CAT = Path(__file__).parents[1] / "images" / "cat.jpg"
I21K = "timm/vit_base_patch16_224.augreg_in21k"
Vit = Callable[..., Result]


def predict_json(vit: Vit, model: object, *args: str) -> dict[str, Any]:
    """Output of `vit predict --json` for the cat, without the last digits of the scores, which
    depend on where in memory the weights are."""
    result = vit("predict", CAT, "--model", model, "--json", *args)
    assert result.exit_code == 0, result.stderr
    output: dict[str, Any] = json.loads(result.stdout)
    for prediction in output["predictions"]:
        prediction["score"] = round(prediction["score"], 5)
    return {**output, "model": None}


def small_timm_release() -> dict[str, bytes]:
    """A released timm model, but small and with random weights."""
    sizes = {"width": 24, "depth": 1, "num_heads": 1, "mlp_dim": 96}
    model = model_config("B/16", num_classes=21843, image_size=(224, 224), **sizes)
    config = to_config(CheckpointInfo(model, Preprocess((224, 224), crop_pct=0.9)))
    del config["vit"]
    config["pretrained_cfg"]["tag"] = "augreg_in21k"
    rng = np.random.default_rng(0)
    shapes = model.tensor_shapes().items()
    weights = {n: rng.standard_normal(s, np.float32) / 50 for n, s in shapes}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(weights)}


@pytest.mark.parametrize("layout", ["timm", "transformers", "npz"])
def test_imagenet_21k_model(hub, vit, tmp_path, layout):
    """21,843 classes, sigmoid scores, readable names; loaded by registry name, and by repo in
    the other layouts."""
    files, model, repo = small_timm_release(), "vit-b16-i21k", I21K
    if layout == "timm":
        hub.add(I21K, files)
    else:
        model = repo = "me/model"
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        npz = layout == "npz"
        converted = tmp_path / ("i21k.npz" if npz else "hf")
        vitcli.convert(tmp_path, converted, None if npz else "transformers")
        hub.add(model, {file.name: file for file in ([converted] if npz else converted.iterdir())})
    output = predict_json(vit, model, "--top-k", "3")
    names = {label.id: label.name for label in registry.labels("imagenet-21k")}
    assert len(output["predictions"]) == 3
    for prediction in output["predictions"]:
        assert prediction["label"].startswith(names[prediction["id"]])
        assert 0 < prediction["score"] < 1
    assert sum(p["score"] for p in output["predictions"]) > 1e-3 * 3  # softmax gives 5e-5

    hub.requests.clear()
    assert predict_json(vit, model, "--top-k", "3") == output
    assert hub.requests == [f"GET /api/models/{repo}/revision/main?blobs=true"]
    hub.requests.clear()
    assert predict_json(vit, repo, "--top-k", "3", "--offline") == output
    assert hub.requests == []


def test_pickles_need_allow_pickle(hub, vit, tmp_path):
    import torch
    from safetensors.torch import load_file

    case = GOLDEN / "timm_vit_default"
    torch.save(load_file(case / "model.safetensors"), tmp_path / "pytorch_model.bin")
    files = {"config.json": case / "config.json"}
    hub.add("me/model", {**files, "pytorch_model.bin": tmp_path / "pytorch_model.bin"})
    assert vit("predict", CAT, "--model", "me/model").exit_code == 1
    model = vitcli.load("me/model", allow_pickle=True)
    (result,) = vitcli.predict("me/model", CAT, top_k=1, allow_pickle=True)
    assert model.info == vitcli.load(case).info and result.predictions
    assert vit("push", "me/model", "me/safe", "--quiet").exit_code == 1
    assert predict_json(vit, "me/model", "--allow-pickle") == predict_json(vit, case)
    assert vit("push", "me/model", "me/safe", "--allow-pickle", "--quiet").exit_code == 0
    assert predict_json(vit, "me/safe") == predict_json(vit, case)
