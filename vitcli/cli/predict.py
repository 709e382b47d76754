"""`vit predict`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vitcli.checkpoints.info import assumptions
from vitcli.cli import options, output
from vitcli.cli.rows import Csv, Json, RowWriter, open_rows
from vitcli.config import Score
from vitcli.prediction import TOP_K, Predictor, Result
from vitcli.train_config import TrainConfig

Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGES",
        help="Files, directories (searched recursively), glob patterns, URLs, @list.txt (one of "
        "these per line), or - for an image on stdin.",
        show_default=False,
    ),
]
TopK = Annotated[
    int,
    typer.Option("--top-k", "-k", min=1, metavar="K", help="Number of classes to print per image."),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        min=0.0,
        max=1.0,
        metavar="X",
        help="Hide classes with a score below X.  [default: 0]",
    ),
]
Resolution = Annotated[
    str | None,
    typer.Option(
        "--resolution",
        metavar="N|HxW",
        help="Input size in pixels; position embeddings are resized to match.  "
        "[default: the model's]",
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        "--features",
        metavar="FILE",
        help="Save features (the input of the head) to a .npy or .safetensors file instead of "
        "classifying: one float32 row per image, NaN if the image cannot be read.",
    ),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV, one row per class.")]

BAR = 20
"""Characters of a bar for a score of 1."""


def predict(
    images: Images,
    model: options.Model = "default",
    top_k: TopK = TOP_K,
    threshold: Threshold = None,
    resolution: Resolution = None,
    posemb_method: options.PosembResize = TrainConfig.posemb_method,
    batch_size: options.BatchSize = None,
    features: Features = None,
    json: options.Json = False,
    csv: AsCsv = False,
    output_file: options.Output = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Classify images and print the best classes of each, with their scores.

    Results are printed in order, as soon as they are ready. An image that cannot be read is
    reported and skipped, and the exit code is 1.

    \b
    Examples:
      vit predict cat.jpg
      vit predict photos --model vit-b16-i21k --top-k 3 -o photos.csv
      vit predict photos --features photos.npy
    """
    if json and csv:
        raise typer.BadParameter("--json and --csv cannot be combined")
    options.spare((name.removeprefix("@") for name in images), output_file, "--output")
    if features and not features.lower().endswith((".npy", ".safetensors")):
        raise typer.BadParameter(
            f"'{features}' does not end in .npy or .safetensors", param_hint="--features"
        )
    if output_file and features and os.path.realpath(output_file) == os.path.realpath(features):
        raise typer.BadParameter("--output and --features must be different files")
    size = None if resolution is None else options.parse_resolution(resolution)
    format = Json if json else Csv if csv else None
    output.check_writable(features)
    with open_rows(output_file, format=format) as rows:
        with output.FetchDisplay(quiet) as fetching:
            predictor = Predictor(
                *(model, device, precision, offline, fetching, size, posemb_method, allow_pickle)
            )
        _introduce(predictor, model == "default", quiet)
        answers: Iterable[ImageRow]
        if features is None:
            results = predictor.predict(images, top_k, threshold, batch_size)
            answers = (ImageRow(result, predictor.info.score) for result in results)
        else:
            answers = _save(predictor, images, batch_size, features, quiet)
        # On a terminal, the results themselves show how far it is.
        hidden = quiet or (rows.is_terminal and features is None)
        with output.Meter("images", quiet=hidden) as meter:
            failed = _write(answers, rows, meter, [] if hidden else images)
    if failed:
        if meter.done > 1:
            output.note(f"{failed:,} of {meter.done:,} images could not be read")
        raise typer.Exit(1)


def _introduce(predictor: Predictor, default: bool, quiet: bool) -> None:
    """What a user should know before the first answer."""
    names, name = [label.name for label in predictor.classes], predictor.name
    if default:
        output.note(
            f"using {name} ({len(names)} classes: {', '.join(names[:12])}"
            f"{', ...' if len(names) > 12 else ''}); choose another model with --model, such as "
            "--model vit-b16-i21k",
            quiet,
        )
    elif names and not predictor.info.classes:
        output.note(f"{name}: the model has no class names, so class indices are shown", quiet)
    if assumed := ", ".join(assumptions(predictor.info).values()):
        output.note(f"{name}: not specified in the checkpoint, so assumed: {assumed}", quiet)
    if left_out := predictor.info.provenance.get("left_out"):
        output.note(f"{name}: not part of the model, so left out: {', '.join(left_out)}", quiet)


def _save(
    predictor: Predictor, images: list[str], batch_size: int | None, path: str, quiet: bool
) -> Iterator[ImageRow]:
    """Writes features to a file."""
    from vitcli.checkpoints.rows import row_file

    width = predictor.info.model.feature_dim
    with row_file(path, width, {"model": predictor.name}) as table:
        for number, result in enumerate(predictor.embed(images, batch_size)):
            table.add(result.features)
            yield ImageRow(result, predictor.info.score, number)
    output.note(f"features: {path}, {table.count:,} x {width:,}", quiet)


def _write(
    answers: Iterable[ImageRow], rows: RowWriter, meter: output.Meter, counted: list[str]
) -> int:
    """Writes answers as they come; the number of images that could not be read."""
    threading.Thread(target=_count, args=(meter, counted), daemon=True).start()
    failed = 0
    for answer in answers:
        if error := answer.result.error:
            failed += 1
            output.error(f"{output.printable(answer.result.file)}: {error.what}", error.hint)
        rows.write(answer)
        meter.advance()
    return failed


def _count(meter: output.Meter, images: list[str]) -> None:
    """Counts the images during the work; not those of a list that comes through a pipe."""
    from vitcli.data.inputs import find_images

    if images and all(os.path.isfile(name[1:]) for name in images if name.startswith("@")):
        with contextlib.suppress(OSError):
            meter.total = sum(1 for _ in find_images(images, offline=True))


@dataclass(frozen=True)
class ImageRow:
    """The row of an image: its classes, or where its features are."""

    result: Result
    score: Score
    number: int | None = None
    """Of its row in the file of features."""

    def to_json(self) -> dict[str, Any]:
        result = self.result
        if result.error is not None:
            return {"file": result.file, "error": result.error.what}
        row: dict[str, Any] = {"file": result.file, "model": result.model}
        if self.number is not None:
            return row | {"row": self.number}
        return row | {"predictions": [dataclasses.asdict(p) for p in result.predictions]}

    def records(self) -> list[dict[str, Any]]:
        """A row per class; a single one where there is none, or an error."""
        file, error = self.result.file, self.result.error.what if self.result.error else None
        if self.number is not None:
            return [{"file": file, "row": self.number, "error": error}]
        found = [dataclasses.asdict(p) for p in self.result.predictions]
        none = dict.fromkeys(("index", "id", "label", "score"))
        return [
            {"file": file, "rank": rank if found else None, **cells, "error": error}
            for rank, cells in enumerate(found or [none], 1)
        ]

    def text(self, terminal: bool) -> str | None:
        """Bars on a terminal, one line elsewhere."""
        result, form = self.result, "{:.4g}" if self.score == "none" else "{:.1%}"
        if result.error is not None or self.number is not None:
            return None
        file, none = output.printable(result.file), "no class above the threshold"
        found = [(output.printable(p.label), form.format(p.score)) for p in result.predictions]
        if not terminal:
            return f"{file}: {'; '.join(map(' '.join, found)) or none}"
        lines = [output.paint(file, "1")]
        width = max((len(label) for label, _ in found), default=0)
        for (label, score), p in zip(found, result.predictions, strict=True):
            bar = "" if self.score == "none" else "█" * round(BAR * p.score)
            lines.append(f"  {label:<{width}}  {score:>6}  {output.paint(bar, '32')}".rstrip())
        return "\n".join(lines if found else [*lines, f"  {none}"])
