"""`vit info`: what is printed, the paper's costs of training, and what is refused."""

from __future__ import annotations

import json


def test_lines_for_people(vit, tiny_checkpoint):
    result = vit("info", tiny_checkpoint)
    assert result.exit_code == 0 and result.stderr == ""
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    file = tiny_checkpoint / "model.safetensors"
    size = file.stat().st_size / 1e6
    assert lines == {
        "model": str(tiny_checkpoint),
        "file": f"{file} ({size:,.1f} MB, float32)",
        "architecture": "width 48, depth 2, patch 16: 2 blocks, width 48, 3 heads, MLP 192",
        "parameters": "94,906",
        "images": "64 x 64 px, patches of 16 x 16: a grid of 4 x 4, 17 tokens",
        "forward": "pass        0.00 GFLOPs per image",
        "preprocessing": "64 x 64, bicubic, centre crop, mean (0.5, 0.5, 0.5), std (0.5, 0.5, 0.5)",
        "classes": "10 (softmax): crane (n02012849); crane (n03126707); cat; dog; ship; jay; "
        "horse; rocket; coffee; Grüne Mamba",
        "data": "none",
    }


def test_an_alias_is_shown_as_the_name_of_the_model(vit):
    shown = json.loads(vit("info", "default", "--json").stdout)
    assert f"/{shown['model']}/" in shown["file"]


def test_json(vit, tiny_checkpoint):
    told = json.loads(vit("info", tiny_checkpoint, "--json").stdout)
    assert set(told) == {
        *("model", "file", "architecture", "config", "parameters", "flops", "grid", "tokens"),
        *("preprocess", "score", "classes", "provenance", "dtypes", "bytes"),
    }
    assert told["parameters"] == 94_906  # as the golden manifest counts timm's model
    assert told["config"]["mlp_dim"] == 192 and told["grid"] == [4, 4]
    assert told["classes"][1] == {"id": "n03126707", "name": "crane"}
    assert told["preprocess"]["interpolation"] == "bicubic"
    assert told["dtypes"] == ["float32"]


# exaFLOPs of the paper's pre-training runs (Table 6; 303 million images an epoch), which it
# gives as whole numbers.


def test_a_configuration_is_no_checkpoint(vit, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    result = vit("info", tmp_path / "config.json")
    assert result.exit_code == 1
    assert f"hint: to load the model's directory, pass {tmp_path}" in result.stderr


def test_another_resolution(vit):
    told = json.loads(vit("info", "b/16", "--resolution", "384x192", "--json").stdout)
    assert told["grid"] == [24, 12] and told["tokens"] == 289


def test_a_file_of_nothing_but_tensors_says_what_was_assumed(vit, tiny_checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    save_file(load_file(tiny_checkpoint / "model.safetensors"), tmp_path / "bare.safetensors")
    result = vit("info", tmp_path / "bare.safetensors")
    assert result.exit_code == 0
    assert "without names" in result.stdout and "\nassumed " in result.stdout
