"""One list of classes for the data's and the model's: by id, by name, by a mapping."""

from __future__ import annotations

import re
from pathlib import Path

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
)


def labels(*names: str) -> list[ClassLabel]:
    return [ClassLabel(name, name) for name in names]


def aligned(*names: str, **rules) -> Alignment:
    data = labels(*names)
    return align(data, range(len(data)), MODEL, MatchRules(**rules), (), "pets")


def test_a_models_classes_are_kept_as_they_are():
    found = aligned("dog", "n03126707", "Tabby")
    assert found.classes == MODEL
    assert found.of_data.tolist() == [4, 3, 0]
    assert found.of_model.tolist() == found.first.tolist() == [0, 1, 2, 3, 4]


def test_one_class_of_the_data_may_stand_for_several():
    found = aligned("dog", "cat", mapping={"cat": ["n02123045", "tiger cat"]})
    assert [label.name for label in found.classes] == ["cat", "crane", "crane", "dog"]
    assert found.of_data.tolist() == [3, 0]
    assert found.of_model.tolist() == [0, 0, 1, 2, 3]
    assert found.first.tolist() == [0, 2, 3, 4]


def test_two_classes_of_the_data_may_be_one():
    found = aligned("puppy", "hound", mapping={"puppy": ["dog"], "hound": ["dog"]})
    assert found.of_data.tolist() == [4, 4] and found.classes == MODEL


def test_answers_among_the_datas_classes_only():
    found = aligned("dog", "n02012849", among="data")
    assert found.classes == (MODEL[2], MODEL[4])
    assert found.of_data.tolist() == [1, 0]
    assert found.of_model.tolist() == [-1, -1, 0, -1, 1]


def test_classes_without_images_need_not_be_known():
    data = labels("zebra", "dog")
    found = align(data, [1], MODEL, MatchRules(), (), "pets")
    assert found.of_data.tolist() == [-1, 4]


def test_what_is_unknown_is_left_out_where_that_was_said():
    assert aligned("zebra", "dog", skip_unknown=True).of_data.tolist() == [-1, 4]
    assert aligned("zebra", "dog", mapping={"zebra": []}).of_data.tolist() == [-1, 4]


@pytest.mark.parametrize(
    ("names", "rules", "message"),
    [
        (("zebra", "dog"), {}, "'zebra' is not among the 5 classes of the model"),
        (("a", "b"), {}, "none of 'a' and 'b' is among the 5 classes of the model"),
        (("a", "b"), {"skip_unknown": True}, "none of 'a' and 'b' is among the 5 classes"),
        (("dog",), {"among": "data"}, "'dog' is all that could be answered"),
        (("crane",), {}, "'crane' could be more than one class of the model"),
        (("crane", "dog"), {"skip_unknown": True}, "'crane' could be more than one class"),
        (("dog",), {"mapping": {"dog": ["wolf"]}}, "'wolf' is not among the 5 classes"),
        (
            ("cat", "tabby"),
            {"mapping": {"cat": ["tabby", "tiger cat"]}},
            "'cat' and 'tabby' stand for different classes of the model, but for 'tabby, tabby "
            "cat' both",
        ),
    ],
)
def test_what_cannot_be_matched(names, rules, message):
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        aligned(*names, **rules)
    assert caught.value.where == "pets"
    if "among" in message:
        assert "--mapping FILE" in str(caught.value.hint)


# ---------------------------------------------------------------------------------------------
# ImageNet-21k and ImageNet-1k


@pytest.fixture(scope="module")
def imagenet():
    return registry.labels("imagenet-1k")


@pytest.fixture(scope="module")
def imagenet_21k():
    return registry.labels("imagenet-21k")


def test_a_model_of_21k_answers_among_1k(imagenet, imagenet_21k):
    """By synset; the model does not have one of them, the teddy, whose images are left out."""
    folders = [ClassLabel(label.id, label.id) for label in sorted(imagenet)]
    found = align(folders, range(1000), imagenet_21k, MatchRules(), imagenet, "val")
    assert len(found.classes) == 999
    lost = [folders[i].id for i in range(1000) if found.of_data[i] < 0]
    assert lost == ["n04399382"]
    for i, label in enumerate(folders):
        if found.of_data[i] >= 0:
            assert found.classes[found.of_data[i]].id == label.id
            assert imagenet_21k[found.first[found.of_data[i]]].id == label.id


def test_a_few_classes_of_1k_are_enough_and_all_can_be_asked_for(imagenet, imagenet_21k):
    few = [ClassLabel(label.id, label.id) for label in imagenet[5:8]]
    found = align(few, range(3), imagenet_21k, MatchRules(), imagenet, "val")
    assert len(found.classes) == 999 and (found.of_data >= 0).all()
    found = align(few, range(3), imagenet_21k, MatchRules(among="model"), imagenet, "val")
    assert len(found.classes) == 21_843
    found = align(few, range(3), imagenet_21k, MatchRules(among="data"), imagenet, "val")
    assert len(found.classes) == 3
    # Data of other classes, or a model that knows no more than 1k: all of its own.
    dogs = [ClassLabel("n02084071", "dog")]
    assert len(align(dogs, [0], imagenet_21k, MatchRules(), imagenet, "val").classes) == 21_843
    assert len(align(few, range(3), imagenet, MatchRules(), imagenet, "val").classes) == 1000


# ---------------------------------------------------------------------------------------------
# The file of a mapping


def test_a_mapping_is_read(tmp_path: Path):
    file = tmp_path / "mapping.tsv"
    file.write_text("cat\tn02123045\ncat\ttiger cat \n\nold zebra\t-\n", "utf-8")
    assert read_mapping(file) == {"cat": ["n02123045", "tiger cat"], "old zebra": []}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat tabby\n", "line 1 is not two classes"),
        ("cat\ttabby\n\tdog\n", "line 2 is not two classes"),
        ("cat\ttabby\ncat\ttabby\n", "line 2 gives 'cat' once more"),
        ("cat\ttabby\ncat\t-\n", "line 2 gives 'cat' once more"),
        ("\n", "the mapping is empty"),
        ("\udcff", "it is not UTF-8 text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_mapping_that_is_none(tmp_path: Path, text: str | None, message: str):
    file = tmp_path / "mapping.tsv"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_mapping(file)
    assert caught.value.where == str(file)
