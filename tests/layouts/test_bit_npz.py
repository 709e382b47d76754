"""BiT ResNets as their authors and big_vision write them. (Their tensors: tests/test_roundtrips.py;
what they compute: tests/models/test_resnet.py and tests/golden.)"""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from checkpoints.golden_cases import GOLDEN
from layouts.released_names import Arrays, bit, bit_paper
from vitcli.checkpoints.changes import Changes, change
from vitcli.checkpoints.convert import convert, plan_convert
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint, read_info
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import BiTConfig, Preprocess, architecture
from vitcli.errors import CheckpointError, ConfigError
from vitcli.resnets import bit_resnet


@pytest.fixture(scope="module")
def theirs() -> Arrays:
    """The golden case's weights under timm's names."""
    packed = (GOLDEN / "timm_bit_resnetv2" / "model.safetensors.gz").read_bytes()
    return safetensors.numpy.load(gzip.decompress(packed))


@pytest.mark.parametrize("numbered", [False, True])
def test_the_authors_files(theirs: Arrays, tmp_path: Path, numbered: bool) -> None:
    np.savez(tmp_path / "x.npz", **bit(theirs, "standardized_conv2d" + "_7" * numbered))
    opened = open_checkpoint(tmp_path / "x.npz")
    assert opened.layout == "bit-npz"
    assert set(sum(opened.sources.values(), ())) == set(np.load(tmp_path / "x.npz").files)
    expected = dataclasses.replace(bit_resnet((1, 1, 1, 1), 0.5), std_eps=1e-10)
    assert isinstance(opened.info.model, BiTConfig) and opened.info.model.resnet == expected


@pytest.mark.parametrize("flat", [False, True])
def test_big_visions_files(theirs: Arrays, tmp_path: Path, flat: bool) -> None:
    arrays = bit_paper(theirs)
    if flat:
        arrays = {n: a.squeeze() if "gn" in n or "norm" in n else a for n, a in arrays.items()}
    np.savez(tmp_path / "x.npz", **arrays, step=np.array(3), **{"opt/mu/conv": np.zeros(3)})
    opened = open_checkpoint(tmp_path / "x.npz")
    assert opened.layout == "big_vision" and set(opened.dropped) == {"step", "opt/mu/conv"}
    authors = {"std_eps": 1e-10, "pool_padding": "-inf"}
    expected = dataclasses.replace(bit_resnet((1, 1, 1, 1), 0.5), **authors)
    assert isinstance(opened.info.model, BiTConfig) and opened.info.model.resnet == expected


def test_a_name_of_timms_takes_timms_epsilons() -> None:
    """The authors add 1e-10 to the variance, timm 1e-8; a paper's name says nothing of either."""
    timms = architecture("R50x1", num_classes=0)
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
