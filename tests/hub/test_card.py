"""The model card, read back with the Hub's own client."""

import dataclasses

import numpy as np
import torch
from huggingface_hub import ModelCard

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import ClassLabel, Preprocess, model_config
from vitcli.hub.card import model_card
from vitcli.hub.readme import mark_resized
from vitcli.metrics import Evaluation, MetricAccumulator


def evaluation_from(confusion: np.ndarray) -> Evaluation:
    """An evaluation with this confusion matrix."""
    metrics, k = MetricAccumulator(len(confusion)), len(confusion)
    labels, predictions = np.indices((k, k)).reshape(2, -1).repeat(confusion.ravel(), axis=1)
    metrics.add(torch.eye(k)[predictions], labels)
    return metrics.result()


CLASSES = (ClassLabel("n1", "crane"), ClassLabel("n2", "crane"), ClassLabel("n3", "cat | dog"))
INFO = CheckpointInfo(
    model_config("Ti/16", image_size=(128, 128), num_classes=3),
    Preprocess(size=(128, 128), crop_mode="squash"),
    CLASSES,
    provenance={
        "made_by": "vit finetune (vitcli 0.1.0, torch 2.13.0)",
        "command": "vit finetune --data flowers --lr 0.003",
        "data": 'my "flowers": 5 kinds',
        "dataset": "me/flowers",
        "train_images": 3500,
        "parent": "timm/vit_base",
        "posemb_resize": {"method": "bilinear", "from": [14, 14]},
        "seed": 3,
        "steps": 500,
        "seconds": 3725,
        "metrics": {"val_top1": 0.9375, "val_ece": 0.03, "test_top1": 0.9, "val_loss": 0.3},
    },
)
EVALUATION = evaluation_from(np.array([[8, 2, 0], [1, 8, 1], [0, 0, 10]]))


def test_front_matter():
    card = ModelCard(model_card(INFO, EVALUATION, name="me/flowers", license="apache-2.0"))
    data = card.data.to_dict()
    assert data["library_name"] == "timm" and data["pipeline_tag"] == "image-classification"
    assert data["license"] == "apache-2.0" and data["base_model"] == "timm/vit_base"
    assert {"vit", "timm"} <= set(data["tags"])
    results = card.data.eval_results
    assert [(r.metric_name, r.metric_value) for r in results] == [
        ("top-1, validation split", 0.9375),
        ("ECE, validation split", 0.03),
        ("top-1, test split", 0.9),
    ]
    assert results[0].dataset_name == 'my "flowers": 5 kinds'
    assert results[0].task_type == "image-classification"
    assert [results[0].dataset_type] == data["datasets"] == ["me/flowers"]


def test_text_has_provenance_and_metrics():
    text = model_card(INFO, EVALUATION, name="me/flowers", images={"Confusion": "confusion.png"})
    for line in (
        "| top-1, validation split | 93.8% |",
        "| ECE, validation split | 3.0% |",
        "| crane (n1) | 10 | 80.0% | 88.9% | 84.2% | crane (n2) |",
        "| crane (n2) | 10 | 80.0% | 80.0% | 80.0% | crane (n1) |",
        "| cat \\| dog | 10 | 100.0% | 90.9% | 95.2% | - |",
        "![Confusion](confusion.png)",
        "vit finetune --data flowers --lr 0.003",
        "- Position embeddings resized: from 14 x 14 (bilinear)",
        "- Time: 1:02:05",
        "vit predict cat.jpg --model me/flowers",
        'model = timm.create_model("hf-hub:me/flowers", pretrained=True).eval()',
        'pipeline("image-classification", "me/flowers")("cat.jpg")',
    ):
        assert f"{line}\n" in text, line
    assert "5.5 million parameters" in text and "128 x 128 pixels, with 3 classes" in text
    assert "mean 0.5" in text and "squash" in text


def test_markdown_of_others_is_escaped():
    foreign = "cat |\n\n## Use\r\n<!-- ![x](https://x.org/y)\\`\x1b\n```\n"
    escaped = "cat \\| ## Use \\<!-- !\\[x](https://x.org/y)\\\\\\` \\`\\`\\`"
    classes = (*CLASSES[:2], ClassLabel("n3", foreign))
    provenance = INFO.provenance | {"note": foreign, "history": [{"command": foreign}]}
    info = dataclasses.replace(INFO, classes=classes, provenance=provenance)
    text = model_card(info, EVALUATION)
    assert f": crane (n1), crane (n2), {escaped}.\n" in text
    assert f"\n| {escaped} | 10 | 100.0% | 90.9% | 95.2% | - |\n" in text
    assert f"- Note: {escaped}\n" in text
    assert text.count("\n## Use") == 1 and text.count("\n```") == 8


def test_unknown_information_is_omitted():
    info = CheckpointInfo(model_config("S/16", num_classes=2), Preprocess())
    text = model_card(info)
    card = ModelCard(text)
    assert card.data.eval_results is None and "license" not in card.data.to_dict()
    assert "base_model" not in card.data.to_dict()
    for heading in ("## Metrics", "## How it was made"):
        assert heading not in text
    assert "None" not in text and 'local-dir:."' in text


def test_lists_hardest_of_many_classes():
    classes = tuple(ClassLabel(f"id{i}", f"name{i}") for i in range(200))
    confusion = np.diag(np.full(200, 10))
    confusion[7, 7], confusion[7, 8] = 1, 9
    confusion[199] = 0  # no images of this class
    info = CheckpointInfo(model_config("Ti/16", num_classes=200), Preprocess(), classes)
    text = model_card(info, evaluation_from(confusion))
    rows = [line for line in text.splitlines() if line.startswith("| name")]
    assert len(rows) == 30 and rows[0] == "| name7 | 10 | 10.0% | 100.0% | 18.2% | name8 |"
    assert "name199" not in text and "with 200 classes." in text


def test_resized_removes_metrics_and_keeps_the_rest():
    text = model_card(INFO, EVALUATION, name="me/flowers", license="apache-2.0")
    assert "model-index" in text and "## Metrics" in text and "93.8%" in text
    once = mark_resized(text, (128, 128), (384, 384))
    assert "0.9375" not in once and "93.8%" not in once and "\n## Metrics" not in once
    card = ModelCard(once)
    assert card.data.eval_results is None and card.data.license == "apache-2.0"
    assert card.text.strip().startswith("> Not the model that was measured: its position")
    assert "## How it was made" in once and "## Use" in once
    twice = mark_resized(once, (384, 384), (64, 96))
    assert twice.count("> Not the model") == 1 and "resized for images of 64 x 96" in twice
    assert "says about images of 128 x 128" in twice  # what the card was written for
    metadata = "model-index:\n- name: x\n  results: []\nlicense: mit"
    foreign = mark_resized(f"---\n{metadata}\n---\n# B/16\n\n## Metrics\n", (224, 224), (384, 384))
    assert foreign.startswith("---\nlicense: mit\n---\n\n> Not the model")
    assert foreign.endswith("\n\n# B/16\n\n## Metrics\n")
    assert mark_resized("", (1, 1), (2, 2)).startswith("> Not the model")


def test_model_that_timm_cannot_express():
    info = CheckpointInfo(model_config("Ti/16", num_classes=2, pre_logits=192), Preprocess())
    text = model_card(info)
    assert "timm cannot express this model (pre_logits=192)." in text
    data = ModelCard(text).data
    assert data.library_name == "vitcli" and "timm" not in data.tags
    assert "create_model" not in text
