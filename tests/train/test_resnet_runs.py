"""Runs of hybrids and BiT ResNets, which share the training loop of ViTs."""

from pathlib import Path

import pytest

import vitcli
from vitcli.architectures.resnet import bit_resnet
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import LoadedBiT, load
from vitcli.checkpoints.save import save_checkpoint
from vitcli.config import BiTConfig, Preprocess
from vitcli.models.resnet import BiT
from vitcli.train.loop import train


@pytest.fixture
def tiny_bit(tmp_path: Path) -> Path:
    """An untrained BiT ResNet with two stages and five unnamed classes."""
    model = BiT(BiTConfig(bit_resnet((1, 1), 0.5), (32, 32), num_classes=5))
    model.init_weights(0)
    info = CheckpointInfo(model.config, Preprocess(size=(32, 32)))
    return save_checkpoint(tmp_path / "tiny_bit", model.state_dict(), info)


def test_hybrid_is_finetuned_at_another_resolution(tiny_run, tmp_path):
    first = tiny_run(variant="R+Ti/8", output=str(tmp_path / "first"), eval_every=None)
    train(first)
    parent = load(first.output)
    assert parent.config.stem is not None and parent.config.grid == (2, 2)
    second = tiny_run(
        task="finetune", model=first.output, resolution=(32, 32), steps=20, eval_every=20,
        optimizer="sgd", lr=0.03, output=str(tmp_path / "second"),
    )  # fmt: skip
    outcome = train(second)
    assert outcome.metrics["val_top1"] == 1.0
    model = load(second.output)
    assert model.config.grid == (4, 4) and model.config.stem == parent.config.stem
    assert model.info.provenance["posemb_resize"]["from"] == [2, 2]
    moved = model.patch_embed.backbone.conv.weight - parent.patch_embed.backbone.conv.weight
    assert 0 < moved.abs().max() < 0.1  # trained further, not from scratch


def test_bit_resnet_is_finetuned_and_predicts(tiny_run, tiny_bit, colors):
    run = tiny_run(
        task="finetune", model=str(tiny_bit), resolution=None, steps=16, eval_every=16,
        optimizer="sgd", lr=0.03,
    )  # fmt: skip
    events = []
    outcome = train(run, on_event=events.append)
    assert outcome.metrics["val_top1"] == 1.0
    plan = next(event for event in events if event.kind == "plan")
    assert plan.resolution == (32, 32) and plan.tokens == 16
    model = load(run.output)
    assert isinstance(model, LoadedBiT)
    assert [label.name for label in model.classes] == ["blue", "green", "red"]
    assert "posemb_resize" not in model.info.provenance
    image = colors / "green" / "00.png"
    (result,) = vitcli.predict(run.output, [str(image)], device="cpu", precision="fp32")
    assert result.predictions[0].label == "green"


def test_bit_resnet_pretraining_continues_at_other_size(tiny_run, tiny_bit):
    run = tiny_run(model=str(tiny_bit), resolution=(24, 40), steps=4, drop_path=0.2, dropout=0.1)
    train(run)
    model = load(run.output)
    assert model.config.image_size == (24, 40) and model.preprocess.size == (24, 40)
