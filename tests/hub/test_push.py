"""Pushing with the real client to a loopback Hub: what is uploaded, and what never is."""

import dataclasses
import json
import signal
import tempfile
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

from conftest import VitProcess, wait_for
from hub_server import HubFile, LoopbackHub
from loopback import Fault
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import rewrite_info
from vitcli.config import Preprocess, model_config
from vitcli.errors import HubError
from vitcli.hub.card import lineage
from vitcli.hub.push import Package, PushResult, Target, check_token, compare, pack, push
from vitcli.hub.registry import entries

REPO = "me/flowers"
TARGET = Target(REPO)
SECRET = "tell-tale-jo"


@pytest.fixture
def run(tmp_path, tiny_checkpoint):
    """A run directory as training leaves it, under a name that must not be published."""
    directory = tmp_path / SECRET / "run"
    directory.mkdir(parents=True)
    for file in tiny_checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    info, _ = read_info(directory)
    provenance = {
        "made_by": "vit finetune",
        "command": f"vit finetune --data '{tmp_path / SECRET}/my flowers' -o {directory}",
        "data": "flowers",
        "parent": "vit-b16-i21k",
        "metrics": {"val_top1": 0.875, "val_top5": 1.0},
        "history": [{"command": f"vit pretrain --data {directory}", "data": str(directory)}],
        "note": f"kept in {directory}",
    }
    info = dataclasses.replace(info, provenance=provenance)
    rewrite_info(directory, info, train={"data": {"path": f"/home/{SECRET}/flowers"}})
    for name in ("metrics.jsonl", "split.json", "notes.txt"):
        (directory / name).write_text(SECRET)
    for name in ("confusion.png", "curves.png"):
        (directory / name).write_bytes(b"\x89PNG\0" + name.encode())
    (tmp_path / "key").write_text(SECRET)
    (directory / "reliability.png").symlink_to(tmp_path / "key")
    return directory


@pytest.fixture
def pack_run(run, tmp_path):
    """`pack` the run in a new directory."""
    return lambda **options: pack(run, Path(tempfile.mkdtemp(dir=tmp_path)), REPO, **options)


def push_package(package: Package, revision: str | None = None, **options: object) -> PushResult:
    target = Target(REPO, revision)
    return push(package, compare(package, target), target, **options)


def read_card(hub: LoopbackHub) -> str:
    return hub.files(REPO)["README.md"].decode()


def test_published_files(run, pack_run, tmp_path, hub):
    result = push_package(pack_run())
    assert result.created and result.commit
    assert result.url == f"{hub.url}/{REPO}/commit/{result.commit}"
    files = hub.files(REPO)
    images = {"confusion.png", "curves.png"}
    assert set(files) == {"model.safetensors", "config.json", "README.md"} | images
    for name, content in files.items():
        assert SECRET.encode() not in content, name
        assert str(tmp_path).encode() not in content, name
    assert "train" not in json.loads(files["config.json"])["vit"]
    file = tmp_path / "model.safetensors"
    file.write_bytes(files["model.safetensors"])
    tensors, pushed = (load_file(path) for path in (run / "model.safetensors", file))
    assert {n: t.tobytes() for n, t in tensors.items()} == {
        n: t.tobytes() for n, t in pushed.items()
    }
    info, _ = read_info(file)
    assert info.provenance["command"] == "vit finetune --data 'my flowers' -o run"
    assert info.classes == read_info(run)[0].classes

    card = ModelCard(files["README.md"].decode())
    metadata = card.data.to_dict()
    base = "timm/vit_base_patch16_224.augreg_in21k"
    assert metadata["license"] == "apache-2.0" and metadata["base_model"] == base
    assert "datasets" not in metadata and metadata["metrics"] == ["accuracy"]  # data not on the Hub
    assert [r.metric_value for r in card.data.eval_results or ()] == [0.875, 1.0]
    assert f"vit predict cat.jpg --model {REPO}\n" in card.content


def test_only_changed_files_are_uploaded(pack_run, hub):
    first = push_package(pack_run())
    hub.requests.clear()
    assert push_package(pack_run()).commit is None
    assert not [request for request in hub.requests if not request.startswith("GET ")]
    package = pack_run(license="mit")
    changes = compare(package, TARGET)
    assert set(changes.upload) == {"README.md"}
    assert push(package, changes, TARGET).commit != first.commit
    assert not [request for request in hub.requests if request.startswith("PUT")]
    assert "license: mit\n" in read_card(hub)
    changes = compare(pack_run(), TARGET)
    assert not changes.upload and not changes.edited and changes.license == "mit"
    push_package(pack_run(license="dinov3-license"))
    assert push_package(pack_run()).commit is None
    assert "license: other\nlicense_name: dinov3-license\nlicense_link: " in read_card(hub)
    push_package(pack_run(license="mit"))
    assert "license: mit\n" in read_card(hub) and "license_" not in read_card(hub)


def test_keeps_other_files_but_removes_conflicting_ones(pack_run, hub):
    hub.add(REPO, {"notes.md": b"theirs", "preprocessor_config.json": b"{}"})
    assert not push_package(pack_run()).created
    files = hub.files(REPO)
    assert files["notes.md"] == b"theirs" and "preprocessor_config.json" not in files


def test_branches_pull_requests_and_private_repos(pack_run, hub):
    package = pack_run()
    first = push_package(package, "next", private=True, message="A first try")
    assert hub.repos[REPO].private and "model.safetensors" not in hub.files(REPO)
    assert "model.safetensors" in hub.files(REPO, "next")
    assert hub.repos[REPO].commits[hub.head(REPO, "next")].title == "A first try"
    assert not compare(package, Target(REPO, "next")).upload
    assert compare(package, Target(REPO, "newer")).upload
    request = push_package(package, create_pr=True)
    assert str(request.pull_request).endswith("/discussions/1") and first.created
    assert "model.safetensors" not in hub.files(REPO)
    push_package(package)
    push_package(package, "same")  # same as main: nothing to upload, only a new branch
    assert hub.files(REPO, "same") == hub.files(REPO)


# ---------------------------------------------------------------------------------------------
# Edited cards


NOTES = "## Notes\n\n$\\alpha/\\beta$, a //b and \\| stay.\n\n```sh\n## no heading\n```"
TABLE = "| class | images |\n|---|---|\n| cat | 3 |\n\n![Mine](mine.png)"


def test_edits_to_run_card_are_published(run, pack_run):
    card = pack_run().directory / "README.md"
    old = card.read_text().replace("license: apache-2.0", "license: mit").replace(REPO, "run")
    old = old.replace("## How", f"{TABLE}\n\n## How").replace("## Use", f"{NOTES}\n\n## Use")
    edited = old.replace("- vitcli\n", "")  # tags, too; some editors write a BOM
    (run / "README.md").write_text(edited, encoding="utf-8-sig")
    (run / "mine.png").write_bytes(b"\x89PNG")
    package = pack_run()
    text = package.files["README.md"].read_text()
    assert "license: mit\n" in text and package.license == "mit"
    assert TABLE in text and NOTES in text and "mine.png" in package.files
    unsigned = old.partition("<!-- vit:")[0]  # all of it may have been edited
    (run / "README.md").write_text(unsigned)
    assert pack_run().files["README.md"].read_text().startswith(unsigned.rstrip())
    (run / "README.md").write_text("# Somebody else's\n")
    assert "Somebody" not in pack_run().files["README.md"].read_text()


def test_edits_on_the_hub_are_kept(run, pack_run, hub):
    """Every line of an edited card survives; unedited parts are brought up to date, and a deleted
    section stays deleted."""
    push_package(pack_run())
    license = "license: cc-by-4.0  # ours\ndoi: 10.1/x"
    edited = read_card(hub).replace("license: apache-2.0", license)
    edited = edited.replace("## Use\n", f"{NOTES}\n\n## Use\n\nMind the *lighting*.\n")
    start = edited.index("## How it was made")
    edited = edited[:start] + edited[edited.index("## Notes") :] + "\n## Thanks\n\nTo\u2028all.\n"
    hub.add(REPO, {"README.md": edited.encode()})
    info, _ = read_info(run)
    provenance = info.provenance | {"metrics": {"val_top1": 0.99}}
    rewrite_info(run, dataclasses.replace(info, provenance=provenance))
    changes = compare(package := pack_run(), TARGET)
    assert changes.edited == ()
    assert "+| top-1, validation split | 99.0% |" in changes.card_diff
    push(package, changes, TARGET)
    text = read_card(hub)
    updated = ("<!--", "| top-", "value: ", "name: top-", "type: accuracy", "- type: accuracy")
    lines = [line for line in edited.splitlines() if not line.strip().startswith(updated)]
    assert not set(lines) - set(text.splitlines())
    assert "99.0%" in text and "\n## How it was made" not in text
    assert push_package(pack_run()).commit is None  # nothing more to merge

    foreign = "---\nlicense: mit\n---\n# Flowers\n\nBy hand.\n"
    hub.add(REPO, {"README.md": foreign.encode()})
    changes = compare(package := pack_run(), TARGET)
    assert set(changes.edited) == {"license:", ""}
    push(package, changes, TARGET)
    assert all(line in read_card(hub) for line in foreign.splitlines())
    assert "## Metrics" in read_card(hub) and "model-index" in read_card(hub)
    package = pack_run()
    push(package, compare(package, TARGET, overwrite_card=True), TARGET)
    assert "By hand." not in read_card(hub) and "license: apache-2.0" in read_card(hub)


# ---------------------------------------------------------------------------------------------
# Failed pushes


@pytest.mark.parametrize(
    ("where", "body"), [("/whoami-v2", b"[]"), ("README.md", b"<html>Log in</html>")]
)
def test_foreign_responses_are_recognized(pack_run, hub, where, body):
    hub.add(REPO, {"README.md": b"# Flowers\n"})
    hub.faults.append(Fault("body", where, body=body))
    with pytest.raises(HubError, match="request failed"):
        check_token(TARGET)
        push_package(pack_run())
    assert read_card(hub) == "# Flowers\n"


@pytest.mark.parametrize("where", ["/whoami-v2", "GET /api/models/", "README.md", "/commit/"])
def test_transient_failures_are_retried(pack_run, hub, where):
    hub.add(REPO, {"README.md": b"# Mine\n"})
    hub.faults.append(fault := Fault("status", where, status=503))
    check_token(TARGET)
    push_package(pack_run())
    assert fault.hits and "model.safetensors" in hub.files(REPO)


def test_commit_with_lost_response(pack_run, hub):
    hub.add(REPO, {"config.json": b"old"})
    hub.faults.append(Fault("status", "/commit/", status=504, handled=True, times=99))
    result = push_package(pack_run())
    assert result.commit == hub.head(REPO) and "model.safetensors" in hub.files(REPO)
    with pytest.raises(HubError):
        push_package(pack_run(license="mit"), create_pr=True)
    assert len(hub.repos[REPO].refs) == 2  # main and one pull request


def test_repo_creation_with_lost_response(pack_run, hub):
    hub.faults.append(fault := Fault("reset", "/repos/create"))
    assert push_package(pack_run(), private=True).created and fault.hits
    assert hub.repos[REPO].private and "model.safetensors" in hub.files(REPO)


@pytest.mark.parametrize(
    ("exists", "fault", "options"),
    [
        (True, Fault("hangup", "PUT /lfs/", at=100), {}),
        (True, Fault("length", "/preupload/", at=20), {}),
        (True, Fault("status", "/commit/", status=412), {}),
        (True, Fault("status", "/commit", status=500), {"revision": "next"}),
        (True, Fault("status", "/commit", status=500), {"create_pr": True}),
        (False, Fault("status", "/validate-yaml", status=400), {}),
        (False, Fault("status", "PUT /lfs/", status=400), {"revision": "next"}),
    ],
)
def test_failed_push_can_be_repeated(pack_run, hub, exists, fault, options):
    old = hub.add(REPO, {"config.json": b"old", "model.safetensors": b"old\0"}) if exists else None
    package = pack_run()
    hub.faults.append(dataclasses.replace(fault, times=99))
    with pytest.raises(HubError) as caught:
        push_package(package, **options)
    assert hub.faults[0].hits and str(caught.value).count("\n") <= 1
    (note,) = caught.value.__notes__
    assert note.endswith("push again: unchanged files are skipped")
    assert ("/discussions" in note) == ("create_pr" in options)
    if exists:
        assert hub.head(REPO) == old
    else:
        assert hub.files(REPO) == {}
    hub.faults.clear()
    revision = options.get("revision", "main")
    push_package(package, revision)
    assert hub.files(REPO, revision).keys() >= package.files.keys()
    config = package.files["config.json"].read_bytes()
    assert hub.files(REPO, revision)["config.json"] == config


@pytest.mark.parametrize(
    ("fault", "is_committed"),
    [(Fault("stall", "/commit/"), True), (Fault("slow", "PUT /lfs/"), False)],
)
def test_interrupted_push_can_be_repeated(run, hub, fault, is_committed):
    before = hub.add(REPO, {"config.json": b"old"})
    hub.faults.append(fault)
    with VitProcess("push", run, REPO) as process:
        wait_for(lambda: fault.hits, process)
        process.send_signal(signal.SIGINT)
        hub.closing.set()  # the server continues
        _, error = process.communicate(timeout=600)
    assert process.returncode != 0
    assert (hub.head(REPO) != before) == is_committed
    assert "push again: unchanged files are skipped" in error


@pytest.mark.parametrize("title", ["upload", "Push flowers"])  # another's title, or ours
def test_change_between_compare_and_commit_is_detected(pack_run, hub, title):
    hub.add(REPO, {"config.json": b"old"})
    package = pack_run()
    changes = compare(package, TARGET)
    hub.commit(hub.repos[REPO], {"config.json": HubFile(b"another's")}, title)
    with pytest.raises(HubError, match="changed in the meantime"):
        push(package, changes, TARGET)
    assert hub.files(REPO)["config.json"] == b"another's"


def test_lineage():
    def lineage_of(parent: str, *history: str) -> tuple[str | None, str | None]:
        provenance = {"parent": parent, "history": [{"parent": name} for name in history]}
        return lineage(dataclasses.replace(unknown, provenance=provenance))

    unknown = CheckpointInfo(model_config("Ti/16"), Preprocess())
    deit = entries()["deit3-b16-i1k"]
    expected = (deit.repo, deit.license)
    assert lineage_of("deit3-b16-i1k") == lineage_of("my-run", "deit3-b16-i1k") == expected
    assert lineage_of(f"{deit.repo}@main") == lineage(unknown, deit) == expected
    assert lineage_of("default-pretrained") == (None, "apache-2.0")
    assert lineage_of("you/model", "deit3-b16-i1k") == ("you/model", None)
    for parent in ("my-run", "runs/a.safetensors", ""):
        assert lineage_of(parent) == lineage(unknown) == (None, None)
