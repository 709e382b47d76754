"""A checkpoint's model card: the README.md of its folder, from data to text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from vitcli import config
from vitcli.checkpoints.info import CheckpointInfo, unique_names
from vitcli.config import Architecture, BiTConfig, Size, variant_name
from vitcli.layouts.timm import not_in_timm

if TYPE_CHECKING:
    from vitcli.metrics import Evaluation

FIGURES = {
    f"{part}_{key}": (kind, f"{name}, {words} part")
    for part, words in (("val", "validation"), ("test", "test"))
    for key, (kind, name) in config.METRICS.items()
}
"""What may stand under `provenance["metrics"]`: the kind of metric, and what a reader calls it."""

_SCORES = {
    "softmax": "Scores are the softmax of the logits.",
    "sigmoid": "Scores are the sigmoid of the logits.",
    "none": "The outputs are the predicted values.",
}

TAGS = ("vit", "vitcli", "timm")
"""Beside the task; the second tells that a card is ours."""

MOST_CLASSES = 30
"""More are counted and not listed one by one."""


def model_card(
    info: CheckpointInfo,
    shown: Evaluation | None = None,
    name: str | None = None,
    images: Mapping[str, str] | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """The text of a README.md: front matter, what the model is, figures, how it was made, use.

    Args:
        info: the checkpoint's description; `provenance` tells command, data, parent, figures.
        shown: an evaluation, for a table by class.
        name: what the model is called; a Hub id ("org/name") once it has one.
        images: caption -> file beside the card.
        license: an identifier of the Hub's; left out where nobody said.
        base_model: the repo that it was trained from; the parent, where that is one.
    """
    sections = (
        _front_matter(info, name, license, base_model or _repo(info.provenance.get("parent"))),
        [f"# {name or variant_name(info.model) + ' image classifier'}", *_what_it_is(info)],
        _figures(info, shown, images or {}),
        _making(info),
        _use(info, name),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _repo(parent: object) -> str | None:
    """The parent, if it is a repo on the Hub and no path."""
    text = str(parent or "").partition("@")[0]
    is_path = text.count("/") != 1 or PurePath(text).suffix or text.startswith((".", "/", "~"))
    return None if is_path else text


def _front_matter(
    info: CheckpointInfo, name: str | None, license: str | None, base_model: str | None
) -> list[str]:
    """YAML that the Hub reads. Strings are JSON's, which is YAML too."""
    figures = _numbers(info)
    data = str(info.provenance.get("data") or "")
    task = "image-classification" if info.model.num_classes else "image-feature-extraction"
    lines = ["---", "library_name: timm", f"pipeline_tag: {task}"]
    lines += ["tags:", *(f"- {tag}" for tag in (task, *TAGS))]
    if license:
        lines.append(f"license: {json.dumps(license)}")
    if base_model:
        lines.append(f"base_model: {json.dumps(base_model)}")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", data):
        lines += ["datasets:", f"- {json.dumps(data)}"]
    if figures:
        named = json.dumps(data or "unnamed data", ensure_ascii=False)
        lines += [
            "metrics:",
            *(f"- {kind}" for kind in dict.fromkeys(FIGURES[key][0] for key in figures)),
            "model-index:",
            f"- name: {json.dumps(name or variant_name(info.model))}",
            "  results:",
            "  - task: {type: image-classification}",
            f"    dataset: {{name: {named}, type: imagefolder}}",
            "    metrics:",
        ]
        for key, value in figures.items():
            kind, what = FIGURES[key]
            lines.append(f"    - {{type: {kind}, name: {json.dumps(what)}, value: {value:.4f}}}")
    return [*lines, "---"]


def _numbers(info: CheckpointInfo) -> dict[str, float]:
    figures = info.provenance.get("metrics") or {}
    return {key: float(figures[key]) for key in FIGURES if figures.get(key) is not None}


def _what_it_is(info: CheckpointInfo) -> list[str]:
    model, preprocess = info.model, info.preprocess
    height, width = preprocess.size
    lines = [
        "",
        f"{_kind(model)} ({variant_name(model)}, {model.num_params() / 1e6:.1f} million "
        f"parameters, {2 * model.macs() / 1e9:.2f} GFLOPs an image) for images of "
        f"{height} x {width} pixels, with {model.num_classes} classes.",
    ]
    if info.classes and len(info.classes) <= MOST_CLASSES:
        lines[-1] += f" They are {', '.join(_names(info))}."
    filtered = preprocess.interpolation + ("" if preprocess.antialias else " without antialiasing")
    lines += [
        "",
        f"Images are resized ({filtered}, {preprocess.crop_mode}, crop "
        f"{preprocess.crop_pct:g}), scaled to [0, 1], less mean {_triple(preprocess.mean)}, over "
        f"std {_triple(preprocess.std)}. {_SCORES[info.score]}",
    ]
    return lines


def _names(info: CheckpointInfo) -> list[str]:
    """Each on one line, as a table and a paragraph need it."""
    return [" ".join(name.split()) for name in unique_names(info.classes)]


def _kind(model: Architecture) -> str:
    if isinstance(model, BiTConfig):
        return "A BiT ResNet"
    return "A ResNet with a Vision Transformer behind it" if model.stem else "A Vision Transformer"


def _triple(values: tuple[float, float, float]) -> str:
    return str(values[0]) if len(set(values)) == 1 else str(values)


def _figures(
    info: CheckpointInfo, shown: Evaluation | None, images: Mapping[str, str]
) -> list[str]:
    numbers = _numbers(info)
    if not numbers and shown is None:
        return []
    lines = ["## Figures", "", "Of the stored file, on images that it was not trained on."]
    if "val_top1" in numbers:
        lines[-1] += " Validation chose the step that was kept; a test part chose nothing."
    lines.append("")
    if numbers:
        lines += ["| figure | |", "|---|---|"]
        lines += [f"| {FIGURES[key][1]} | {value:.1%} |" for key, value in numbers.items()]
    if shown is not None:
        lines += [*([""] if numbers else []), f"Of {shown.count:,} images:", ""]
        lines += _by_class(info, shown)
    for caption, file in images.items():
        lines += ["", f"![{caption}]({file})"]
    return lines


def _by_class(info: CheckpointInfo, shown: Evaluation) -> Iterator[str]:
    """A row for each class that has images; of many classes those with the lowest F1."""
    names = _names(info)
    rows = [row for row in shown.by_class if row.count]
    if len(rows) > MOST_CLASSES:
        rows = sorted(rows, key=lambda row: row.f1)[:MOST_CLASSES]
        yield f"The {MOST_CLASSES} classes that are hardest:"
        yield ""
    yield "| class | images | recall | precision | F1 | most often taken for |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        other = "-" if row.taken_for is None else names[row.taken_for]
        parts = " | ".join(
            "-" if math.isnan(part) else f"{part:.1%}"
            for part in (row.recall, row.precision, row.f1)
        )
        yield f"| {_cell(names[row.index])} | {row.count} | {parts} | {_cell(other)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _making(info: CheckpointInfo) -> list[str]:
    said = info.provenance
    lines = ["## How it was made", ""]
    runs = [*said.get("history", []), said]
    commands = [str(run["command"]) for run in runs if run.get("command")]
    if commands:
        lines += ["```sh", *commands, "```", ""]
    facts = {
        "Made by": said.get("made_by"),
        "Data": said.get("data"),
        "Images trained on": said.get("train_images"),
        "Started from": said.get("parent"),
        "Position embeddings resized": _resized(said.get("posemb_resize")),
        "Optimizer step that was kept": said.get("steps"),
        "Seed": said.get("seed"),
        "Time": " + ".join(_duration(run["seconds"]) for run in runs if "seconds" in run) or None,
        "Note": said.get("note"),
    }
    listed = [f"- {what}: {value}" for what, value in facts.items() if value is not None]
    return [*lines, *listed] if listed or commands else []


def _resized(said: Any) -> str | None:
    if not isinstance(said, dict):
        return None
    old, new = said.get("from"), said.get("to")
    grids = f" from {old[0]} x {old[1]}" if old else ""
    return f"{said.get('method')}{grids}" + (f" to {new[0]} x {new[1]}" if new else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _use(info: CheckpointInfo, name: str | None) -> list[str]:
    where = name if name and "/" in name else None
    lines = ["## Use", "", "```sh", f"vit predict cat.jpg --model {where or '.'}", "```"]
    if not_in_timm(info.model):
        return [*lines, "", f"timm cannot hold this model ({', '.join(not_in_timm(info.model))})."]
    timm_name = f"hf-hub:{where}" if where else "local-dir:."
    return [
        *lines,
        "",
        "```python",
        "import timm",
        "",
        f'model = timm.create_model("{timm_name}", pretrained=True).eval()',
        "```",
        "",
        "```python",
        "from transformers import pipeline  # with timm installed",
        "",
        f'pipeline("image-classification", "{where or "."}")("cat.jpg")',
        "```",
    ]


# ---------------------------------------------------------------------------------------------
# A card that is there already


def is_ours(text: str) -> bool:
    """Whether a README.md is a card that this module wrote, and perhaps a person went on with."""
    return bool(re.search(r"^- vitcli$", _matter(text), re.MULTILINE))


def license_of(text: str) -> str | None:
    """The licence that a card's front matter names."""
    found = re.search(r"^license: *[\"']?([^\"'\n]+)", _matter(text), re.MULTILINE)
    return found[1].strip() if found else None


def _matter(text: str) -> str:
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    return found[1] if found else ""


def images_in(text: str) -> list[str]:
    """The files beside a card that it shows."""
    found = re.findall(r"!\[[^\]]*\]\(([\w.-]+\.(?:png|jpe?g|svg))\)", text)
    return list(dict.fromkeys(found))


def with_sections_of(text: str, old: str) -> str:
    """A new card with what only the old one has: its figures, which hold a table by class, and the
    sections that a person wrote."""
    new, former = _sections(text), _sections(old)
    if "Figures" in former and "Figures" in new:
        new["Figures"] = former["Figures"]
    use = {"Use": new.pop("Use")} if "Use" in new else {}
    kept = {heading: body for heading, body in former.items() if heading not in {"", *new, *use}}
    return "\n\n".join(body.strip("\n") for body in {**new, **kept, **use}.values()) + "\n"


def resized(text: str, old: Size, new: Size) -> str:
    """A card, whoever wrote it, of a model that takes images of another size since, without
    training: figures are not kept where they can be told (the Hub's `model-index`, our section of
    them), and a line says of what size the rest speaks."""
    matter = re.match(r"---\n.*?\n---\n", text, re.DOTALL)
    body = text[matter.end() if matter else 0 :].lstrip("\n")
    kept, inside = [], False
    for line in matter[0].splitlines() if matter else ():
        inside = line == "model-index:" or (inside and line[:1] in (" ", "-") and line != "---")
        kept += [] if inside else [line]
    if is_ours(text):
        sections = {name: part for name, part in _sections(body).items() if name != "Figures"}
        body = "\n\n".join(part.strip("\n") for part in sections.values()) + "\n"
    note = (
        f"{_NOTE} its position embeddings were resized for images of {new[0]} x {new[1]} pixels, "
        f"and nothing was trained since. What is said here of images of {old[0]} x {old[1]} "
        f"pixels, and any figure, is of the model before."
    )
    lines = [*kept, *([""] if kept else []), note, "", re.sub(rf"{_NOTE}.*\n\n?", "", body)]
    return "\n".join(lines)


_NOTE = "> Not the model that was measured:"


def _sections(text: str) -> dict[str, str]:
    """The parts of a card by their headings of the second level; what stands before is ""."""
    parts: dict[str, list[str]] = {"": []}
    heading, in_code = "", False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if line.startswith("## ") and not in_code:
            heading = line[3:].strip()
        parts.setdefault(heading, []).append(line)
    return {heading: "\n".join(lines) for heading, lines in parts.items()}
