"""BiT ResNets as their authors and big_vision write them, against timm's golden case and against a
forward pass written down here."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints.golden_cases import PACKED
from layouts.released_names import Arrays, bit, bit_paper
from vitcli.checkpoints.changes import Changes, change
from vitcli.checkpoints.convert import convert, plan_convert
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint, read_info
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import BiTConfig, Preprocess, architecture
from vitcli.errors import CheckpointError, ConfigError

CASE = PACKED["timm_bit_resnetv2"]


@pytest.fixture(scope="module")
def theirs() -> Arrays:
    """The golden case's weights under timm's names."""
    packed = (CASE.folder / "model.safetensors.gz").read_bytes()
    return safetensors.numpy.load(gzip.decompress(packed))


def forward(w: Arrays, images: Tensor) -> Tensor:
    """big_vision's `bit_paper` with one unit a block, from its own names and layouts."""

    def conv(x: Tensor, name: str, stride: int = 1, pad: int = 0) -> Tensor:
        kernel = torch.from_numpy(np.ascontiguousarray(w[f"{name}/kernel"])).double()
        kernel = kernel - kernel.mean((0, 1, 2))
        kernel = kernel / (kernel.square().mean((0, 1, 2)) + 1e-10).sqrt()
        return F.conv2d(x, kernel.permute(3, 2, 0, 1), stride=stride, padding=pad)

    def norm(x: Tensor, name: str) -> Tensor:
        scale, bias = (
            torch.from_numpy(w[f"{name}/{part}"]).flatten() for part in ("scale", "bias")
        )
        return F.relu(F.group_norm(x, 32, scale.double(), bias.double(), 1e-5))

    x = F.max_pool2d(conv(images, "root_block/conv_root", 2, 3), 3, 2, 1)  # -inf around it
    for k in range(4):
        unit, stride = f"block{k + 1}/unit01", 2 if k else 1
        y = norm(x, f"{unit}/gn1")
        shortcut = conv(y, f"{unit}/conv_proj", stride)
        y = norm(conv(y, f"{unit}/conv1"), f"{unit}/gn2")
        y = norm(conv(y, f"{unit}/conv2", stride, 1), f"{unit}/gn3")
        x = shortcut + conv(y, f"{unit}/conv3")
    features = norm(x, "norm-pre-head").mean((2, 3))
    return features @ torch.from_numpy(w["head/kernel"]).double() + torch.from_numpy(w["head/bias"])


@pytest.mark.parametrize("numbered", [False, True])
def test_the_authors_files_compute_what_timm_computes(
    theirs: Arrays, tmp_path: Path, numbered: bool
) -> None:
    np.savez(tmp_path / "x.npz", **bit(theirs, "standardized_conv2d" + "_7" * numbered))
    model = load(tmp_path / "x.npz")
    assert isinstance(model.config, BiTConfig)
    assert model.config.resnet.depths == (1, 1, 1, 1) and model.config.resnet.width_factor == 0.5
    assert model.config.resnet.std_eps == 1e-10 and model.config.resnet.pool_padding == "zeros"
    with torch.inference_mode():
        logits = model(torch.from_numpy(CASE.arrays["input"]))
    difference = np.abs(logits.numpy() - CASE.arrays["logits"]).max()
    assert difference <= CASE.tolerance("logits")
    opened = open_checkpoint(tmp_path / "x.npz")
    assert opened.layout == "bit-npz"
    assert set(sum(opened.sources.values(), ())) == set(np.load(tmp_path / "x.npz").files)


@pytest.mark.parametrize("flat", [False, True])
def test_big_visions_files_compute_what_big_vision_computes(
    theirs: Arrays, tmp_path: Path, flat: bool
) -> None:
    arrays = bit_paper(theirs)
    if flat:
        arrays = {n: a.squeeze() if "gn" in n or "norm" in n else a for n, a in arrays.items()}
    np.savez(tmp_path / "x.npz", **arrays, step=np.array(3), **{"opt/mu/conv": np.zeros(3)})
    opened = open_checkpoint(tmp_path / "x.npz")
    assert opened.layout == "big_vision" and set(opened.dropped) == {"step", "opt/mu/conv"}
    model = load(tmp_path / "x.npz").double()
    assert model.config.resnet.pool_padding == "-inf"
    images = torch.from_numpy(CASE.arrays["input"]).double()
    with torch.inference_mode():
        found = model(images)
    expected = forward(bit_paper(theirs, ""), images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert (found - torch.from_numpy(CASE.arrays["logits"])).abs().max() > 1e-3  # the border


def test_a_name_of_timms_takes_timms_epsilons() -> None:
    """The authors add 1e-10 to the variance, timm 1e-8; a paper's name says nothing of either."""
    timms = architecture("R50x1", num_classes=0)
    assert isinstance(timms, BiTConfig)
    authors = dataclasses.replace(timms.resnet, std_eps=1e-10, pool_padding="-inf")
    info = CheckpointInfo(dataclasses.replace(timms, resnet=authors), Preprocess())
    tensors = {n: LazyTensor("float32", s, np.empty) for n, s in timms.tensor_shapes().items()}
    found, _ = change(info, tensors, Changes(arch="resnetv2_50x1_bit"))
    assert found.model == timms
    assert change(info, tensors, Changes(arch="R50x1"))[0].model == info.model
    with pytest.raises(ConfigError, match="depths"):
        change(info, tensors, Changes(arch="R101x1"))


def test_what_is_changed_on_the_way(theirs: Arrays, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **bit(theirs))
    changes = Changes(num_classes=3, dtype="float16", preprocess={"size": [96, 128]})
    model = load(convert(tmp_path / "x.npz", tmp_path / "y", changes=changes))
    assert model.config.image_size == (96, 128) == model.preprocess.size
    assert model.config.num_classes == 3 and not model.head.fc.weight.any()
    headless = convert(tmp_path / "x.npz", tmp_path / "z.npz", changes=Changes(drop_head=True))
    assert not [name for name in np.load(headless).files if "head" in name]
    assert read_info(headless)[0].model.num_classes == 0
    for wrong in (Changes(num_heads=2), Changes(patch_size=8)):
        with pytest.raises(ConfigError):
            plan_convert(tmp_path / "x.npz", tmp_path / "w", changes=wrong)


def test_big_visions_other_resnet_is_refused_by_name(theirs: Arrays, tmp_path: Path) -> None:
    """models/bit.py: post-activation, which is no BiT ResNet of ours."""
    arrays = {
        "conv_root/kernel": np.zeros((7, 7, 3, 32), np.float32),
        "gn_root/scale": np.ones(32, np.float32),
        "head/kernel": np.zeros((8, 2), np.float32),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(CheckpointError, match="post-activation ResNet"):
        read_info(tmp_path / "x.npz")
