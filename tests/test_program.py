"""Exported programs match the original implementations and contain complete metadata."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import vitcli
from checkpoints.golden_cases import GOLDEN, TIMM_VIT, images_and_logits
from vitcli import program
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.data.transforms import EvalTransform
from vitcli.errors import ConfigError, MissingExtraError, OutputError, VitError
from vitcli.prediction import Predictor
from vitcli.program import export

CAT = Path(__file__).parent / "images" / "cat.jpg"
MODELS = ["timm_vit_default", "timm_deit_distilled", "hf_dinov2_registers", "timm_gap_fcnorm"]
MODELS += ["big_vision_gap_sincos", "vit_jax_hybrid_b3", "timm_vit_reg4_gap"]


def golden(name: str) -> tuple[Path, np.ndarray, np.ndarray]:
    """Model, images (B, 3, H, W) and logits of a golden case."""
    file = next((GOLDEN / name).glob("checkpoint*.npz"), GOLDEN / name)
    return file, *images_and_logits(name)


def run(file: Path, images: np.ndarray) -> np.ndarray:
    if file.suffix == ".pt2":
        return torch.export.load(file).module()(torch.from_numpy(images)).numpy()
    session = onnxruntime.InferenceSession(file)
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def description(file: Path) -> dict[str, Any]:
    if file.suffix == ".pt2":
        files = {"vit": ""}
        torch.export.load(file, extra_files=files)
        return json.loads(files["vit"])
    metadata = onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map
    return json.loads(metadata["vit"])


@pytest.mark.parametrize(
    ("suffix", "name"),
    [
        (".pt2", MODELS[0]),
        (".onnx", MODELS[0]),
        *(pytest.param(".pt2", name, marks=pytest.mark.slow) for name in MODELS[1:]),
        *(pytest.param(".onnx", name, marks=pytest.mark.slow) for name in MODELS[1:]),
    ],
)
def test_exported_program_matches_original(suffix: str, name: str, tmp_path: Path) -> None:
    model, images, logits = golden(name)
    height, width = images.shape[2:]  # not stored in a file without position embeddings
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):  # of the program
        found = export(model, tmp_path / f"model{suffix}", resolution=(height, width))
    assert found.difference < 1e-5 and "posemb" not in repr(found)  # short in a notebook
    for rows in (slice(None), slice(1)):  # any batch size
        values = run(found.output, images[rows])
        np.testing.assert_allclose(values, logits[rows], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_uint8_scores_match_predict(tmp_path: Path) -> None:
    found = export("default", tmp_path / "m.pt2", inputs="uint8", outputs="scores", batch_size=1)
    assert found.input.shape == (1, 160, 160, 3) and found.result.shape == (1, 10)
    info = CheckpointInfo.from_dict(description(found.output))
    pixels = EvalTransform(info.preprocess)(CAT).permute(1, 2, 0)[None].numpy()
    scores = run(found.output, pixels)[0]
    (result,) = Predictor("default", "cpu", "fp32").predict(CAT, top_k=10)
    assert [info.classes[i].id for i in np.argsort(-scores)] == [p.id for p in result.predictions]
    expected = [p.score for p in result.predictions]
    np.testing.assert_allclose(np.sort(scores)[::-1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_metadata_matches_checkpoint_without_provenance(suffix: str, tmp_path: Path) -> None:
    found = export(TIMM_VIT, tmp_path / f"m{suffix}", resolution=(48, 96), outputs="features")
    info, metadata = Predictor(TIMM_VIT, resolution=(48, 96)).info, description(found.output)
    assert metadata.pop("provenance") == {}
    expected = json.loads(info.to_metadata()["vit"])
    assert expected.pop("provenance") and metadata == expected
    assert str(Path(vitcli.__file__).parent).encode() not in found.output.read_bytes()
    assert found.input.shape == ("batch", 3, 48, 96) and found.result.shape == ("batch", 48)
    assert run(found.output, np.zeros((2, 3, 48, 96), np.float32)).shape == (2, 48)


@pytest.mark.slow
def test_float16_halves_file_and_keeps_io_dtypes(tmp_path: Path) -> None:
    model, images, logits = golden("timm_vit_default")
    full = export(model, tmp_path / "m.onnx")
    half = export(model, tmp_path / "half.onnx", dtype="float16", opset=18)
    assert half.opset == 18 and half.input == full.input
    assert 1e-6 < half.difference < 2e-2
    weights = 2 * vitcli.load(model).config.num_params()
    sizes = [found.output.stat().st_size for found in (full, half)]
    assert sizes[0] - sizes[1] == pytest.approx(weights, rel=0.1)
    values = run(half.output, images)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, logits, rtol=0, atol=2e-2)


@pytest.mark.slow
def test_int8_quantizes_block_matrices(tmp_path: Path) -> None:
    found = export("default", tmp_path / "m.onnx", dtype="int8", inputs="uint8", batch_size=1)
    assert description(found.output)["classes"][3] == ["cat", "cat"]
    config = vitcli.load("default").config
    matrices = sum(
        int(np.prod(shape))
        for name, shape in config.tensor_shapes().items()
        if name.startswith("blocks") and len(shape) == 2
    )
    rest = config.num_params() - matrices
    assert found.output.stat().st_size == pytest.approx(matrices + 4 * rest, rel=0.1)
    pixels = EvalTransform(vitcli.load("default").preprocess)(CAT).permute(1, 2, 0)[None].numpy()
    (expected,) = Predictor("default", "cpu", "fp32").predict(CAT, top_k=1)
    assert run(found.output, pixels)[0].argmax() == expected.predictions[0].index


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_large_onnx_weights_are_stored_externally(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threshold = "torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD"
    monkeypatch.setattr(threshold, 1000)  # the default is 2 GB
    model, images, logits = golden("timm_vit_default")
    export(model, tmp_path / "m.onnx", dtype=dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    tolerance = 2e-5 if dtype == "float32" else 0.1
    np.testing.assert_allclose(run(tmp_path / "m.onnx", images), logits, rtol=0, atol=tolerance)
    monkeypatch.undo()
    export(model, tmp_path / "m.onnx", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_mismatching_program_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.pt2").write_bytes(b"before")
    monkeypatch.setitem(program.TOLERANCES, "float32", -1.0)
    with pytest.raises(OutputError, match="different logits"):
        export(TIMM_VIT, tmp_path / "m.pt2", force=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


@pytest.mark.parametrize(
    ("output", "options", "error"),
    [
        ("existing.pt2", {}, OutputError),
        ("m.onnx", {"opset": 12}, ConfigError),
        ("m.pt2", {"dtype": "int8"}, ConfigError),
        ("m.pt2", {"inputs": "bytes"}, ConfigError),
        ("m.pt2", {"batch_size": 0}, ConfigError),
    ],
)
def test_unsupported_export_is_rejected(
    output: str, options: dict[str, Any], error: type[VitError], tmp_path: Path
) -> None:
    (tmp_path / "existing.pt2").write_bytes(b"before")
    with pytest.raises(error):
        export(TIMM_VIT, tmp_path / output, **options)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="packages 'onnxscript', 'onnxruntime'"):
        export(TIMM_VIT, tmp_path / "m.onnx")
