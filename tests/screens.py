"""Writes tests/screens.txt: every help screen, and common errors (`make screens`).

The file is the one snapshot of wording; tests/test_screens.py checks that it is up to date. Each
command really runs, in this process, in a directory of small files, most of them bad.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

ERRORS = """
# Command lines
vit --version
vit predit cat.jpg
vit train
vit predict
vit predict cat.jpg --topk 3
vit predict cat.jpg --top-k 0
vit predict cat.jpg --threshold high
vit predict cat.jpg --resolution 0
vit predict cat.jpg --preprocess colour=1
vit predict cat.jpg --model=
vit predict cat.jpg --json --csv
vit predict cat.jpg --device gpu
vit predict cat.jpg --device cuda:7 -q
vit evaluate --data pets --split dev
vit evaluate --data pets --plot plot.gif
vit evaluate --data pets --data one --plot a.png
vit evaluate --data pets --data one --reliability a.png
vit evaluate --data pets --resolution 48,64 --predictions a.csv
vit evaluate --data header.csv --predictions header.csv
vit fewshot --data pets --shots 0
vit fewshot --data pets --l2 1,2 --save x
vit fewshot --data pets --pool cls
vit info B/16 --resolution 224x
vit info B/16 --resolution 225
vit info B/16 --epochs 3
vit info B/16 --images 303e6 --epochs 7
vit inspect --view heads
vit inspect cat.jpg --model tiny --head 0
vit finetune
vit finetune --data pets --lr 0
vit finetune --data pets --preset imagnet
vit finetune --data pets --preprocess crop=center
vit finetune --data pets --model tiny --resolution 60
vit finetune --data pets --model tiny --freeze 9
vit pretrain --data pets --variant XL/16
vit pretrain --data pets --set depht=3
vit pretrain --data pets --model tiny --variant B/16
vit convert tiny x --preprocess mean=1,2
vit resize-posemb tiny
# Models
vit predict cat.jpg --model vit-b16-i12k
vit predict cat.jpg --model tiny/model.safetensor
vit predict cat.jpg --model ./runs/flowers
vit predict cat.jpg --model headless
vit evaluate --data pets --model headless
vit evaluate --data pets --model tiny --resolution 64,100
vit convert tiny x --num-heads 5
vit convert tiny x --preprocess size=48
vit convert tiny x --num-classes 3 --classes empty.txt
vit predict cat.jpg --features cat.txt -q
vit models vit b17
vit models show vit-b16-i12k
vit models rm vit-b16-i21k
vit info empty.safetensors
vit info truncated.safetensors
vit info notes.txt
vit info unknown.safetensors
vit info other
vit info objects.npz
vit info code.pth
vit info wrong
# Images
vit predict missing.jpg
vit predict empty.jpg truncated.jpg notes.txt cat.jpg -q
vit predict 'missing/*.jpg' -q
vit predict @missing.txt -q
vit predict https://example.com/cat.jpg --offline -q
# Datasets
vit evaluate --data missing
vit evaluate --data nothing
vit evaluate --data pets
vit evaluate --data pets --mapping absent.csv
vit evaluate --data pets --real-labels --model tiny
vit evaluate --data header.csv
vit evaluate --data short.csv
vit evaluate --data absent.csv
vit evaluate --data split.csv
vit evaluate --data one.tar
vit evaluate --data 'train-{00000..00003}.tar'
vit evaluate --data damaged.parquet
vit finetune --data one --model tiny
vit finetune --data flat --model tiny
vit finetune --data pets --model tiny --class-weights empty.txt
vit fewshot --data pets --model tiny --shots 9
# Output
vit predict cat.jpg -o missing/out.txt
vit predict cat.jpg -o cat.jpg
vit predict cat.jpg -o cat.parquet
vit convert tiny unknown.safetensors
vit convert tiny pets
vit convert tiny tiny2 --to tensorflow
vit convert tiny tiny2 --num-classes 3 --drop-head
vit convert registers registers.npz
vit convert registers x --to transformers
vit resize-posemb default --grid 5
vit finetune --data pets --model tiny -o pets
vit finetune --data pets --model tiny -o notes.txt
vit finetune --resume pets
# The Hub
vit pull vit-b16-i21k --offline
vit pull me/missing
vit pull me/gated
vit pull me/pickle
vit pull me/nothing
vit pull me/tiny@v9
vit push tiny me/tiny
vit push tiny flowers
"""


def make_material() -> None:
    """Small files, most of them bad, in the working directory."""
    import numpy as np
    from PIL import Image
    from safetensors.numpy import load_file, save_file

    golden = HERE / "golden"
    shutil.copy(HERE / "images" / "cat.jpg", "cat.jpg")
    shutil.copytree(golden / "timm_vit_default", "tiny")
    shutil.copytree(golden / "timm_vit_reg4_dinov2", "registers")
    shutil.copytree(golden / "hf_vitmae_encoder", "headless")
    for name in ("pets/cats", "pets/dogs", "one/cats", "flat", "nothing", "other", "wrong"):
        Path(name).mkdir(parents=True)
    for place in ("pets/cats", "pets/dogs", "one/cats", "flat"):
        for i in range(4):
            Image.fromarray(np.full((20, 20, 3), 60 * i, np.uint8)).save(f"{place}/{i}.png")
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
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
    save_file({"layer.weight": np.zeros((2, 2), np.float32)}, "unknown.safetensors")
    np.savez("objects.npz", names=np.array([{"a": 1}], dtype=object))
    tensors = load_file("tiny/model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"][:5]}, "wrong/model.safetensors")
    shutil.copy("tiny/config.json", "wrong")


def screens() -> Iterator[str]:
    """Each command with what it prints and its exit code."""
    from typer.testing import CliRunner

    from hub_server import LoopbackHub
    from vitcli.cli.main import COMMANDS, app

    models = Path("tiny/model.safetensors").read_bytes()
    with LoopbackHub() as hub:
        hub.add("me/tiny", {"model.safetensors": models})
        hub.add("me/pickle", {"pytorch_model.bin": b"pickle"})
        hub.add("me/nothing", {"README.md": b"# Nothing"})
        hub.add("me/gated", {"model.safetensors": models}, gated=True)
        os.environ.update(hub.environment)
        del os.environ["HF_TOKEN"]
        names = ["", *COMMANDS, *(f"models {name}" for name in ("list", "show", "rm"))]
        helps = "\n".join(f"vit {name} --help".replace("  ", " ") for name in names)
        for line in f"# Help\n{helps}{ERRORS}".splitlines():
            if line.startswith("#"):
                yield f"{line}\n"
                continue
            words = [word.strip("'") for word in line.split()[1:]]
            done = CliRunner().invoke(app, words, prog_name="vit")
            text = done.output.replace(hub.url, "http://localhost").rstrip()
            yield f"$ {line}\n{text}\n[exit code {done.exit_code}]\n"


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        environment = {"COLUMNS": "80", "HF_HOME": f"{place}/home", "NO_COLOR": "1"}
        with mock.patch.dict(os.environ, environment), mock.patch("time.sleep"):
            for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"):
                os.environ.pop(name, None)
            os.chdir(place)
            make_material()
            text = "\n".join(screens())
    for path, name in ((place, "DIRECTORY"), (str(HERE.parent), "REPOSITORY")):
        text = text.replace(path, name)
    file.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "screens.txt")
    main(parser.parse_args().file.resolve())
