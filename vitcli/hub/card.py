"""Generating a checkpoint's model card, the README.md beside it, from its description."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from vitcli import config
from vitcli.checkpoints.info import CheckpointInfo, resize_text, unique_names
from vitcli.config import BiTConfig, ModelConfig, variant_name
from vitcli.hub import registry
from vitcli.hub.privacy import is_repo, redact
from vitcli.hub.readme import Card, digest
from vitcli.hub.registry import RegistryEntry
from vitcli.layouts.timm import not_in_timm
from vitcli.weight_files import is_own_file
from vitcli.words import format_flops, pluralize

if TYPE_CHECKING:
    from vitcli.metrics import Evaluation

METRICS = {
    f"{split}_{key}": (kind, f"{name}, {word} split")
    for split, word in (("val", "validation"), ("test", "test"))
    for key, (kind, name) in config.METRICS.items()
}
"""Keys of `provenance["metrics"]` -> the Hub's type of the metric, and a name for display."""

CURVES, CONFUSION, RELIABILITY = "curves.png", "confusion.png", "reliability.png"
RECONSTRUCTION = "reconstruction.png"
FIGURES = {
    CURVES: "Loss, accuracy and learning rate",
    CONFUSION: "Confusion matrix",
    RELIABILITY: "Reliability",
    RECONSTRUCTION: "Validation images: original, masked, reconstructed",
}
"""Figures of a run (`train/report.py`), with their captions in the card."""

TAGS = ("vit", "vitcli")
"""Tags besides the task and the library; the second identifies our cards."""
MOST_CLASSES = 30
"""If there are more classes, only the hardest are listed."""


def model_card(
    info: CheckpointInfo,
    evaluation: Evaluation | None = None,
    name: str | None = None,
    images: Mapping[str, str] | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """Return the text of a README.md: front matter, introduction, metrics, history, use.

    Args:
        evaluation: for a table of per-class metrics.
        name: the model's name; a Hub id ("org/name") once it has one.
        images: caption -> file beside the card.
        license: a license identifier of the Hub; default: that of the model it was trained from.
        base_model: the repo that it was trained from; default: its nearest ancestor on the Hub.
    """
    info = dataclasses.replace(info, provenance=redact(info.provenance))
    ancestor, inherited = lineage(info)
    title = f"# {name or variant_name(info.model) + ' image classifier'}"
    parts = _front_matter(info, name, license or inherited, base_model or ancestor)
    parts |= {
        "": "\n".join([title, *_introduction(info)]),
        "## Metrics": "\n".join(_metrics_section(info, evaluation, images or {})),
        "## How it was made": "\n".join(_history_section(info)),
        "## Use": "\n".join(_usage_section(info, name)),
    }
    parts = {key: text for key, text in parts.items() if text}
    return str(Card(parts, {key: digest(text) for key, text in parts.items()}))


def lineage(
    info: CheckpointInfo, entry: RegistryEntry | None = None
) -> tuple[str | None, str | None]:
    """The Hub repo that a model is derived from, and that repo's license; None where unknown.

    It is the nearest ancestor with a name; intermediate runs have none. The license of a repo that
    is not in the registry is unknown.
    """
    if entry is not None:
        return entry.repo, entry.license
    for run in (info.provenance, *reversed(info.provenance.get("history", []))):
        parent = str(run.get("parent", "")).partition("@")[0]
        model = registry.find(parent) if parent else None
        if isinstance(model, RegistryEntry):
            return model.repo, model.license
        if model is not None:
            return None, registry.shipped_license()
        if is_repo(parent):
            return parent, None
    return None, None


def _front_matter(
    info: CheckpointInfo, name: str | None, license: str | None, base_model: str | None
) -> dict[str, str]:
    from huggingface_hub import EvalResult, ModelCardData

    values, dataset = _metric_values(info), info.provenance.get("dataset")
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=dataset or "imagefolder",
            dataset_name=str(info.provenance.get("data") or "unnamed data"),
            metric_type=METRICS[key][0],
            metric_name=METRICS[key][1],
            metric_value=round(value, 4),
        )
        for key, value in values.items()
    ]
    # The Hub shows code that loads the model with this library.
    library = "vitcli" if not_in_timm(info.model) else "timm"
    link = registry.LICENSE_LINKS.get(license or "")
    data = ModelCardData(
        library_name=library,
        pipeline_tag=_task(info),
        tags=list(dict.fromkeys([_task(info), *TAGS, library])),
        license="other" if link else license,
        license_name=license if link else None,
        license_link=link,
        base_model=base_model,
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(METRICS[key][0] for key in values)) or None,
        eval_results=results or None,
        model_name=name or variant_name(info.model),
    )
    if not results:
        data.pop("model_name")
    return Card.parse(f"---\n{data.to_yaml()}\n---\n").parts


def _task(info: CheckpointInfo) -> str:
    return "image-classification" if info.model.num_classes else "image-feature-extraction"


def _metric_values(info: CheckpointInfo) -> dict[str, float]:
    metrics = info.provenance.get("metrics") or {}
    return {key: float(metrics[key]) for key in METRICS if metrics.get(key) is not None}


def _introduction(info: CheckpointInfo) -> list[str]:
    model, preprocess = info.model, info.preprocess
    height, width = preprocess.size
    family = "BiT ResNet" if isinstance(model, BiTConfig) else "Vision Transformer"
    if isinstance(model, ModelConfig) and model.stem:
        family += " on a ResNet stem"
    head, scores = "without a head.", ""
    if model.num_classes:
        head = f"with {pluralize(model.num_classes, 'class', 'classes')}"
        listed = 0 < len(info.classes) <= MOST_CLASSES
        head += f": {', '.join(_names(info))}." if listed else "."
        scores = f" Scores are the {info.score} of the logits."
    resize = preprocess.interpolation + ("" if preprocess.antialias else " without antialiasing")
    mean, std = (rgb[0] if len(set(rgb)) == 1 else rgb for rgb in (preprocess.mean, preprocess.std))
    return [
        "",
        f"A {family} ({variant_name(model)}, {model.num_params() / 1e6:.1f} million parameters, "
        f"{format_flops(2 * model.macs())} per image) for images of {height} x {width} pixels, "
        f"{head}",
        "",
        f"Images are resized ({resize}, crop_mode {preprocess.crop_mode}, crop_pct "
        f"{preprocess.crop_pct:g}), scaled to [0, 1] and normalized with mean {mean} and std "
        f"{std}.{scores}",
    ]


def _names(info: CheckpointInfo) -> list[str]:
    """Class names, for tables and paragraphs."""
    return list(map(_escape, unique_names(info.classes)))


def _metrics_section(
    info: CheckpointInfo, evaluation: Evaluation | None, images: Mapping[str, str]
) -> list[str]:
    values = _metric_values(info)
    rows = [f"| {METRICS[key][1]} | {value:.1%} |" for key, value in values.items()]
    loss = None if values else (info.provenance.get("metrics") or {}).get("val_loss")
    if loss is not None:  # for an objective without classes
        rows = [f"| loss, validation split | {loss:.4f} |"]
    if not rows and evaluation is None:
        return []
    lines = ["## Metrics", "", "Measured on images that were not used for training."]
    if "steps" in info.provenance and ("val_top1" in values or loss is not None):
        is_last = info.provenance.get("store") == "last"
        which = "the last" if is_last else "the best on the validation split"
        lines[2] += f" The stored step is {which}."
    if rows:
        lines += ["", "| metric | |", "|---|---|", *rows]
    if evaluation is not None:
        lines += ["", *_class_table(info, evaluation)]
    for caption, file in images.items():
        lines += ["", f"![{caption}]({file})"]
    return lines


def _class_table(info: CheckpointInfo, evaluation: Evaluation) -> Iterator[str]:
    """Yield a table with a row for each class with images; of many, those with the lowest F1."""
    names = _names(info)
    rows, what = [row for row in evaluation.by_class if row.count], "By class"
    if len(rows) > MOST_CLASSES:
        what = f"The {MOST_CLASSES} classes with the lowest F1, of {len(rows):,}"
        rows = sorted(rows, key=lambda row: row.f1)[:MOST_CLASSES]
    yield f"{what}, on {pluralize(evaluation.count, 'image')}:"
    yield ""
    yield "| class | images | recall | precision | F1 | most often confused with |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        other = "-" if row.confused_with is None else names[row.confused_with]
        values = " | ".join(
            "-" if math.isnan(value) else f"{value:.1%}"
            for value in (row.recall, row.precision, row.f1)
        )
        yield f"| {names[row.index]} | {row.count} | {values} | {other} |"


def _one_line(text: str) -> str:
    """Replace line breaks and control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _escape(text: str) -> str:
    """Return a line of Markdown that shows a text from elsewhere as it is."""
    return re.sub(r"([\\`*<\[|])", r"\\\1", _one_line(text))


def _history_section(info: CheckpointInfo) -> list[str]:
    provenance = info.provenance
    lines = ["## How it was made", ""]
    runs = [*provenance.get("history", []), provenance]
    commands = [_one_line(str(run["command"])) for run in runs if run.get("command")]
    if commands:
        lines += [*_code_block("sh", *commands), ""]
    seconds = [run["seconds"] for run in runs if "seconds" in run]
    counts = {k: f"{provenance[k]:,}" for k in ("train_images", "steps") if k in provenance}
    resize = provenance.get("posemb_resize")
    facts = {
        "Made by": provenance.get("made_by"),
        "Data": provenance.get("data"),
        "Training images": counts.get("train_images"),
        "Initial weights": provenance.get("parent"),
        "Teacher": provenance.get("teacher"),
        "Average of": ", ".join(provenance.get("average_of", [])) or None,
        "Position embeddings resized": resize_text(resize) if resize else None,
        "Step of the stored weights": counts.get("steps"),
        "Seed": provenance.get("seed"),
        "Time": " + ".join(str(timedelta(seconds=round(s))) for s in seconds) or None,
        "Note": provenance.get("note"),
    }
    known = {what: str(value) for what, value in facts.items() if value is not None}
    items = [f"- {what}: {_escape(text)}" for what, text in known.items()]
    return [*lines, *items] if items or commands else []


def _usage_section(info: CheckpointInfo, name: str | None) -> list[str]:
    repo = name if name and "/" in name else None
    command = "predict cat.jpg" if info.model.num_classes else "finetune --data photos"
    lines = ["## Use", "", *_code_block("sh", f"vit {command} --model {repo or '.'}"), ""]
    if reasons := ", ".join(not_in_timm(info.model)):
        return [*lines, f"timm cannot express this model ({reasons})."]
    timm_name = f"hf-hub:{repo}" if repo else "local-dir:."
    model = f'model = timm.create_model("{timm_name}", pretrained=True).eval()'
    call = f'pipeline("{_task(info)}", "{repo or "."}")("cat.jpg")'
    lines += [*_code_block("python", "import timm", "", model), ""]
    import_line = "from transformers import pipeline  # with timm installed"
    return [*lines, *_code_block("python", import_line, "", call)]


def _code_block(language: str, *lines: str) -> list[str]:
    return [f"```{language}", *lines, "```"]


def figures_in(directory: Path) -> dict[str, str]:
    """Caption -> file name of the figures of a run."""
    return {text: name for name, text in FIGURES.items() if is_own_file(directory / name)}
