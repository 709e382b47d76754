"""`vit push` and back: the same predictions from the Hub, and clear errors."""

import json
from types import SimpleNamespace

import pytest

import vitcli
from checkpoints.golden_cases import GOLDEN
from conftest import use_hub
from loopback import Fault
from vitcli.checkpoints.read import read_info

REPO = "me/colors"


def test_push_round_trip_keeps_predictions(
    vit, hub, pretrained, tmp_path, monkeypatch, images, image_folder
):
    result = vit("push", pretrained, REPO, "--license", "mit")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{hub.url}/{REPO}/commit/")
    assert f"next: vit predict IMAGE --model {REPO}" in result.stderr
    for name, content in hub.files(REPO).items():
        assert str(images.parent).encode() not in content, name
    assert str(images.parent).encode() not in (pretrained / "README.md").read_bytes()

    use_hub(monkeypatch, hub.environment, tmp_path / "another home")
    options = {"device": "cpu", "precision": "fp32"}
    local, remote = (
        [result.predictions for result in vitcli.predict(model, [str(image_folder)], **options)]
        for model in (pretrained, REPO)
    )
    assert local == remote and len(local) == 3 and len(local[0]) == 2


def test_json_and_dry_run(vit, hub, tiny_checkpoint):
    dry = json.loads(vit("push", tiny_checkpoint, REPO, "--dry-run", "--json").stdout)
    assert dry["dry_run"] and REPO not in hub.repos
    output = json.loads(vit("push", tiny_checkpoint, REPO, "--json", "--quiet").stdout)
    fields = {"repo", "revision", "uploaded", "unchanged", "removed", "license", "base_model"}
    assert set(output) == fields | {"commit", "url", "created", "pull_request"}
    assert set(dry) == fields | {"dry_run"} and dry["uploaded"] == output["uploaded"]
    assert set(output["uploaded"]) == {"model.safetensors", "config.json", "README.md"}
    table = vit("push", tiny_checkpoint, REPO, "--dry-run").stdout
    assert table.count("unchanged") == 3
    result = vit("push", tiny_checkpoint, REPO)
    assert "nothing to push" in result.stderr
    assert result.stdout == f"{hub.url}/{REPO}\n"


def test_dry_run_needs_no_hub(vit, hub, tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.faults.append(Fault("status", "/api/", status=500, times=99))
    result = vit("push", tiny_checkpoint, REPO, "--dry-run")
    assert result.exit_code == 0 and result.stdout.count("would be uploaded") == 3
    assert "warning: cannot compare with the repo" in result.stderr


def test_other_layouts_are_converted(vit, hub, tmp_path):
    source = GOLDEN / "vit_jax_token" / "checkpoint.npz"
    result = vit("push", source, REPO)
    assert result.exit_code == 0, result.stderr
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(hub.files(REPO)[name])
    assert read_info(tmp_path)[0].model == read_info(source)[0].model
    assert "warning: the model card has no license" in result.stderr


@pytest.mark.parametrize(
    ("repo", "options", "variables", "message"),
    [
        ("other/x", (), {}, "(403): You don't have the rights to write to other/x."),
        (REPO, (), {"HF_TOKEN": "hf_wrong"}, "the Hub rejected the token (401)"),
        (REPO, (), {"HF_TOKEN": "hf_ключ"}, "the token contains invalid characters"),
        (REPO, (), {"TRANSFORMERS_OFFLINE": "1"}, "hint: unset TRANSFORMERS_OFFLINE"),
        ("me/public", ("--private",), {}, "is public"),
        ("me/new", ("--create-pr", "--dry-run"), {}, "no pull request can be opened"),
        (
            "me/public",
            ("--license", "invalid"),
            {},
            'error 400: "license" must be one of',
        ),
    ],
)
def test_errors(vit, hub, tiny_checkpoint, monkeypatch, repo, options, variables, message):
    hub.add("me/public", {"config.json": b"{}"})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = vit("push", tiny_checkpoint, repo, *options)
    assert result.exit_code == 1 and result.stdout == ""
    errors = result.stderr.partition("error: ")[2]
    assert f"{repo}: " in errors and message in errors and errors.count("\n") <= 3, result.stderr


def test_token_and_commit_message_options(vit, hub, tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    files = {file.name: file for file in tiny_checkpoint.iterdir()}
    hub.add("other/private", files, private=True)
    options = ("--token", "hf_other", "--commit-message", "First flowers")
    assert vit("push", "other/private", "other/flowers", *options).exit_code == 0
    assert hub.repos["other/flowers"].commits[hub.head("other/flowers")].title == "First flowers"


def test_full_temporary_directory(vit, hub, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    result = vit("push", tiny_checkpoint, REPO)
    assert result.exit_code == 1 and "TMPDIR" in result.stderr and REPO not in hub.repos


def test_dry_run_shows_card_diff(vit, hub, tiny_checkpoint):
    assert vit("push", tiny_checkpoint, REPO).exit_code == 0
    edited = hub.files(REPO)["README.md"].replace(b"## Use\n", b"## Use\n\nBy hand.\n")
    hub.add(REPO, {"README.md": edited})
    options = ("--license", "mit", "--dry-run")
    diff = vit("push", tiny_checkpoint, REPO, *options).stdout
    assert "+license: mit" in diff and "By hand" not in diff
    diff = vit("push", tiny_checkpoint, REPO, *options, "--overwrite-card").stdout
    assert "-By hand." in diff and hub.files(REPO)["README.md"] == edited


def test_invalid_checkpoint_or_revision(vit, hub, tmp_path):
    assert vit("push", tmp_path / "none", REPO).exit_code == 1
    (tmp_path / "run" / "state").mkdir(parents=True)
    result = vit("push", tmp_path / "run", REPO)
    assert result.exit_code == 1 and "--resume" in result.stderr and REPO not in hub.repos
    assert vit("push", tmp_path, REPO, "--create-pr", "--revision", "next").exit_code == 2
    assert vit("push", tmp_path, REPO, "--revision", "a b").exit_code == 2
