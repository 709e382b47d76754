"""`vit evaluate`."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from vitcli.cli import output, progress
from vitcli.cli.evaluation_display import PredictionRow, as_object, draw, show, summarize
from vitcli.cli.launch import on_devices
from vitcli.cli.options import (
    INPUT,
    MODEL,
    PreprocessOptions,
    check_dataset_overwrite,
    check_overwrite,
    figure_option,
    model_files,
    open_predictor,
)
from vitcli.cli.parameters import UsageError, command
from vitcli.cli.rows import Csv, choose_writer, open_writer
from vitcli.config import CLASS_LIST, DATA, DATA_KINDS, DataConfig, Size, hub_or_path
from vitcli.fields import option, parse_output, parse_sizes
from vitcli.words import format_size, pluralize

if TYPE_CHECKING:
    from vitcli.evaluation.evaluate import LabeledPrediction, Report


@dataclass(frozen=True, kw_only=True)
class DataOption:
    """`--data`, listed before the options of the model."""

    data: list[str] = option(
        [], "--data PATH", f"Labeled images: {DATA_KINDS}; repeatable.  [required]", DATA
    )


@dataclass(frozen=True, kw_only=True)
class Evaluate(PreprocessOptions, DataOption):
    """Options of `vit evaluate`."""

    model: str = option("default", "--model -m NAME|PATH|REPO", MODEL, DATA)
    split: Literal["auto", "train", "val", "test"] = option(
        "auto",
        "--split",
        "Split to evaluate on; auto: the test split if there is one, else the validation split, "
        "else all images. If the model was trained on this data, the validation split is what its "
        "run held out.",
        DATA,
    )
    classes: str | None = option(None, "--classes FILE", CLASS_LIST)
    real_labels: bool = option(
        False,
        "--real-labels",
        "Also score against ReaL labels, which allow several correct classes per image; requires "
        "ImageNet validation images with their original file names.",
    )
    mapping: str | None = option(
        None,
        "--mapping FILE",
        "File with a line per class of the dataset: the class, a tab, and the model's class (ids "
        "or names; - skips the images). If a class has several lines, any of their model classes "
        "counts as correct.",
    )
    among: Literal["auto", "model", "data", "imagenet-1k"] = option(
        "auto",
        "--among",
        "Classes that the model may predict. model: all of its own; data: the dataset's; "
        "imagenet-1k: those of ImageNet-1k; auto: imagenet-1k for an ImageNet-21k model on "
        "ImageNet-1k data, else model.",
    )
    skip_unknown: bool = option(
        False, "--skip-unknown", "Skip images of classes that the model does not have."
    )
    predictions: str | None = option(
        None,
        "--predictions FILE",
        "Write the top 5 classes of each image to FILE, in the format given by its suffix: CSV for "
        ".csv or no suffix, JSON Lines for .json or .jsonl, Parquet for .parquet.",
        "Options",
        parse=parse_output,
    )
    plot: str | None = figure_option(
        "--plot FILE",
        "the confusion matrix or, with several resolutions, accuracy against resolution",
    )
    reliability: str | None = figure_option(
        "--reliability FILE", "a reliability diagram: accuracy against confidence"
    )
    resolution: tuple[Size, ...] = option(
        (),
        "--resolution --resolutions N|HxW,...",
        "Input sizes in pixels, each evaluated in turn; position embeddings are resized to match.  "
        "[default: the model's]",
        INPUT,
        parse=parse_sizes,
    )


@command(Evaluate)
@on_devices("predictions", "plot", "reliability")
def evaluate(args: Evaluate) -> None:
    """Evaluate a model on labeled images: accuracy, macro F1, calibration and per-class metrics.

    Matches the dataset's classes to the model's by id, then by name if it is unique. Images that
    cannot be read are reported and skipped, and the exit code is 1. For several datasets or
    resolutions, prints a table with a row for each.

    \b
    Examples:
      vit evaluate --data photos --model runs/photos
      vit evaluate --data imagenet/val --model vit-b16-i21k --real-labels
      vit evaluate --data photos --resolution 192,224,256 --plot accuracy.png
    """
    if not args.data:
        raise UsageError("--data is required")
    data, sizes = [hub_or_path(path) for path in args.data], args.resolution or (None,)
    is_single = len(data) * len(sizes) == 1
    _check_outputs(args, data, len(sizes))
    from vitcli.data.alignment import MatchRules, read_mapping
    from vitcli.evaluation import evaluate as library
    from vitcli.hub import registry

    configs = [DataConfig(path, classes=args.classes).reachable(args.offline) for path in data]
    mapping = read_mapping(Path(args.mapping)) if args.mapping else {}
    accepted = registry.real_labels() if args.real_labels else None
    rules = MatchRules(mapping, args.among, args.skip_unknown)
    report_error = functools.cache(output.error)  # once, not for every resolution
    reports: list[Report] = []
    file, closed_pipe = args.predictions, None
    writer_class = choose_writer(file, Csv, "'--predictions'")
    with open_writer(file, writer_class) if file else nullcontext() as writer:

        def write_row(data_path: str, prediction: LabeledPrediction) -> None:
            if writer is not None:
                writer.write(PredictionRow(data_path, prediction))

        # Open everything before the first image, so that an invalid size or dataset fails early.
        predictors = deque(open_predictor(args, size) for size in sizes)
        stored = predictors[0].stored_model.image_size
        arguments = (args.split, rules, accepted, functools.cache(output.note))
        datasets = [library.open_labeled(predictors[0], config, *arguments) for config in configs]
        while predictors:
            predictor = predictors.popleft()  # free its weights before loading the next
            size = f" at {format_size(predictor.info.model.image_size)}" * (len(sizes) > 1)
            for dataset in datasets:
                with progress.Meter(f"images{size}", len(dataset.source)) as meter:
                    report = library.evaluate(
                        predictor,
                        dataset,
                        args.batch_size,
                        args.workers,
                        on_prediction=partial(write_row, dataset.data),
                        on_progress=meter.advance,
                    )
                for error in report.errors:
                    report_error(error.message)
                if args.json and not is_single:
                    try:
                        output.json_line(as_object(report))
                    except BrokenPipeError as error:
                        closed_pipe = error
                        if not (file or args.plot):  # if files are wanted, they come first
                            raise
                reports.append(report)
    reports = [report for i in range(len(data)) for report in reports[i :: len(data)]]
    try:
        draw(reports, stored, args.plot, args.reliability)  # also if stdout is closed early
    finally:
        if is_single:
            output.json_line(as_object(reports[0])) if args.json else show(reports[0])
        elif not args.json:
            summarize(reports, stored, args.posemb_method)
    if file:
        output.note(f"predictions: {file}")
    if closed_pipe:
        raise closed_pipe
    if failed := len({error.where for report in reports for error in report.errors}):
        output.note(f"skipped {pluralize(failed, 'image')} that could not be read", always=True)
        raise typer.Exit(1)


def _check_outputs(args: Evaluate, data: Sequence[str], num_sizes: int) -> None:
    """Check the output options against the data and sizes. Raises BadParameter, OutputError."""
    if args.plot and len(data) > 1 and num_sizes == 1:
        raise UsageError("--plot requires a single --data for a confusion matrix")
    if args.reliability and len(data) * num_sizes > 1:
        raise UsageError("--reliability requires a single --data and a single resolution")
    if args.predictions and num_sizes > 1:
        raise UsageError("--predictions requires a single resolution")
    figures = [os.path.realpath(path) for path in (args.plot, args.reliability) if path]
    if len(figures) > len({*figures}):
        raise UsageError("--plot and --reliability must be different files")
    inputs = (*data, *model_files(args.model), args.classes, args.mapping)
    check_overwrite(inputs, args.predictions, "'--predictions'")
    for name, path in (("'--plot'", args.plot), ("'--reliability'", args.reliability)):
        check_dataset_overwrite(data, path, name)
        output.check_writable(path)
