"""`vit predict`."""

from __future__ import annotations

import contextlib
import csv as csv_format
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TextIO

import typer

from vitcli.checkpoints.info import assumptions
from vitcli.cli import options, output
from vitcli.prediction import TOP_K, Embedding, Predictor, Result

Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGES...",
        help="Files, folders (with all below them), patterns, URLs, @list.txt (one of these a "
        "line), or - for one image on standard input.",
        show_default=False,
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", "-k", min=1, help="Classes that are named for each image.")
]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--threshold", min=0.0, max=1.0, help="Leave out classes with a lower score.  [default: 0]"
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        "--features",
        metavar="FILE",
        help="Save embeddings (the head's input) instead: a float32 row for each image, NaN "
        "where it cannot be read. FILE ends in .npy or .safetensors.",
    ),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV, one class a line.")]

BAR = 20
"""Characters of a bar for a score of 1."""


def predict(
    images: Images,
    model: options.Model = "default",
    top_k: TopK = TOP_K,
    threshold: Threshold = None,
    batch_size: options.BatchSize = None,
    features: Features = None,
    json: options.Json = False,
    csv: Csv = False,
    output_file: options.Output = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Say what is in images: the best classes of each, with their scores.

    Results come in order, as they are ready. An image that cannot be read is reported and
    skipped; the exit code is then 1.
    """
    if json and csv:
        raise typer.BadParameter("choose one of --json and --csv")
    options.spare((name.removeprefix("@") for name in images), output_file, "--output")
    if output_file and features and os.path.realpath(output_file) == os.path.realpath(features):
        raise typer.BadParameter("--output and --features name one file")
    kind: Literal["json", "csv", "plain"] = "json" if json else "csv" if csv else "plain"
    with output.results_file(output_file) as file:
        with output.FetchDisplay(quiet) as fetching:
            predictor = Predictor(
                model, device, precision, offline, fetching, allow_pickle=allow_pickle
            )
        _introduce(predictor, model, quiet)
        answers: Iterator[Result | Embedding]
        if features is None:
            answers = predictor.predict(images, top_k, threshold, batch_size)
        else:
            answers = _save(predictor, images, batch_size, features, quiet)
        # Results that run over the terminal are progress enough.
        hidden = quiet or (file.isatty() and features is None)
        with output.Meter("images", quiet=hidden) as meter:
            failed = _print(answers, kind, file, meter, [] if hidden else images)
    if failed:
        if meter.done > 1:
            output.note(f"{failed:,} of {meter.done:,} images could not be read")
        raise typer.Exit(1)


def _introduce(predictor: Predictor, model: str, quiet: bool) -> None:
    """What should be known before the first answer."""
    names = [label.name for label in predictor.classes]
    if model == "default":
        output.note(
            f"{predictor.name} ships with vit and knows {len(names)} classes: "
            f"{', '.join(names[:12])}{', ...' if len(names) > 12 else ''}; "
            "--model takes others, as in --model vit-b16-i21k",
            quiet,
        )
    elif names and not predictor.info.classes:
        output.note(f"{model} does not name its classes: their indices are shown", quiet)
    if assumed := ", ".join(assumptions(predictor.info).values()):
        output.note(f"{model} does not state everything; assumed: {assumed}", quiet)


def _save(
    predictor: Predictor, images: list[str], batch_size: int | None, path: str, quiet: bool
) -> Iterator[Embedding]:
    """Embeddings on their way into a file."""
    from vitcli.checkpoints.rows import row_file

    width = predictor.info.model.feature_dim
    with row_file(path, width, {"model": predictor.name}) as rows:
        for embedding in predictor.embed(images, batch_size):
            rows.add(embedding.features)
            yield embedding
    output.note(f"{rows.count:,} x {width:,} features are in {path}", quiet)


def _print(
    answers: Iterator[Result | Embedding],
    kind: Literal["json", "csv", "plain"],
    file: TextIO,
    meter: output.Meter,
    counted: list[str],
) -> int:
    """Prints answers as they come; the number of images that could not be read."""
    threading.Thread(target=_count, args=(meter, counted), daemon=True).start()
    failed = 0
    table = csv_format.writer(file, lineterminator="\n")
    for row, answer in enumerate(answers):
        if row == 0 and kind == "csv":
            saved = isinstance(answer, Embedding)
            head = "file row error" if saved else "file rank index id label score error"
            table.writerow(head.split())
        if answer.error is not None:
            failed += 1
            hint = f"\n{answer.error.hint}" if answer.error.hint else ""
            output.error(f"{output.printable(answer.file)}: {answer.error.what}{hint}")
        if kind == "json":
            output.json_line(as_object(answer, row), file)
        elif kind == "csv":
            table.writerows(as_rows(answer, row))
            file.flush()
        elif isinstance(answer, Result) and answer.error is None:
            output.line(as_text(answer, file), file)
        meter.advance()
    return failed


def _count(meter: output.Meter, images: list[str]) -> None:
    """How many images there will be, found out beside the work; not of lists in a pipe."""
    from vitcli.data.inputs import find_images

    if images and all(os.path.isfile(name[1:]) for name in images if name.startswith("@")):
        with contextlib.suppress(OSError):
            meter.total = sum(1 for _ in find_images(images, offline=True))


def as_object(answer: Result | Embedding, row: int) -> dict[str, Any]:
    """An answer as JSON has it."""
    if answer.error is not None:
        return {"file": answer.file, "error": answer.error.what}
    told: dict[str, Any] = {"file": answer.file, "model": answer.model}
    if isinstance(answer, Embedding):
        return told | {"row": row}
    return told | {"predictions": [dataclasses.asdict(p) for p in answer.predictions]}


def as_rows(answer: Result | Embedding, row: int) -> list[list[Any]]:
    """An answer as CSV has it: a line for each class; one where there is none, or an error."""
    error = answer.error.what if answer.error is not None else ""
    if isinstance(answer, Embedding):
        return [[answer.file, row, error]]
    if not answer.predictions:
        return [[answer.file, "", "", "", "", "", error]]
    return [
        [answer.file, rank, p.index, p.id, p.label, p.score, ""]
        for rank, p in enumerate(answer.predictions, 1)
    ]


def as_text(answer: Result, file: TextIO) -> str:
    """An answer for people: bars on a terminal, one line elsewhere."""
    if not file.isatty():
        named = [f"{p.label} {p.score:.1%}" for p in answer.predictions]
        return output.printable(
            f"{answer.file}: {'; '.join(named) or 'nothing above the threshold'}"
        )
    lines = [output.paint(output.printable(answer.file), "1", file)]
    labels = [output.printable(p.label) for p in answer.predictions]
    width = max(map(len, labels), default=0)
    for label, p in zip(labels, answer.predictions, strict=True):
        bar = output.paint("█" * round(BAR * p.score), "32", file)
        lines.append(f"  {label.ljust(width)}  {p.score:6.1%}  {bar}".rstrip())
    return "\n".join(lines if answer.predictions else [*lines, "  nothing above the threshold"])
