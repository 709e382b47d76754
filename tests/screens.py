"""Writes tests/screens.txt (`make screens`): every help screen, common errors, and what is said of
checkpoints.

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
vit predict cat.jpg ''
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
vit info b/16 --resolution 384x192
vit info B/16 --resolution 225
vit info B/16 --epochs 3
vit info B/16 --images 303e6 --epochs 7
vit inspect --view heads
vit inspect cat.jpg --model tiny --head 0
vit inspect cat.jpg --model tiny --layer 2
vit inspect cat.jpg --model tiny --view posemb
vit inspect cat.jpg --model tiny --arrays maps.csv
vit finetune
vit finetune --data pets --lr 0
vit finetune --data pets --lr 0.1,
vit finetune --data pets --lr 0.1,nan
vit finetune --data pets --lr 0.01,1e-2
vit finetune --data=
vit finetune --data pets --freeze some
vit finetune --data pets --freeze -1
vit finetune --data pets --steps 3 --epochs 1
vit finetune --data pets --ema 1
vit finetune --data pets --weight-decay inf
vit finetune --data pets --seed 99999999999999999999
vit finetune --data pets --scale 1,0.5
vit finetune --data pets --betas 0.9
vit finetune --data pets --batch-size 2 --grad-accum 3
vit finetune --data pets --preset vtab --no-retrain
vit finetune --data pets --class-weights balanced --balanced-sampling
vit finetune --accumulate x
vit finetune --crop-area x
vit finetune --erasing x
vit finetune --data pets --preset imagnet
vit finetune --data pets --preprocess crop=center
vit finetune --data pets --preprocess crop_pct=a
vit finetune --data pets --preprocess std=0,1,1
vit finetune --data pets --model tiny --resolution 60
vit finetune --data pets --model tiny --freeze 9
vit finetune --data pets --model tiny --patience 2 --val-fraction 0
vit finetune --data pets --model tiny --lr 0.1,0.2 --val-fraction 0
vit pretrain --data pets --variant XL/16
vit pretrain --data pets --set depht=3
vit pretrain --data pets --set depth=six
vit pretrain --data pets --set stem=1
vit pretrain --data pets --variant Ti/16 --resolution 33
vit pretrain --data pets --model tiny --variant B/16
vit convert tiny x --preprocess mean=1,2
vit resize-posemb tiny
vit bench X/16
vit bench B/16 --resolution 225
vit bench B/16 --plot missing/plot.png
vit bench B/16 --device cuda:9
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
vit models cached
vit models show vit-b16-i21k
vit models show vit-b16-i12k
vit models show deit3-h14-i1k
vit models show r50-vit-b16-i21k-orig
vit models show bit-r50x1-i21k
vit models rm vit-b16-i21k
vit info empty.safetensors
vit info truncated.safetensors
vit info notes.txt
vit info unknown.safetensors
vit info other
vit info tiny/config.json
vit info objects.npz
vit info code.pth
vit info wrong
# Images
vit predict missing.jpg
vit predict empty.jpg truncated.jpg notes.txt cat.jpg -q --precision fp32
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
vit finetune --data pets --model tiny --class-weights missing.csv
vit finetune --data pets --model tiny --class-weights weights.csv
vit fewshot --data pets --model tiny --shots 9
# Output
vit predict cat.jpg -o missing/out.txt
vit predict cat.jpg -o cat.jpg
vit predict cat.jpg -o cat.parquet
vit predict @list.txt -o list.txt
vit predict pets -o pets/cats/0.png
vit predict cat.jpg --features x.npy -o x.npy
vit predict cat.jpg -o notes.txt/x.csv
vit predict cat.jpg --features notes.txt/x.npy -q
vit inspect cat.jpg --model tiny -o notes.txt -q
vit convert tiny unknown.safetensors
vit convert tiny pets
vit convert tiny tiny2 --to tensorflow
vit convert default out.npz --to timm
vit convert default out --to vit-npz
vit convert tiny tiny2 --num-classes 3 --drop-head
vit convert registers registers.npz
vit convert registers x --to transformers
vit resize-posemb default --grid 5
vit finetune --data pets --model tiny -o pets
vit finetune --data pets --model tiny -o notes.txt
vit finetune --data pets --model tiny -o notes.txt/run
vit finetune --resume pets
vit finetune --resume swept
# Checkpoints
vit info default
vit convert tiny named --classes names.txt
vit info named
vit info named --json
vit info bare.safetensors
vit convert jax.npz jax
vit convert jax.npz jax
vit convert dinov2 x --to transformers --dry-run -q
vit convert tiny x --num-classes 3 --patch-size 32 --dtype bfloat16 --dry-run -q
vit resize-posemb bare.safetensors --grid 24
vit resize-posemb bare.safetensors --grid 24
vit resize-posemb bare.safetensors --grid 24 --force -q
vit resize-posemb bare.safetensors --resolution 32x96 --dry-run
vit resize-posemb bare.safetensors --grid 4
vit resize-posemb bare.safetensors --grid 4 --in-place
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
    shutil.copytree(golden / "hf_dinov2", "dinov2")
    shutil.copy(golden / "vit_jax_token" / "checkpoint.npz", "jax.npz")
    shutil.copy("tiny/model.safetensors", "bare.safetensors")
    for name in (
        "pets/cats",
        "pets/dogs",
        "one/cats",
        "flat",
        "nothing",
        "other",
        "wrong",
        "swept",
    ):
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
            assert not Path("runs").exists(), "a command that fails leaves no run behind"
    for path, name in ((place, "DIRECTORY"), (str(HERE.parent), "REPOSITORY")):
        text = text.replace(path, name)
    file.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "screens.txt")
    main(parser.parse_args().file.resolve())
