"""Matching the classes of dataset and model by id, name or mapping."""

from typing import Any

import pytest

from vitcli.config import ClassLabel
from vitcli.data.alignment import Alignment, MatchRules, align, read_mapping
from vitcli.errors import DataError
from vitcli.hub import registry

MODEL = (
    ClassLabel("n02123045", "tabby, tabby cat"),
    ClassLabel("n02123159", "tiger cat"),
    ClassLabel("n02012849", "crane"),
    ClassLabel("n03126707", "crane"),
    ClassLabel("dog", "dog"),
    ClassLabel("n03710637", "maillot"),
    ClassLabel("n03710721", "maillot, tank suit"),
    ClassLabel("cafe", "caf\u00e9"),
)


def align_names(*names: str, **rules: Any) -> Alignment:
    data = [ClassLabel(name, name) for name in names]
    present = [i for i, name in enumerate(names) if name != "absent"]
    return align(data, present, MODEL, MatchRules(**rules), (), "pets")


def test_model_classes_are_kept():
    # "Tabby" matches a first name, "maillot" a full name, which wins; the accent of "cafe" is a
    # character of its own; "absent" has no images.
    names = ("dog", "n03126707", "Tabby", "tiger_cat", "maillot", "cafe\u0301", "absent")
    found = align_names(*names)
    assert found.classes == MODEL
    assert found.data_to_class.tolist() == [4, 3, 0, 1, 5, 7, -1]
    assert found.model_to_class.tolist() == found.class_to_model.tolist() == [*range(8)]


def test_data_classes_map_to_one_model_class():
    found = align_names("puppy", "hound", mapping={"puppy": ["dog"], "hound": ["dog"]})
    assert found.data_to_class.tolist() == [4, 4] and found.classes == MODEL


@pytest.mark.parametrize(
    ("names", "rules", "named", "advice"),
    [
        (("zebra", "dog"), {}, "'zebra'", "--mapping FILE"),
        (("0", "1"), {}, "'0' and '1'", "--classes FILE"),  # shards without classes.txt
        (("a", "b"), {"skip_unknown": True}, "'a' and 'b'", "--mapping FILE"),
        (("dog",), {"among": "data"}, "'dog'", "--among model"),
        (("crane", "dog"), {"skip_unknown": True}, "'crane'", "ids"),
        (("dog",), {"mapping": {"dog": ["wolf"]}}, "'wolf'", "correct the file"),
        (
            ("cat", "dog", "rat"),
            {"mapping": {"cat": ["tabby", "tigr"], "dog": ["wolf"]}, "skip_unknown": True},
            "'tigr' and 'wolf'",
            "correct the file",
        ),
        (("cat", "tabby"), {"mapping": {"cat": ["tabby", "tiger cat"]}}, "'tabby, tabby cat'", ""),
    ],
)
def test_unmatched_classes_are_rejected(names, rules, named, advice):
    with pytest.raises(DataError) as caught:
        align_names(*names, **rules)
    assert caught.value.where == ("--mapping" if advice == "correct the file" else "pets")
    assert named in caught.value.what and advice in str(caught.value.hint)
    assert not (rules.get("skip_unknown") and "--skip-unknown" in str(caught.value.hint))


def test_imagenet_21k_model_predicts_among_1k_classes():
    """By synset; the model lacks one of them, the teddy, whose images are skipped."""
    imagenet, imagenet_21k = registry.labels("imagenet-1k"), registry.labels("imagenet-21k")
    synsets = [ClassLabel(label.id, label.id) for label in sorted(imagenet)]
    found = align(synsets, range(1000), imagenet_21k, MatchRules(), imagenet, "val")
    assert len(found.classes) == 999
    assert [synsets[i].id for i in range(1000) if found.data_to_class[i] < 0] == ["n04399382"]
    for i, label in enumerate(synsets):
        if found.data_to_class[i] >= 0:
            assert found.classes[found.data_to_class[i]].id == label.id
            assert imagenet_21k[found.class_to_model[found.data_to_class[i]]].id == label.id
    few, dogs = synsets[5:8], [ClassLabel("n02084071", "dog")]
    lacking = {label.id for label in synsets[-20:]}
    other_21k = tuple(label for label in imagenet_21k if label.id not in lacking)
    for data, model, rules, count in (
        (few, imagenet_21k, MatchRules(), 999),
        (few, imagenet_21k, MatchRules(among="model"), 21_843),
        (few, imagenet_21k, MatchRules(among="data"), 3),
        (dogs, imagenet_21k, MatchRules(), 21_843),  # not among the 1k classes
        (few, imagenet, MatchRules(), 1000),  # the model has only the 1k classes
        (few, other_21k, MatchRules(), 21_823),  # or lacks too many of them
    ):
        assert len(align(data, range(len(data)), model, rules, imagenet, "val").classes) == count
    rules, pets = MatchRules(among="imagenet-1k"), [ClassLabel("cat", "cat"), ClassLabel("x", "x")]
    with pytest.raises(DataError, match="no class of ImageNet-1k"):
        align(pets, [1], pets, rules, [ClassLabel("n1", "zebra")], "val")


def test_read_mapping(tmp_path):
    file = tmp_path / "mapping.tsv"
    file.write_text("cat\tn02123045\ncat\ttiger cat \n\nold ze\u0301bra\t-\n", "utf-8")
    assert read_mapping(file) == {"cat": ["n02123045", "tiger cat"], "old z\xe9bra": []}


@pytest.mark.parametrize(
    "text",
    ["cat tabby\n", "cat\ttabby\n\tdog\n", "cat\ttabby\ncat\ttabby\n", "cat\ttabby\ncat\t-\n"]
    + ["\n", "\udcff", None],
)
def test_invalid_mappings(tmp_path, text):
    file = tmp_path / "mapping.tsv"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as caught:
        read_mapping(file)
    assert str(caught.value.where).partition(",")[0] == str(file)
