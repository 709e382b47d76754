"""Options made from the fields of a configuration."""

import dataclasses
import json

import pytest

from cli.training_runs import SHORT, vit
from vitcli.cli import finetune, training
from vitcli.cli.training import build_config, training_command
from vitcli.fields import option
from vitcli.train import directory
from vitcli.train_config import TrainConfig

pytestmark = pytest.mark.usefixtures("undrawn")


@dataclasses.dataclass(frozen=True)
class Extended(TrainConfig):
    """A new option of finetune is one more field."""

    glue: float = option(0.5, "--glue --paste X", "Strength of the glue.", "Crafts", below=1)


def test_a_new_option_is_one_line(images, parent, tmp_path, monkeypatch):
    for module in (training, directory):
        monkeypatch.setattr(module, "TrainConfig", Extended)
    monkeypatch.setattr(finetune, "finetune", training_command("finetune", ""))
    text = vit("finetune", "--help").stdout
    assert "\nCrafts:\n  --glue X  Strength of the glue.  [default: 0.5]\n" in text
    assert "--paste" not in text
    wrong = vit("finetune", "--data", images, "--glue", "2")
    assert wrong.exit_code == 2 and "'--glue'" in wrong.stderr
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--freeze", "backbone")
    done = vit(*words, "--paste", "0.25", "-o", tmp_path / "a", "--quiet")
    assert done.exit_code == 0 and done.stderr == "" and len(done.stdout.splitlines()) == 2
    again = build_config("finetune", {"output": "b"}, config=str(tmp_path / "a"))
    assert again.glue == 0.25
    assert vit("finetune", "--resume", tmp_path / "a", "--glue", "0").exit_code == 2


def test_fields_of_the_architecture_are_added_to_those_of_a_configuration(tmp_path):
    given = {"data": {"path": "x"}, "output": str(tmp_path / "a"), "overrides": {"pool": "gap"}}
    first = build_config("pretrain", given)
    record = {"vit": {"train": dataclasses.asdict(first)}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    more = {"output": "b", "overrides": {"depth": 6}}
    again = build_config("pretrain", more, config=str(tmp_path / "config.json"))
    assert again.overrides == {"pool": "gap", "depth": 6}


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "x.jpg", "-o"),
        ("finetune", "--data", "x", "-o"),
        ("fewshot", "--data", "x", "--save"),
    ],
    ids=lambda words: words[0],
)
def test_a_directory_is_not_called_like_a_file(tmp_path, words):
    done = vit(*words, tmp_path / "out.pt")
    assert done.exit_code == 2 and "expected a directory" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_run_is_named_after_its_data_without_the_signature_of_a_url():
    path = "https://h/b/train-{000..099}.tar?Credential=A/aws4_request&Signature=beef"
    assert build_config("finetune", {"data": {"path": path}}).output == "runs/train"
