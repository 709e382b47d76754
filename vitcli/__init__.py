"""Vision Transformers: pre-train, fine-tune, predict, convert and share.

    model = vitcli.load("runs/flowers")          # a torch module (checkpoints/load.py)
    logits = model(model.transform("cat.jpg")[None])
    for result in vitcli.predict("runs/flowers", ["cat.jpg"]): ...

Names are imported on first use, so that `vit --help` starts fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitcli.checkpoints.convert import convert as convert
    from vitcli.checkpoints.load import load as load
    from vitcli.inspection.inspector import inspect as inspect
    from vitcli.prediction import Predictor as Predictor
    from vitcli.prediction import predict as predict
    from vitcli.program import export as export

__version__ = "0.1.0"

__all__ = ["Predictor", "__version__", "convert", "export", "inspect", "load", "predict"]

_MODULES = {
    "Predictor": "vitcli.prediction",
    "convert": "vitcli.checkpoints.convert",
    "export": "vitcli.program",
    "inspect": "vitcli.inspection.inspector",
    "load": "vitcli.checkpoints.load",
    "predict": "vitcli.prediction",
}


if not TYPE_CHECKING:  # for which any name would exist

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'vitcli' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
