"""`vit` and options for very short runs; their images and initial model are in `conftest.py`."""

from typing import Any

from typer.testing import CliRunner, Result

from vitcli.cli.main import app

FP32 = ("--device", "cpu", "--precision", "fp32")
SIZES = ["depth=1", "width=24", "num_heads=2", "mlp_dim=32"]
TINY = ["--variant", "Ti/8", "--resolution", "16", *FP32]
TINY += [arg for size in SIZES for arg in ("--set", size)]
SHORT = ["--steps", "4", "--batch-size", "8", "--workers", "0"]


def vit(*args: object, **settings: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="vit", **settings)


def finetune(data: object, model: object, output: object, *args: object) -> Result:
    options = ("--data", data, "--model", model, "-o", output, *SHORT, "--device", "cpu")
    return vit("finetune", *options, *args)
