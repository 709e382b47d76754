"""The package's own door."""

from __future__ import annotations

import importlib
import re

import pytest

import vitcli


def test_the_public_functions_are_where_the_readme_says() -> None:
    assert set(dir(vitcli)) == {"Predictor", "__version__", "convert", "inspect", "load", "predict"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", vitcli.__version__)
    assert vitcli.load is importlib.import_module("vitcli.checkpoints.load").load
    with pytest.raises(AttributeError, match="no attribute 'train_everything'"):
        _ = vitcli.train_everything


def test_predict_is_a_function_even_after_its_module_was_imported() -> None:
    assert vitcli.predict is importlib.import_module("vitcli.prediction").predict
