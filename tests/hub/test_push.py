"""Pushing with the real client to a Hub on loopback: what goes there, and what never does."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

from hub_faults import Fault
from hub_server import LoopbackHub
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import rewrite_info, save_checkpoint
from vitcli.config import Preprocess, model_config
from vitcli.errors import HubError
from vitcli.hub import push as pushing
from vitcli.hub.push import Package, compare, lineage, pack, push
from vitcli.hub.registry import entries

REPO = "me/flowers"
SECRET = "tell-tale-jo"


@pytest.fixture
def run(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A run's folder as training leaves it, under a name that nobody is to see."""
    folder = tmp_path / SECRET / "run"
    folder.mkdir(parents=True)
    for file in tiny_checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    info, _ = read_info(folder)
    provenance = {
        "made_by": "vit finetune",
        "command": f"vit finetune --data '{tmp_path / SECRET}/my flowers' -o {folder}",
        "data": "flowers",
        "parent": "vit-b16-i21k",
        "metrics": {"val_top1": 0.875, "val_top5": 1.0},
        "history": [{"command": f"vit pretrain --data {folder}", "note": f"kept in {folder}"}],
    }
    info = dataclasses.replace(info, provenance=provenance)
    rewrite_info(folder, info, train={"data": {"path": f"/home/{SECRET}/flowers"}})
    for name in ("state.safetensors", "metrics.jsonl", "split.json", "notes.txt"):
        (folder / name).write_text(SECRET)
    for name in ("confusion.png", "curves.png"):
        (folder / name).write_bytes(b"\x89PNG\0" + name.encode())
    return folder


def packed(spec: Path | str, tmp_path: Path, **options: str) -> Package:
    folder = tmp_path / f"package{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return pack(spec, folder, REPO, **options)


def test_what_goes_there(run: Path, tmp_path: Path, hub: LoopbackHub) -> None:
    done = push(packed(run, tmp_path))
    assert done.created and done.commit and done.url == f"{hub.url}/{REPO}/commit/{done.commit}"
    files = hub.files(REPO)
    images = {"confusion.png", "curves.png"}
    assert set(files) - {".gitattributes"} == {"model.safetensors", "config.json", "README.md"} | (
        images
    )
    for name, content in files.items():
        assert SECRET.encode() not in content, name
        assert str(tmp_path).encode() not in content, name
    assert "train" not in json.loads(files["config.json"])["vit"]
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "model.safetensors").write_bytes(files["model.safetensors"])
    mine, theirs = (load_file(f / "model.safetensors") for f in (run, tmp_path / "back"))
    assert {n: t.tobytes() for n, t in mine.items()} == {n: t.tobytes() for n, t in theirs.items()}
    info, _ = read_info(tmp_path / "back")
    assert info.provenance["command"] == "vit finetune --data 'my flowers' -o run"
    assert info.classes == read_info(run)[0].classes


def test_the_card(run: Path, tmp_path: Path) -> None:
    card = ModelCard((packed(run, tmp_path).folder / "README.md").read_text())
    told = card.data.to_dict()
    base = "timm/vit_base_patch16_224.augreg_in21k"
    assert told["license"] == "apache-2.0" and told["base_model"] == base
    assert told["datasets"] == ["flowers"] and told["metrics"] == ["accuracy"]
    assert [r.metric_value for r in card.data.eval_results or ()] == [0.875, 1.0]
    for line in (
        f"# {REPO}",
        f"vit predict cat.jpg --model {REPO}",
        f'model = timm.create_model("hf-hub:{REPO}", pretrained=True).eval()',
        f'pipeline("image-classification", "{REPO}")("cat.jpg")',
        "vit finetune --data 'my flowers' -o run",
        "- Started from: vit-b16-i21k",
        "![Confusion matrix](confusion.png)",
    ):
        assert f"{line}\n" in card.content, line


def test_what_a_person_wrote_into_the_card_stays(run: Path, tmp_path: Path) -> None:
    card = packed(run, tmp_path).folder / "README.md"
    old = card.read_text().replace('license: "apache-2.0"', "license: mit")
    old = old.replace(f"# {REPO}", "# run").replace(REPO, ".")
    table = "| class | images |\n|---|---|\n| cat | 3 |\n\n![Mine](mine.png)"
    old = old.replace("## How", f"{table}\n\n## How").replace(
        "## Use", f"## Notes\n\nKept in {run}.\n\n```sh\n## no heading\n```\n\n## Use"
    )
    (run / "README.md").write_text(old)
    (run / "mine.png").write_bytes(b"\x89PNG")
    package = packed(run, tmp_path)
    text = package.files["README.md"].read_text()
    assert 'license: "mit"' in text and f"# {REPO}\n" in text and f"hf-hub:{REPO}" in text
    assert (
        table in text and "## Notes\n\nKept in run.\n\n```sh\n## no heading\n```\n\n## Use" in text
    )
    assert "mine.png" in package.files
    (run / "README.md").write_text("# Somebody else's\n")
    assert "Somebody" not in packed(run, tmp_path).files["README.md"].read_text()


def test_only_what_changed_is_uploaded(run: Path, tmp_path: Path, hub: LoopbackHub) -> None:
    first = push(packed(run, tmp_path))
    hub.asked.clear()
    again = push(packed(run, tmp_path))
    assert again.commit is None and again.changes.is_empty
    assert not [asked for asked in hub.asked if not asked.startswith("GET /api/")]
    other = push(packed(run, tmp_path, license="mit"))
    assert set(other.changes.upload) == {"README.md"} and other.commit != first.commit
    assert not [asked for asked in hub.asked if asked.startswith("PUT")]
    assert b'license: "mit"' in hub.files(REPO)["README.md"]


def test_files_of_others_stay_and_those_that_contradict_go(
    run: Path, tmp_path: Path, hub: LoopbackHub
) -> None:
    hub.add(REPO, {"notes.md": b"theirs", "preprocessor_config.json": b"{}"})
    done = push(packed(run, tmp_path))
    assert done.changes.remove == ("preprocessor_config.json",) and not done.created
    files = hub.files(REPO)
    assert files["notes.md"] == b"theirs" and "preprocessor_config.json" not in files


def test_branches_requests_and_private_repos(run: Path, tmp_path: Path, hub: LoopbackHub) -> None:
    package = packed(run, tmp_path)
    first = push(package, private=True, revision="next", message="A first try")
    assert hub.store.read(REPO)["private"] and "model.safetensors" not in hub.files(REPO)
    assert "model.safetensors" in hub.files(REPO, "next")
    assert hub.store.history(REPO, "next")[0][1]["title"] == "A first try"
    assert compare(package, "next").is_empty and compare(package, "newer").upload
    request = push(package, create_pr=True)
    assert request.request and request.request.endswith("/discussions/1") and first.created
    assert "model.safetensors" not in hub.files(REPO)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            Fault("hangup", "PUT /lfs/", at=100, times=99),
            "connection broke|cannot be reached|did not",
        ),
        (Fault("status", "PUT /lfs/", status=500, times=99), "error 500"),
        (Fault("status", "/preupload/", status=503, times=99), "503"),
        (Fault("status", "/commit/", status=500, times=99), "error 500"),
        (Fault("status", "/commit/", status=412), "changed meanwhile"),
        (Fault("status", "/commit/", status=400), "refuses it: ordered by a test"),
        (Fault("status", "/validate-yaml", status=400), "refuses the card's front matter"),
        (Fault("length", "/preupload/", at=20), "not understood"),
        (Fault("status", "/commit/", status=403), "may not write"),
        (Fault("status", "/tree/", status=429, times=99), "429"),
    ],
    ids=lambda value: getattr(value, "kind", None) and f"{value.kind} {value.where}",
)
def test_a_push_that_dies_leaves_the_repo_as_it_was(
    run: Path, tmp_path: Path, hub: LoopbackHub, fault: Fault, said: str
) -> None:
    commit = hub.add(REPO, {"config.json": b"old", "model.safetensors": b"old\0"})
    before = hub.files(REPO)
    hub.faults.append(fault)
    package = packed(run, tmp_path)
    with pytest.raises(HubError, match=said) as caught:
        push(package)
    assert fault.struck and str(caught.value).count("\n") <= 1
    assert hub.files(REPO) == before and hub.store.find(REPO, "main")[0] == commit
    hub.faults.clear()
    push(package)
    assert hub.files(REPO)["config.json"] == package.files["config.json"].read_bytes()


@pytest.mark.parametrize(
    ("where", "status"),
    [("/validate-yaml", 400), ("/validate-yaml", 503), ("PUT /lfs/", 400), ("/commit/", 400)],
)
def test_what_a_push_that_dies_leaves_of_a_new_repo(
    run: Path, tmp_path: Path, hub: LoopbackHub, where: str, status: int
) -> None:
    """Nothing where the card is refused; else an empty repo, which the error tells of. A branch is
    made for contents that are there."""
    package = packed(run, tmp_path)
    hub.faults.append(Fault("status", where, status=status))
    with pytest.raises(HubError) as caught:
        push(package, revision="next")
    made = where != "/validate-yaml"
    assert hub.store.exists(REPO) == made
    notes = [f"{REPO} was made and is empty: push again, or delete it on its page"] * made
    assert getattr(caught.value, "__notes__", []) == notes
    if made:
        assert hub.files(REPO) == {} and set(hub.store.read(REPO)["refs"]) == (
            {"main", "next"} if where == "/commit/" else {"main"}
        )
    done = push(package, revision="next")
    assert done.created != made and set(hub.files(REPO, "next")) == set(package.files)


def test_a_push_that_is_killed_leaves_the_repo_as_it_was(
    run: Path, tmp_path: Path, hub: LoopbackHub
) -> None:
    before = push(packed(run, tmp_path)).commit
    info, file = read_info(run)
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_checkpoint(run, changed, info)
    hub.faults.append(slow := Fault("slow", "PUT /lfs/", seconds=0.2))
    command = [sys.executable, "-m", "vitcli", "push", str(run), REPO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: slow.struck == 1)
        process.kill()
        said, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL and said == b""
    hub.faults.clear()
    assert hub.store.find(REPO, "main")[0] == before
    done = push(packed(run, tmp_path))
    assert "model.safetensors" in done.changes.upload
    (tmp_path / "back.safetensors").write_bytes(hub.files(REPO)["model.safetensors"])
    back = load_file(tmp_path / "back.safetensors")
    assert all((back[name] == changed[name]).all() for name in changed)


def wait_for(happened: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not happened():
        assert time.monotonic() - begin < 60
        time.sleep(0.01)


def test_a_change_between_look_and_commit_is_noticed(
    run: Path, tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, {"config.json": b"old"})
    package, real = packed(run, tmp_path), pushing.compare

    def compare_then_change(*args: object) -> object:
        found = real(*args)
        hub.add(REPO, {"config.json": b"another's"})
        return found

    monkeypatch.setattr(pushing, "compare", compare_then_change)
    with pytest.raises(HubError, match="changed meanwhile"):
        push(package)
    assert hub.files(REPO)["config.json"] == b"another's"


def test_where_a_model_comes_from() -> None:
    def of(parent: str, *history: str) -> tuple[str | None, str | None]:
        runs = [{"parent": name} for name in history]
        provenance = {"parent": parent, "history": runs}
        return lineage(
            CheckpointInfo(model_config("Ti/16"), Preprocess(), (), "softmax", provenance)
        )

    nothing = CheckpointInfo(model_config("Ti/16"), Preprocess())
    deit = entries()["deit3-b16-i1k"]
    assert of("deit3-b16-i1k") == of("my-run", "deit3-b16-i1k") == (deit.repo, deit.license)
    assert of(f"{deit.repo}@main") == (deit.repo, deit.license)
    assert of("default-pretrained") == (None, "apache-2.0")
    assert of("you/model", "deit3-b16-i1k") == ("you/model", None)
    assert of("my-run") == of("runs/a.safetensors") == of("") == (None, None)
    assert lineage(nothing) == (None, None)
    assert lineage(nothing, deit) == (deit.repo, deit.license)
