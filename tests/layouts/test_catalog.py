"""Adding a layout takes one object and one line in the list of layouts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints.golden_cases import GOLDEN, TIMM_VIT
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.tensor_file import Store
from vitcli.config import Architecture, ModelConfig, Preprocess
from vitcli.errors import OutputError
from vitcli.layouts import catalog
from vitcli.layouts.layout import Layout, Match, find_prefix, tensors_under, unsupported_fields
from vitcli.layouts.table import Row, rows

TABLE = rows("""
cls_token                toy/class                   vector
pos_embed                toy/positions               table
patch_embed.proj.*       toy/patches/*               conv
blocks.{i}.norm1.*       toy/{i}/before/*            norm
blocks.{i}.attn.qkv.*    toy/{i}/q/*,toy/{i}/k/*,toy/{i}/v/*  matrix
blocks.{i}.attn.proj.*   toy/{i}/out/*               matrix
blocks.{i}.norm2.*       toy/{i}/between/*           norm
blocks.{i}.mlp.fc1.*     toy/{i}/up/*                matrix
blocks.{i}.mlp.fc2.*     toy/{i}/down/*              matrix
norm.*                   toy/after/*                 norm
head.*                   toy/head/*                  matrix
""")


class Toy(Layout):
    """Plain ViTs with a single classifier head, in an npz file."""

    name = "toy"
    suffixes = (".npz",)

    def find(self, store: Store) -> Match | None:
        prefix = find_prefix(store.tensors, "toy/patches/kernel")
        if prefix is None:
            return None
        tensors = tensors_under(store, prefix)
        fields = {"activation": "gelu", "norm_eps": 1e-6, "num_heads": 3}
        default = Preprocess(crop_pct=0.9)
        return Match(TABLE, tensors, fields=fields, default=default)

    def unsupported(self, model: Architecture) -> list[str]:
        return unsupported_fields(model) if isinstance(model, ModelConfig) else ["a ResNet"]

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        return TABLE


def test_custom_layout_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "LAYOUTS", [*catalog.LAYOUTS, Toy()])
    source = TIMM_VIT
    file = convert(source, tmp_path / "x.npz", "toy")
    assert set(np.load(file)) == {
        n.format(i=i) for row in TABLE for n in row.theirs for i in (0, 1)
    }
    opened = open_checkpoint(file)
    assert opened.layout == "toy" and opened.info.preprocess.crop_pct == 0.9
    images = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(load(file)(images), load(source)(images))
    with pytest.raises(OutputError, match="the toy layout cannot express"):
        convert(GOLDEN / "timm_deit3", tmp_path / "y.npz", "toy")
