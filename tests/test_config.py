"""Names, sizes and costs of architectures, and validation of configurations."""

import ntpath
from types import SimpleNamespace

import pytest

from vitcli.checkpoints.changes import Changes
from vitcli.config import (
    AugmentConfig,
    BiTConfig,
    DataConfig,
    FewshotConfig,
    ModelConfig,
    Preprocess,
    ResNetConfig,
    _parse_data_path,
    architecture,
    bit_config,
    model_config,
    variant_name,
)
from vitcli.errors import ConfigError
from vitcli.train.config import TrainConfig

EXAFLOPS = {
    ("B/32", 7): 55,
    ("B/16", 7): 224,
    ("L/32", 7): 196,
    ("L/16", 7): 783,
    ("L/16", 14): 1567,
    ("H/14", 14): 4262,
    ("R50+B/32", 7): 106,
    ("R50+B/16", 7): 274,
    ("R50+L/32", 7): 246,
    ("R50+L/16", 14): 1668,
    ("R50x1", 7): 50,
    ("R101x1", 7): 96,
    ("R152x1", 7): 141,
    ("R50x2", 7): 199,
    ("R152x2", 7): 563,
    ("R152x2", 14): 1126,
    ("R200x3", 14): 3306,
}
"""Pre-training cost of ViTs, hybrids and ResNets on 303M images per epoch (paper, appendix, Table
6). Without the table's 859 for 7 epochs of R50+L/16, which is more than half of its value for 14;
ours is half."""


@pytest.mark.parametrize("case, paper", EXAFLOPS.items())
def test_training_cost_matches_paper(case, paper):
    variant, epochs = case
    exaflops = 3 * 2 * architecture(variant).macs() * 303e6 * epochs / 1e18
    # The table is rounded to whole exaFLOPs: for B/32 it has 55, and we get 56.1. For ResNets we
    # get 3 to 4% more, consistently and unexplained.
    low, high = (1.03, 1.041) if "x" in variant else (0.9799, 1.0201)
    assert low <= round(exaflops, 1) / paper < high


UNKNOWN = ["B16", "X/16", "", "B/", "R50+B/16x", "R60+B/16", "R50+B/8", "R50", "R7x1", "Rx1"]


@pytest.mark.parametrize("variant", [*UNKNOWN, "R5(2-2)x1", f"B/{'9' * 5000}"])
def test_unknown_variant_is_rejected(variant):
    for fields in ({}, {"depth": 6}):
        with pytest.raises(ConfigError, match="unknown architecture"):
            architecture(variant, **fields)


VARIANTS = ["Ti/16", "R50+B/16", "R50+L/32", "R26+S/32", "R+Ti/16", "R101+H/32"]
VARIANTS += ["R50x1", "R152x4", "R200x3", "R26x0.5+Ti/16", "R(3-4)+Ti/8", "R(2-2-2)x0.5+S/32"]
VARIANTS += ["Rx0.5+Ti/8", "R50x0.5", "R(2-2)x1"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_name_roundtrip(variant):
    config = architecture(variant)
    assert variant_name(config) == variant
    assert architecture(variant.lower()) == config
    assert isinstance(config, BiTConfig) == ("/" not in variant)
    assert variant_name(model_config("Ti/16", depth=6)) == "Ti/16 with 6 blocks"


def test_resnet_name_with_explicit_depths():
    assert model_config("R(3-4-9)+B/16") == model_config("R50+B/16")
    stem = model_config("R(3-4)x0.5+Ti/8").stem
    assert (stem.depths, stem.width, stem.channels, stem.stride) == ((3, 4), 32, 256, 8)
    with pytest.raises(ConfigError, match="not a multiple of the ResNet stem's stride 8"):
        model_config("R(3-4)+Ti/4")
    for factor in ("0", "0.3", "1025"):
        with pytest.raises(ConfigError, match="is not a multiple of 0.5"):
            architecture(f"R50x{factor}")


def test_hybrid_pads_to_multiple_of_stride():
    assert model_config("R50+B/32").with_image_size((72, 225)).grid == (3, 8)
    assert bit_config("R50x1").with_image_size((225, 100)).grid == (8, 4)
    with pytest.raises(ConfigError, match="not a multiple of the patch size 32"):
        model_config("R+Ti/16").with_image_size((72, 72))  # patches of 8 x 8 cells


def vit_config(**fields):
    return ModelConfig(**({"width": 8, "depth": 1, "num_heads": 2, "mlp_dim": 16} | fields))


def train_config(**fields):
    return TrainConfig(data=DataConfig("x"), output="y", **fields)


def fewshot_config(**fields):
    return FewshotConfig(DataConfig("x"), **fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: vit_config(num_heads=5),
        lambda: vit_config(class_token=False),
        lambda: vit_config(depth=0),
        lambda: vit_config(norm_eps=float("nan")),
        lambda: vit_config(posemb="sincos2d"),
        lambda: vit_config(posemb="sincos2d", posemb_tokens="patches", width=4, num_heads=1),
        lambda: vit_config(swiglu=True, mlp_dim=7),
        lambda: vit_config(distill_token=True, pre_logits=8, num_classes=3),
        lambda: vit_config(distill_token=True, pool="gap", num_classes=3),
        lambda: vit_config(stem=ResNetConfig((1, 1)), patch_size=(12, 8)),
        lambda: vit_config(activation="relu"),
        lambda: vit_config(depth="2"),
        lambda: vit_config(num_classes=True),
        lambda: vit_config(image_size=[32, 32.5]),
        lambda: train_config(overrides={"depth": 2.5}, task="pretrain"),
        lambda: train_config(overrides={"stem": {}}, task="pretrain"),
        lambda: Changes(num_classes="5"),
        lambda: Changes(labels=("cat", "dog")),
        lambda: ResNetConfig((1, 0)),
        lambda: ResNetConfig((1, 1, 1, 1, 1)),
        lambda: ResNetConfig((), preact=True),
        lambda: BiTConfig(ResNetConfig((1,))),
        lambda: architecture("R50x1", width=8),
        lambda: Preprocess(crop_mode="foo"),
        lambda: AugmentConfig(mixup=-1),
        lambda: train_config(lr=float("nan")),
        lambda: train_config(weight_decay=1e308),
        lambda: train_config(decay_by="schedule", optimizer="sgd"),
        lambda: fewshot_config(shots=(5, 5)),
        lambda: fewshot_config(seeds=()),
    ],
)
def test_invalid_config_is_rejected(make):
    with pytest.raises(ConfigError):
        make()


def test_values_from_json_are_converted() -> None:
    assert Preprocess(size=[32, 48], mean=[1, 0, 0]) == Preprocess((32, 48), (1.0, 0.0, 0.0))


def test_a_windows_path_names_a_run(monkeypatch) -> None:
    monkeypatch.setattr("vitcli.config.os", SimpleNamespace(path=ntpath, sep="\\"))
    assert DataConfig(_parse_data_path(r"C:\data\flowers")).name == "flowers"
