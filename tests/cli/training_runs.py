"""`vit` and options for very short runs; their images and initial model are in `conftest.py`."""

from typing import Any

from typer.testing import CliRunner, Result

from vitcli.cli.main import app

SIZES = ["depth=1", "width=24", "num_heads=2", "mlp_dim=32"]
TINY = ["--variant", "Ti/8", "--resolution", "16", "--device", "cpu", "--precision", "fp32"]
TINY += [word for size in SIZES for word in ("--set", size)]
SHORT = ["--steps", "4", "--batch-size", "8", "--workers", "0"]


def vit(*words: object, **settings: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], prog_name="vit", **settings)
