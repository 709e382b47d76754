"""`vit predict`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import typer

from vitcli.checkpoints.feature_file import SUFFIXES, row_file
from vitcli.cli import output, progress
from vitcli.cli.launch import on_devices
from vitcli.cli.options import (
    PreprocessOptions,
    check_overwrite,
    ending,
    model_files,
    note_missing_names,
    open_predictor,
)
from vitcli.cli.parameters import UsageError, command
from vitcli.cli.parts import is_directory, split_by_argument
from vitcli.cli.rows import OUTPUT, Csv, Json, RowWriter, choose_writer, open_writer
from vitcli.config import Score
from vitcli.data.image_inputs import find_images, is_countable, public_name
from vitcli.errors import DataError
from vitcli.fields import option
from vitcli.prediction import TOP_K, Predictor, Result
from vitcli.words import pluralize, public_url

BAR_WIDTH = 20
"""Width in characters of the bar for a score of 1."""


@dataclass(frozen=True, kw_only=True)
class Predict(PreprocessOptions):
    """Options of `vit predict`."""

    images: list[str] = option(
        ...,
        "IMAGES",
        "Images, directories (searched recursively), tar files, glob patterns, URLs, @list.txt "
        "(one of these per line; @- reads the list from stdin), or - for an image on stdin.",
    )
    top_k: int = option(TOP_K, "--top-k -k N", "Number of classes to print per image.", min=1)
    threshold: float | None = option(
        None,
        "--threshold X",
        "Hide classes with scores below X (0 to 1).  [default: 0]",
        min=0,
        max=1,
    )
    features: str | None = option(
        None,
        "--features FILE|DIR/",
        "Save features (the input of the head) to a .npy, .safetensors or .parquet file instead of "
        "classifying: one float32 row per image, NaN (null in .parquet) if the image cannot be "
        "read. DIR/: as for --output.",
        parse=lambda path: path if is_directory(path) else ending(*SUFFIXES)(path),
    )
    csv: bool = option(False, "--csv", "Print CSV, one row per class (with --features, per image).")
    output: str | None = option(
        None,
        "--output -o FILE|DIR/",
        "Write the results to FILE (- for stdout), in the format given by its suffix: CSV for "
        ".csv, JSON Lines for .json or .jsonl, Parquet for .parquet, plain text for .txt or no "
        "suffix. DIR/: one file per argument, Parquet unless --csv or --json is given; existing "
        "files are skipped, so running the command again continues an interrupted one.",
        parse=lambda path: None if path == "-" else path,
    )


@command(Predict)
@on_devices("output", "features")
def predict(args: Predict) -> None:
    """Classify images and print the top classes of each, with their scores.

    Results are printed in order, as soon as they are ready. Images that cannot be read are reported
    and skipped, and the exit code is 1.

    \b
    Examples:
      vit predict cat.jpg
      vit predict photos --model vit-b16-i21k --top-k 3 -o photos.csv
      vit predict photos --features photos.npy
    """
    if args.json and args.csv:
        raise UsageError("--json and --csv cannot be combined")
    if args.features and (args.threshold is not None or args.top_k != TOP_K):
        raise UsageError("--features does not save classes: leave out --top-k and --threshold")
    model, features = model_files(args.model), args.features
    check_overwrite(
        (*model, *(name.removeprefix("@") for name in args.images)), args.output, OUTPUT
    )
    check_overwrite(model, features, "'--features'")
    if args.output and features and os.path.realpath(args.output) == os.path.realpath(features):
        raise UsageError("--output and --features must be different files")
    jobs, format = split_by_argument(args), Json if args.json else Csv if args.csv else None
    if not jobs:
        output.note("all results exist: nothing to do")
        return
    writer_class = choose_writer(jobs[0].output, format=format)
    for path in (jobs[0].output, jobs[0].features):
        output.check_writable(path)
    predictor = open_predictor(args, args.resolution)
    _print_model_notes(predictor, args.model == "default")
    # On a terminal, the results themselves show the progress.
    hidden = args.output is None and sys.stdout.isatty() and (features is None or args.json)
    failed_images = failed_inputs = written_images = 0
    outputs = " and ".join(filter(None, (args.output, args.features)))
    with progress.Meter("images", hidden=hidden) as meter:
        if not (hidden or output.quiet):
            names = [name for job in jobs for name in job.images]
            threading.Thread(target=_count_images, args=(meter, names), daemon=True).start()
        for job in jobs:
            start = meter.done
            try:
                with (
                    open_writer(job.output, writer_class) as writer,
                    contextlib.closing(_image_rows(predictor, job, job is not args)) as rows,
                ):
                    failed_images += _write_rows(rows, writer, meter)
                written_images += meter.done - start
            except DataError as error:
                if job is args:
                    raise
                failed_inputs += 1
                output.error(f"{error.message}; its results were not written", error.hint)
    if failed_images and meter.done > 1:
        counts = f"{failed_images:,} of {meter.done:,} images"
        output.note(f"could not read {counts}", always=True)
    if jobs != [args]:
        inputs = f"{len(jobs) - failed_inputs:,} of " * bool(failed_inputs)
        inputs += pluralize(len(jobs), "input")
        images = pluralize(written_images, "image")
        output.note(f"wrote the results of {inputs} ({images}) to {outputs}")
    elif args.output:
        output.note(f"results: {args.output}, {pluralize(meter.done, 'image')}")
    if failed_images or failed_inputs:
        raise typer.Exit(1)


def _print_model_notes(predictor: Predictor, is_default: bool) -> None:
    """Print notes on the model before the first result."""
    names, name = [label.name for label in predictor.classes], predictor.name
    if is_default:
        output.note(
            f"using {name} ({len(names)} classes: {', '.join(names[:12])}"
            f"{', ...' if len(names) > 12 else ''}); choose another with --model, such as "
            "vit-b16-i21k"
        )
    else:
        note_missing_names(predictor)


def _image_rows(
    predictor: Predictor, job: Predict, is_split: bool
) -> Generator[ImageRow, None, None]:
    """Yield a row per image: its classes, or where its features were written.

    Raises:
        DataError: the only argument of a split command cannot be read completely.
    """
    images, score, batching = job.images, predictor.info.score, (job.batch_size, job.workers)

    def check(results: Iterable[Result]) -> Iterator[Result]:
        for result in results:
            if is_split and result.error and result.file == public_name(images[0]):
                raise DataError(result.error.what, where=result.file, hint=result.error.hint)
            yield result

    if job.features is None:
        results = predictor.predict(images, job.top_k, job.threshold, *batching)
        yield from (ImageRow(result, score) for result in check(results))
        return
    width, count = predictor.info.model.feature_dim, 0
    with row_file(job.features, width, {"model": predictor.name}) as add:
        for count, result in enumerate(check(predictor.embed(images, *batching)), 1):
            add(result.file, result.features)
            yield ImageRow(result, score, count - 1)
    if not is_split:
        output.note(f"features: {job.features}, {count:,} x {width:,}")


def _write_rows(rows: Iterable[ImageRow], writer: RowWriter, meter: progress.Meter) -> int:
    """Write rows as they arrive; return the number of images that could not be read."""
    failed = 0
    for row in rows:
        if error := row.result.error:
            failed += 1
            output.error(f"{public_url(row.result.file)}: {error.what}", error.hint)
        writer.write(row)
        meter.advance()
    return failed


def _count_images(meter: progress.Meter, images: list[str]) -> None:
    """Count the images in the background, if that does not require reading them."""
    if all(map(is_countable, images)):
        with contextlib.suppress(OSError):
            meter.total = sum(1 for _ in find_images(images, offline=True))


@dataclass(frozen=True)
class ImageRow:
    """The result for an image: its classes, or the row of its features."""

    result: Result
    score: Score
    feature_row: int | None = None
    """Index of its row in the features file."""

    def to_json(self) -> dict[str, Any]:
        result = self.result
        if result.error is not None:
            return {"file": result.file, "error": result.error.what}
        row: dict[str, Any] = {"file": result.file, "model": result.model}
        if self.feature_row is not None:
            return row | {"row": self.feature_row}
        return row | {"predictions": [dataclasses.asdict(p) for p in result.predictions]}

    def records(self) -> list[dict[str, Any]]:
        """Return a row per class, or a single row if there are none or an error."""
        file, error = self.result.file, self.result.error.what if self.result.error else None
        if self.feature_row is not None:
            return [{"file": file, "row": self.feature_row, "error": error}]
        predictions = [dataclasses.asdict(p) for p in self.result.predictions]
        empty = dict.fromkeys(("index", "id", "label", "score"))
        return [
            {"file": file, "rank": rank if predictions else None, **cells, "error": error}
            for rank, cells in enumerate(predictions or [empty], 1)
        ]

    def text(self, terminal: bool) -> str | None:
        """Format as bars on a terminal, one line elsewhere."""
        result, spec = self.result, "{:.4g}" if self.score == "none" else "{:.1%}"
        if result.error is not None or self.feature_row is not None:
            return None
        file, empty = output.printable(result.file), "no class above the threshold"
        entries = [(output.printable(p.label), spec.format(p.score)) for p in result.predictions]
        if not terminal:
            return f"{file}: {'; '.join(map(' '.join, entries)) or empty}"
        from rich.cells import cell_len, set_cell_size

        lines = [output.style(file, "1")]
        width = max((cell_len(label) for label, _ in entries), default=0)
        encoded = "█".encode(sys.stdout.encoding or "utf-8", "replace")
        block = "#" if encoded == b"?" else "█"
        for (label, score), p in zip(entries, result.predictions, strict=True):
            bar = "" if self.score == "none" else block * round(BAR_WIDTH * p.score)
            name = set_cell_size(label, width)
            lines.append(f"  {name}  {score:>6}  {output.style(bar, '32')}".rstrip())
        return "\n".join(lines if entries else [*lines, f"  {empty}"])
