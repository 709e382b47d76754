"""Representations that features are taken from, and the feature cache."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from checkpoints.golden_cases import GOLDEN, TIMM_VIT, write_shards
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint
from vitcli.config import (
    DataConfig,
    FewshotConfig,
    ModelConfig,
    Preprocess,
    bit_config,
    model_config,
)
from vitcli.data.dataset import open_dataset
from vitcli.errors import ConfigError, ImageError
from vitcli.evaluation.features import FeatureCache, cache_name, cached_features, representation
from vitcli.prediction import Predictor


def represent(info: CheckpointInfo, **choice) -> CheckpointInfo:
    choice = {"transform": "checkpoint"} | choice
    return representation(info, FewshotConfig(DataConfig("x"), **choice))


def predictor(path: Path, precision: str = "fp32", **choice) -> Predictor:
    model = Predictor(path, "cpu", precision)
    return model.with_info(represent(model.info, **choice))


def load_arrays(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / case / "io.npz"))


def features(model: Predictor, images: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model.model.features(torch.from_numpy(images)).numpy()


def layer_norm(x: np.ndarray, weights: dict[str, torch.Tensor], name: str) -> np.ndarray:
    scale, offset = (weights[f"{name}.{kind}"].numpy() for kind in ("weight", "bias"))
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + offset


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("pool", ["token", "gap", "token+gap"])
def test_intermediate_features_match_timm(layer, pool):
    arrays = load_arrays("timm_vit_default")
    weights = load_file(TIMM_VIT / "model.safetensors")
    tokens = layer_norm(arrays[f"block_{layer:02}"], weights, "norm")
    pooled = {"token": [tokens[:, 0]], "gap": [tokens[:, 1:].mean(1)]}
    pooled["token+gap"] = pooled["token"] + pooled["gap"]
    model = predictor(TIMM_VIT, pool=pool, layer=layer)
    found = features(model, arrays["input"])
    np.testing.assert_allclose(found, np.concatenate(pooled[pool], axis=1), atol=2e-5)


def test_fc_norm_is_applied_after_pooling():
    arrays = load_arrays("timm_gap_fcnorm")
    weights = load_file(GOLDEN / "timm_gap_fcnorm" / "model.safetensors")
    expected = layer_norm(arrays["block_00"][:, 1:].mean(1), weights, "fc_norm")
    found = features(predictor(GOLDEN / "timm_gap_fcnorm", layer=0), arrays["input"])
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_pre_logits_need_last_layer_and_default_pool():
    config = model_config("Ti/16", depth=2, pre_logits=24, num_classes=5)
    info = CheckpointInfo(config, Preprocess())
    assert represent(info, layer=1).model.feature_dim == 24
    assert represent(info, layer=0).model.feature_dim == 192
    assert represent(info, pool="token").model.feature_dim == 192


def test_big_vision_transform_keeps_size_and_normalization():
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    original = Preprocess((192, 320), mean, std, "lanczos", 0.9, "border")
    info = CheckpointInfo(model_config("Ti/16", image_size=(192, 320)), original)
    found = represent(info, transform="big_vision").preprocess
    assert found == Preprocess((192, 320), mean, std, "bilinear", 0.875, "squash", False, "down")
    assert represent(info).preprocess == original


@pytest.mark.parametrize(
    ("model", "choice"),
    [
        (ModelConfig(48, 2, 3, 96), {"layer": 2}),
        (ModelConfig(48, 2, 3, 96), {"pool": "map"}),
        (ModelConfig(48, 2, 3, 96, class_token=False, pool="gap"), {"pool": "token"}),
        (bit_config("R50x1"), {"layer": 3}),
        (bit_config("R50x1"), {"pool": "gap"}),
    ],
    ids=str,
)
def test_unsupported_representation_is_rejected(model, choice):
    with pytest.raises(ConfigError):
        represent(CheckpointInfo(model, Preprocess()), **choice)


def test_cache_name_depends_on_weights_and_representation(tiny_checkpoint, tmp_path):
    choices = [{}, {"layer": 0}, {"pool": "gap"}, {"transform": "big_vision"}]
    names = {cache_name(predictor(tiny_checkpoint, **choice)) for choice in choices}
    names.add(cache_name(predictor(tiny_checkpoint, precision="bf16")))
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    assert len(names) == 5 and cache_name(predictor(other)) in names  # whatever its path
    weights = load_file(other / "model.safetensors")
    weights["norm.bias"] += 1
    save_checkpoint(other, weights, Predictor(other).info)
    assert cache_name(predictor(other)) not in names

    sharded = write_shards(tmp_path / "sharded")
    before = cache_name(predictor(sharded))
    shard = sharded / "model-00002-of-00002.safetensors"
    save_file({name: array + 1 for name, array in load_file(shard).items()}, shard)
    assert cache_name(predictor(sharded)) != before


def test_only_new_images_are_embedded(tiny_checkpoint, image_folder, tmp_path, monkeypatch):
    computed, embed = list[list[str]](), Predictor.embed

    def record_names(self, images, *options):
        listed = list(images)
        computed.append([Path(image.name).name for image in listed])
        return embed(self, listed, *options)

    monkeypatch.setattr(Predictor, "embed", record_names)
    monkeypatch.setattr("vitcli.evaluation.features.HASHED_IMAGES", 2)
    root = tmp_path / "data"
    for name in "ab":
        (root / name).mkdir(parents=True)
        shutil.copy(image_folder / f"{name}.png", root / name / "x.png")

    def run(directory: str) -> np.ndarray:
        model, source = predictor(tiny_checkpoint), open_dataset(DataConfig(str(root))).train
        cache = FeatureCache(cache_name(model), tmp_path / directory)
        found, _ = cached_features(model, cache, None, None, False, source)
        cache.close()
        return found

    first = run("cache")
    (root / "a" / "x.png").rename(root / "a" / "y.png")  # the same bytes
    shutil.copy(image_folder / "deep" / "cat.jpg", root / "b" / "z.jpg")
    second = run("cache")
    assert computed == [["x.png", "x.png"], ["z.jpg"]]
    np.testing.assert_array_equal(second[:2], first)
    (tmp_path / "no").write_text("not a directory")
    np.testing.assert_array_equal(run("no"), second)  # with an unwritable cache


def test_flaky_reads_do_not_misalign_features(tiny_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "data" / "a").mkdir(parents=True)
    for level in (0, 100, 200):
        Image.new("L", (8, 8), level).save(tmp_path / "data" / "a" / f"{level}.png")
    model, source = (
        predictor(tiny_checkpoint),
        open_dataset(DataConfig(str(tmp_path / "data"))).train,
    )
    cache, read, failures_left = FeatureCache("x", tmp_path), type(source).read, {}
    names = list(source.names)

    def flaky(self, i):
        image = names.index(self.names[i])
        failures_left[image] -= 1
        if failures_left[image] >= 0:
            raise ImageError("stale file handle", where=None)
        return read(self, i)

    monkeypatch.setattr(type(source), "read", flaky)
    monkeypatch.setattr("vitcli.evaluation.features.HASHED_IMAGES", 2)
    for image, failures in ((0, 1), (2, 2)):  # when hashed; when hashed and when decoded
        failures_left.update({0: 0, 1: 0, 2: 0, image: failures})
        progress: list[int] = []
        found, errors = cached_features(model, cache, None, 1, False, source, progress.append)
        assert progress == [1, 2, 3]
        assert [*errors] == [2] * (failures == 2)
        assert np.isnan(found).any(axis=1).tolist() == [False, False, failures == 2]
    cache.close()
