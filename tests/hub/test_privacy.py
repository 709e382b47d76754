"""What leaves the machine names no folder, no home and no token."""

from __future__ import annotations

import pytest

from vitcli.hub.privacy import without_paths


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("vit finetune --data /home/jo/flowers -o runs/a", "vit finetune --data flowers -o runs/a"),
        ("vit finetune --data '/home/jo smith/my flowers'", "vit finetune --data 'my flowers'"),
        ("vit finetune --data=~/flowers/", "vit finetune --data=flowers"),
        ("vit finetune --data ../jo/flowers", "vit finetune --data flowers"),
        ("vit finetune --data jo/secret/flowers", "vit finetune --data flowers"),
        ("vit evaluate --data /a/jo/x,/b/jo/y", "vit evaluate --data x,y"),
        (r"vit finetune --data 'C:\Users\jo\flowers'", "vit finetune --data flowers"),
        (r"vit finetune --data '\\server\jo\flowers'", "vit finetune --data flowers"),
        ("vit finetune --data file:///home/jo/flowers", "vit finetune --data flowers"),
        ("vit finetune --data /", "vit finetune --data ."),
        ("vit finetune --model timm/vit_base.x -o b", "vit finetune --model timm/vit_base.x -o b"),
        ("vit finetune --model me/x@refs/pr/1", "vit finetune --model me/x@refs/pr/1"),
        ("vit pretrain --variant R50+B/16 --lr 1e-3", "vit pretrain --variant R50+B/16 --lr 1e-3"),
        ("vit predict https://x.org/a/b/c.jpg", "vit predict https://x.org/a/b/c.jpg"),
        ("vit predict https://jo:pw@x.org/c.jpg", "vit predict https://x.org/c.jpg"),
        ("vit finetune --data 'not closed /home/jo/x", "vit finetune --data 'not closed x"),
    ],
)
def test_commands(command: str, shown: str) -> None:
    assert without_paths({"command": command}) == {"command": shown}
    assert without_paths({"history": [{"command": command}]})["history"][0]["command"] == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/jo smith/flowers", "flowers"),
        ("~/flowers", "flowers"),
        ("trained on /mnt/jo/flowers, then pushed", "trained on flowers, then pushed"),
        ("see `/mnt/jo/notes.txt` (or ../jo/x)", "see `notes.txt` (or x)"),
        ("B/16 and R50+B/16, 3 images/s, and/or org/name", None),
        ("https://github.com/jo/x and <b>bold</b>", None),
        ("~10 epochs / 3 hours", None),
        ("token hf_abcdefghijkl in it", "token hf_... in it"),
        ("two\n/home/jo/lines\n", "two\nlines\n"),
    ],
)
def test_texts(text: str, shown: str | None) -> None:
    assert without_paths(text) == (text if shown is None else shown)


def test_other_values_stay() -> None:
    value = {"a": 1, "b": [0.5, None, True], "c": {"from": [14, 14]}, "d": "bilinear"}
    assert without_paths(value) == value
