"""Published metadata has no directories or tokens, and is otherwise unchanged."""

from pathlib import Path

import pytest

from vitcli.hub.privacy import redact


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vit finetune --data /home/jo/flowers -o runs/a", "vit finetune --data flowers -o a"),
        ("vit finetune --data '/home/jo smith/my flowers'", "vit finetune --data 'my flowers'"),
        ("vit finetune --data=~/flowers/", "vit finetune --data=flowers"),
        ("vit finetune --data jdoe-private/photos", "vit finetune --data photos"),
        ("vit finetune -o/home/jo/run -q --lr -1", "vit finetune -orun -q --lr -1"),
        (r"vit finetune --data 'C:\Users\jo\flowers'", "vit finetune --data flowers"),
        (r"vit finetune --data '\\server\jo\flowers'", "vit finetune --data flowers"),
        ("vit finetune --data file:///home/jo/flowers", "vit finetune --data flowers"),
        ("vit finetune --data /", "vit finetune --data ."),
        ("vit finetune --model not/fetched", "vit finetune --model fetched"),
        ("vit finetune --model me/x@refs/pr/1", "vit finetune --model me/x@refs/pr/1"),
        ("vit finetune -m timm/vit_base_patch16_224.dino", None),
        ("vit pretrain --variant R50+B/16 --lr 1e-3", None),
        ("vit predict https://jo:pw@x.org/c.jpg", "vit predict https://x.org/c.jpg"),
        (
            "vit finetune --data 'https://x.org/a.tar?sig=k::/home/jo/b.tar::https://x.org/c.tar#k'",
            "vit finetune --data https://x.org/a.tar::b.tar::https://x.org/c.tar",
        ),
        ("vit predict --token hf_abcdefghijkl", "vit predict --token hf_..."),
        ('vit finetune --data "not closed /home/jo/x', """vit finetune --data '"not' closed x"""),
    ],
)
def test_commands(command, expected):
    run = {"command": command, "parent": "me/x@refs/pr/1"}
    assert redact(run)["command"] == (expected or command)
    assert redact({"history": [run]})["history"][0]["command"] == (expected or command)


def test_paths_are_reduced_to_names():
    run = {"data": "jdoe-private/photos", "output": "/a/b", "parent": "~/runs/a", "classes": "x/y"}
    expected = {"data": "photos", "output": "b", "parent": "a", "classes": "y"}
    assert redact(run) == expected
    for key in ("parent", "teacher"):
        assert redact({key: "me/model@main"})[key] == "me/model@main"
    distilled = {"teacher": "me/model", "command": "vit finetune --teacher me/model --data me/x"}
    assert redact(distilled)["command"] == "vit finetune --teacher me/model --data x"
    assert redact(distilled | {"dataset": "me/x"})["command"] == distilled["command"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kept in /srv/jo/run, then pushed", "kept in run, then pushed"),
        (f"see {Path.home()}/secret/notes.txt", "see notes.txt"),
        (f"not {Path.home()}less", None),
        (r"$\alpha/\beta$, a //b, \| and /16 of B/16", None),
        ("~10 epochs / 3 hours", None),
        ("https://github.com/jo/x and <b>bold</b>", None),
        ("token hf_abcdefghijkl in it", "token hf_... in it"),
    ],
)
def test_text(text, expected):
    assert redact({"note": text}, [Path("/srv/jo")])["note"] == (expected or text)


def test_nested_values():
    """Secrets are removed at any depth; other values are unchanged."""
    values = {"a": 1, "b": [0.5, None, True], "c": {"from": [14, 14]}, "d": "bilinear"}
    secrets = {"assumed": {"read": ["hf_abcdefghijkl", {"from": "/srv/jo/run"}]}}
    expected = values | {"assumed": {"read": ["hf_...", {"from": "run"}]}}
    assert redact(values | secrets, [Path("/srv/jo")]) == expected
