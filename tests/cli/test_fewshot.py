"""`vit fewshot`: a table, JSON, a picture; features are computed once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitcli.cli.main import app
from vitcli.prediction import Predictor


@pytest.fixture(scope="module")
def colours(tmp_path_factory) -> Path:
    """Two classes of ten pictures that any features tell apart."""
    root = tmp_path_factory.mktemp("fewshot")
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 210)):
        (root / name).mkdir()
        for i in range(10):
            pixels = np.clip(rng.normal(level, 15, (64, 64, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "cache"))


def vit(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_accuracy_by_shots(colours, tiny_checkpoint, tmp_path):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "1,5")
    result = vit(*words, "--json", "--plot", tmp_path / "shots.png", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    one, five = (json.loads(line) for line in result.stdout.splitlines())
    assert (one["shots"], five["shots"]) == (1, 5) and one["seeds"] == [0, 1, 2]
    assert five["mean"] == 1.0 and five["test"] == 4 and five["l2"] == [1024.0] * 3
    assert Image.open(tmp_path / "shots.png").width > 300
    table = vit(*words, "--device", "cpu").stdout.splitlines()
    assert table[0].split() == ["shots", "seed", "0", "seed", "1", "seed", "2", "mean", "std"]
    assert table[2].split()[-2:] == ["100.00%", "0.00%"]


def test_a_second_run_computes_no_features(colours, tiny_checkpoint, monkeypatch):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "1", "--json")
    first = vit(*words, "--device", "cpu")
    assert first.exit_code == 0, first.stderr
    monkeypatch.setattr(Predictor, "embed", lambda *args: pytest.fail("computed again"))
    assert vit(*words, "--device", "cpu").stdout == first.stdout


def test_fewer_pictures_than_shots(colours, tiny_checkpoint):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "9")
    result = vit(*words, "--device", "cpu")
    assert result.exit_code == 1
    assert "'dark' has 8 examples, too few for 9 shots" in result.stderr


def test_wrong_calls(colours, tiny_checkpoint):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint)
    for option, value in (("--shots", "a,b"), ("--l2", "many")):
        result = vit(*words, option, value)
        assert result.exit_code == 2 and value in result.stderr
