"""`vit evaluate`."""

from __future__ import annotations

import functools
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from vitcli.cli import evaluation, output
from vitcli.cli.launch import on_devices
from vitcli.cli.options import CLASSES, INPUT, Adapting, open_predictor, parse_figure, spare
from vitcli.cli.parameters import command
from vitcli.cli.rows import FORMATS, Csv, open_rows
from vitcli.config import DATA_KINDS, DataConfig, Size, hub_or_path
from vitcli.fields import option, parse_size

if TYPE_CHECKING:
    from vitcli.evaluate import Answer, Report


@dataclass(frozen=True, kw_only=True)
class Evaluate(Adapting):
    """Options of `vit evaluate`."""

    data: list[str] = option(..., "--data PATH", f"Labelled images: {DATA_KINDS}; repeatable.")
    split: Literal["auto", "train", "val", "test"] = option(
        "auto",
        "--split",
        "Split to evaluate on; auto: the test split if there is one, else the validation split, "
        "else all images. On the data that the model was trained on, the validation split is what "
        "its run held out.",
    )
    classes: str | None = option(None, "--classes FILE", CLASSES)
    real_labels: bool = option(
        False,
        "--real-labels",
        "Also score against ReaL labels, which allow several correct classes; for ImageNet "
        "validation images under their original file names.",
    )
    labels: str = option("original", "--labels original|real|FILE.json", "")
    """real: as `real_labels`; FILE.json: such labels of one's own, 50,000 lists of classes."""
    mapping: str | None = option(
        None,
        "--mapping FILE",
        "File with a line per class of the dataset: the class, a tab, and the model's class (ids "
        "or names; - leaves its images out). If a class has several lines, any of those answers is "
        "correct.",
    )
    among: Literal["auto", "model", "data", "imagenet-1k"] = option(
        "auto",
        "--among",
        "Classes that the model may predict: all of its own, those of the dataset, or those of "
        "ImageNet-1k; auto is imagenet-1k for an ImageNet-21k model on ImageNet-1k data, else "
        "model.",
    )
    skip_unknown: bool = option(
        False, "--skip-unknown", "Leave out images of classes that the model does not have."
    )
    predictions: str | None = option(
        None,
        "--predictions FILE",
        "Write the predictions for each image to FILE; the suffix selects the format: "
        f"{', '.join(FORMATS)}.",
    )
    plot: str | None = option(
        None,
        "--plot FILE",
        "Plot the confusion matrix (.png, .pdf or .svg); with several resolutions, accuracy "
        "against resolution.",
        parse=parse_figure,
    )
    reliability: str | None = option(
        None,
        "--reliability FILE",
        "Plot accuracy against confidence (.png, .pdf or .svg).",
        parse=parse_figure,
    )
    resolution: tuple[Size, ...] = option(
        (),
        "--resolution --resolutions N|HxW,...",
        "Input sizes in pixels, each evaluated in turn; position embeddings are resized to match.  "
        "[default: the model's]",
        INPUT,
        parse=lambda text: tuple(map(parse_size, text.split(","))),
    )


@command(Evaluate)
@on_devices("predictions", "plot", "reliability")
def evaluate(args: Evaluate) -> None:
    """Evaluate a model on labelled images: accuracy, macro F1, calibration, metrics per class.

    Matches the dataset's classes to the model's by id, then by unique name. Reports and leaves out
    images that cannot be read, and exits with 1 if there are any. For several datasets or
    resolutions, prints a table with a row for each.

    \b
    Examples:
      vit evaluate --data photos --model runs/photos
      vit evaluate --data imagenet/val --model vit-b16-i21k --real-labels
      vit evaluate --data photos --resolution 192,224,256 --plot accuracy.png
    """
    data, sizes = [hub_or_path(path) for path in args.data], args.resolution or (None,)
    one = len(data) * len(sizes) == 1
    if args.plot and not one and len(sizes) == 1:
        raise typer.BadParameter("a confusion matrix needs one --data", param_hint="--plot")
    if args.reliability and not one:
        raise typer.BadParameter("needs one --data and one resolution", param_hint="--reliability")
    if args.predictions and len(sizes) > 1:
        raise typer.BadParameter("needs one resolution", param_hint="--predictions")
    spare((*data, args.classes, args.mapping, args.labels), args.predictions, "--predictions")
    for path in (args.plot, args.reliability):
        output.check_writable(path)
    from vitcli import evaluate as library
    from vitcli.data.alignment import MatchRules, read_mapping
    from vitcli.imagenet import read_accepted

    mapping = read_mapping(Path(args.mapping)) if args.mapping else {}
    labels = "real" if args.real_labels else args.labels
    accepted = None if labels == "original" else read_accepted(None if labels == "real" else labels)
    measure = partial(
        library.evaluate,
        split=args.split,
        batch_size=args.batch_size,
        workers=args.workers,
        rules=MatchRules(mapping, args.among, args.skip_unknown),
        accepted=accepted,
        report=functools.cache(output.note),
    )
    # Every resolution finds the same problems with the data; each is printed once.
    warn, complain = functools.cache(output.warning), functools.cache(output.error)
    reports: list[Report] = []
    file = args.predictions
    with open_rows(file, Csv, "--predictions") if file else nullcontext() as rows:

        def write(path: str, answer: Answer) -> None:
            if rows is not None:
                rows.write(evaluation.PredictionRow(path, answer))

        # All before the first image, so that an impossible size fails at once.
        predictors = deque(open_predictor(args, size) for size in sizes)
        stored = predictors[0].stored.image_size
        while predictors:
            predictor = predictors.popleft()  # frees its weights before the next are loaded
            size = f" at {evaluation.size_text(predictor.info.model.image_size)}" * (len(sizes) > 1)
            for path in data:
                with output.Meter(f"images{size}") as meter:
                    report = measure(
                        predictor,
                        DataConfig(path, classes=args.classes).reachable(args.offline),
                        on_answer=partial(write, path),
                        on_progress=meter.reach,
                    )
                for warning in report.warnings:
                    warn(warning)
                for name, error in report.errors:
                    complain(f"{name}: {error.what}")
                if args.json:
                    output.json_line(evaluation.as_object(report))
                reports.append(report)
    reports.sort(key=lambda report: data.index(report.data))
    if not args.json and one:
        evaluation.show(reports[0])
    elif not args.json:
        evaluation.summarise(reports, stored, args.posemb_method)
    evaluation.draw(reports, stored, args.plot, args.reliability)
    if unreadable := {name for report in reports for name, _ in report.errors}:
        output.note(f"unreadable images, not counted: {len(unreadable):,}", always=True)
        raise typer.Exit(1)
