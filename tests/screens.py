"""Write tests/screens.txt (`make screens`): help screens, common errors, reports on checkpoints.

The file is the only snapshot of wording; tests/test_screens.py checks that it is up to date. Each
command actually runs, in this process, in a directory of small files, most of them invalid. The
commands after the help screens are read from the file: to add one, write a line `$ vit ...` in its
section.
"""

import argparse
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

SCREENS = HERE / "screens.txt"
ERRORS_HEADING = "# Command lines"
"""Heading of the section after the help screens."""


def make_files() -> None:
    """Create small files, most of them invalid, in the working directory."""
    import numpy as np
    from PIL import Image
    from safetensors.numpy import load_file, save_file

    golden = HERE / "golden"
    shutil.copy(HERE / "images" / "cat.jpg", "cat.jpg")
    shutil.copytree(golden / "timm_vit_default", "tiny")
    shutil.copytree(golden / "timm_vit_reg4_dinov2", "registers")
    shutil.copytree(golden / "hf_vitmae_encoder", "headless")
    shutil.copytree(golden / "hf_dinov2", "dinov2")
    shutil.copy(golden / "vit_jax_token" / "checkpoint.npz", "jax.npz")
    shutil.copy("tiny/model.safetensors", "bare.safetensors")
    directories = ("pets/cats", "pets/dogs", "one/cats", "flat")
    for name in (*directories, "nothing", "other", "wrong", "swept"):
        Path(name).mkdir(parents=True)
    for directory in directories:
        for i in range(4):
            Image.fromarray(np.full((20, 20, 3), 60 * i, np.uint8)).save(f"{directory}/{i}.png")
    weights, photograph = Path("tiny/model.safetensors").read_bytes(), Path("cat.jpg").read_bytes()
    contents = {
        "notes.txt": b"Not an image.\n",
        **dict.fromkeys(("empty.jpg", "empty.txt", "empty.safetensors"), b""),
        "truncated.jpg": photograph[:3000],
        "truncated.safetensors": weights[:-1000],
        **dict.fromkeys(("damaged.npz", "damaged.parquet", "one.tar"), b"PK\3\4 damaged"),
        "other/config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}',
        "other/model.safetensors": weights,
        "code.pth": pickle.dumps({"model": os.system}),
        "header.csv": b"a,b\n1,2\n",
        "short.csv": b"path,label\ncat.jpg\n",
        "absent.csv": b"path,label\ncat.jpg,cat\nlost.jpg,dog\n",
        "split.csv": b"path,label,split\ncat.jpg,cat,trian\n",
        "list.txt": b"cat.jpg\n",
        "names.txt": "n1\tcrane\nn2\tcrane\nGrüne Mamba\na\nb\nc\nd\ne\nf\ng\n".encode(),
        "weights.csv": b"lions,3\n",
        "swept/sweep.json": b"{}",
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
    save_file({"layer.weight": np.zeros((2, 2), np.float32)}, "unknown.safetensors")
    np.savez("objects.npz", names=np.array([{"a": 1}], dtype=object))
    tensors = load_file("tiny/model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"][:5]}, "wrong/model.safetensors")
    shutil.copy("tiny/config.json", "wrong")


def screens(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield each command with its output and exit code."""
    from typer.testing import CliRunner

    from conftest import use_hub
    from hub_server import LoopbackHub
    from vitcli.cli.main import COMMANDS, app

    models = Path("tiny/model.safetensors").read_bytes()
    with LoopbackHub() as hub:
        hub.add("me/tiny", {"model.safetensors": models})
        hub.add("me/pickle", {"pytorch_model.bin": b"pickle"})
        hub.add("me/nothing", {"README.md": b"# Nothing"})
        hub.add("me/gated", {"model.safetensors": models}, gated=True)
        use_hub(patch, {"HF_ENDPOINT": hub.url}, Path("home").resolve())
        patch.delenv("HF_TOKEN", raising=False)
        names = ["", *COMMANDS, *(f"models {name}" for name in ("list", "show", "rm"))]
        helps = [f"$ vit {name} --help".replace("  ", " ") for name in names]
        _, section, errors = SCREENS.read_text("utf-8").partition(ERRORS_HEADING)
        for line in ["# Help", *helps, *re.findall(r"^[#$] .*", section + errors, re.MULTILINE)]:
            if line.startswith("#"):
                yield f"{line}\n"
                continue
            args = [word.strip("'") for word in line.split()[2:]]
            result = CliRunner().invoke(app, args, prog_name="vit")
            text = result.output.replace(hub.url, "http://localhost").rstrip()
            yield f"{line}\n{text}\n[exit code {result.exit_code}]\n"


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("COLUMNS", "80")
        patch.setenv("NO_COLOR", "1")
        patch.setattr("time.sleep", lambda seconds: None)
        patch.setattr("vitcli.cli.progress.PLAIN_EVERY", float("inf"))  # also on slow machines
        make_files()
        text = "\n".join(screens(patch))
        assert not Path("runs").exists(), "a command that fails leaves no run behind"
    for path, name in ((directory, "DIRECTORY"), (str(HERE.parent), "REPOSITORY")):
        text = text.replace(path, name)
    file.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=SCREENS)
    main(parser.parse_args().file.resolve())
