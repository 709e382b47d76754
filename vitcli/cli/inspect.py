"""`vit inspect`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from vitcli.atomic import made_directory
from vitcli.checkpoints.info import unique_names
from vitcli.cli import output
from vitcli.cli.options import (
    ModelOptions,
    check_overwrite,
    ending,
    model_files,
    note_assumptions,
    note_missing_names,
    open_predictor,
)
from vitcli.cli.parameters import UsageError, command
from vitcli.errors import OutputError
from vitcli.fields import option, parse_directory
from vitcli.words import pluralize

if TYPE_CHECKING:
    from vitcli.attention_plots import Panel
    from vitcli.errors import DataError
    from vitcli.inspection.inspector import ImageInspection, Inspector

View = Literal["attention", "heads", "pca", "distance", "filters", "posemb"]
USED_BY: dict[str, tuple[View, ...]] = {
    "method": ("attention",),
    "layer": ("attention", "heads"),
    "head": ("attention",),
    "label": ("attention",),
    "faithfulness": ("attention",),
}
"""Options that apply only to these views."""


LONGEST = 200
"""Maximum bytes of an image's stem in a figure's file name, which may have 255."""


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelOptions):
    """Options of `vit inspect`."""

    images: list[str] = option(
        [],
        "IMAGES",
        "Files, directories, glob patterns, URLs or @list.txt, as for `vit predict`. Without "
        "images, the weights are shown.",
    )
    view: View | None = option(
        None,
        "--view",
        "What to show. attention: a map over each image; heads: every head of one block; pca: "
        "patch features as colors; distance: mean attention distance by block; filters, posemb: "
        "patch filters and position embeddings, without images.  [default: attention; without "
        "images: filters and posemb]",
    )
    output: str = option(
        "inspection",
        "--output -o DIR",
        "Directory to write the figures to.",
        parse=parse_directory,
    )
    method: Literal["rollout", "block", "gradient"] = option(
        "rollout",
        "--method",
        "How to compute the map. rollout: attention multiplied through the blocks; block: the "
        "attention of one block; gradient: attention weighted by the gradient of a class.",
    )
    layer: int | None = option(
        None,
        "--layer N",
        "Block to show, counted from 0; with rollout or gradient, the last block to include.  "
        "[default: the last]",
    )
    head: int | None = option(
        None,
        "--head N",
        "Head to show, counted from 0, for --method block.  [default: the mean of all]",
    )
    label: str | None = option(
        None,
        "--class CLASS",
        "Class to explain with --method gradient, and to score with --faithfulness: id, name or "
        "index.  [default: the predicted class]",
    )
    faithfulness: bool = option(
        False,
        "--faithfulness",
        "Test each map by deletion and insertion: the score of the class as patches are removed "
        "or revealed in the map's order, compared with random maps.",
    )
    arrays: str | None = option(
        None, "--arrays FILE.npz", "Also save the arrays behind the figures.", parse=ending(".npz")
    )
    dark: bool = option(False, "--dark", "Draw on a dark background.")


@command(Inspect)
def inspect(args: Inspect) -> None:
    """Show what a Vision Transformer attends to, and what its weights look like.

    Writes one figure per image to a directory, and a contact sheet if there are several images.

    \b
    Examples:
      vit inspect cat.jpg
      vit inspect photos --method gradient --class cat --faithfulness
      vit inspect photos --view distance --model vit-b16-i21k
    """
    images, view = args.images, args.view
    weights_only = view in ("filters", "posemb") or (view is None and not images)
    if weights_only and images:
        raise UsageError(f"--view {view} shows the weights and takes no images")
    if not weights_only and not images:
        raise UsageError(f"--view {view} requires images")
    for field in dataclasses.fields(args):
        views = USED_BY.get(field.name, ())
        given = views and getattr(args, field.name) != field.default
        if given and (weights_only or (view or "attention") not in views):
            needed = "images" if view is None else f"--view {' or '.join(views)}"
            raise UsageError(f"{field.metadata['option'].names[0]} requires {needed}")
    if args.head is not None and args.method != "block":
        raise UsageError(
            f"--head cannot be used with --method {args.method}, which averages over heads\n"
            "hint: use --method block"
        )
    if args.label is not None and args.method != "gradient" and not args.faithfulness:
        raise UsageError("--class requires --method gradient or --faithfulness")
    from vitcli import attention_plots
    from vitcli.inspection.inspector import Inspector

    with made_directory(args.output), attention_plots.background(args.dark):
        check_overwrite(model_files(args.model), args.arrays, "'--arrays'")
        output.check_writable(args.arrays)
        predictor = open_predictor(args, args.resolution)
        inspector = Inspector(predictor)
        note_assumptions(predictor)
        if images:
            note_missing_names(predictor)
        show = _FigureWriter(inspector, args)
        if weights_only:
            added = inspector.model.config.posemb not in ("none", "relative")
            drawn = ["filters", "posemb"] if added else ["filters"]
            show.weights([view] if view else drawn)
        elif view == "distance":
            show.distance()
        elif view == "pca":
            show.images("pca", inspector.pca(images))
        elif view == "heads":
            show.images("heads", inspector.heads(images, args.layer))
        else:
            how = (args.method, args.layer, args.head, args.label, args.faithfulness)
            show.images("attention", inspector.attend(images, *how))
        if args.arrays:
            show.save(args.arrays)
    if show.failed:
        raise typer.Exit(1)


class _FigureWriter:
    """Draws the views and reports the files written."""

    def __init__(self, inspector: Inspector, args: Inspect) -> None:
        self.inspector, self.args, self.directory = inspector, args, Path(args.output)
        self.labels = unique_names(inspector.classes)
        self.failed = 0
        self.arrays: dict[str, Any] = {}
        self.read = {os.path.realpath(name) for name in args.images}
        self.written = set[Path]()

    def figure_path(self, name: str) -> Path:
        """Return the path of a figure. Raises OutputError if it would overwrite an image."""
        path, directories = self.directory / name, tuple(root + os.sep for root in self.read)
        there = os.path.realpath(path)
        inside = there.startswith(directories) and path.exists() and path not in self.written
        if there in self.read or inside:
            raise OutputError("is one of the images", where=path, hint="choose another --output")
        self.written.add(path)
        return path

    def report(self, text: str, outputs: Iterable[Path], **values: Any) -> None:
        """Print one result as a line of text or a JSON object."""
        written = [str(path) for path in outputs]
        if self.args.json:
            output.json_line({"model": self.inspector.name, **values, "outputs": written})
        else:
            output.line(output.printable(f"{text}; {', '.join(written)}"))

    def complain(self, one: ImageInspection, error: DataError) -> None:
        """Report an image that could not be read."""
        self.failed += 1
        output.error(f"{output.printable(one.file)}: {error.what}")
        if self.args.json:
            output.json_line({"file": one.file, "error": error.what})

    def weights(self, views: list[str]) -> None:
        """Draw the figures of the weights."""
        from vitcli import attention_plots, plots
        from vitcli.inspection import components

        model = self.inspector.model
        for view in views:
            path = self.directory / f"{view}.png"
            if view == "filters":
                self.arrays[view] = components.filter_components(model)
                attention_plots.filter_tiles(self.arrays[view], path)
            else:
                self.arrays[view] = components.posemb_similarity(model)
                title = "position embeddings, {} x {}".format(*model.config.grid)
                plots.position_similarity([(title, self.arrays[view])], path)
            self.report(view, [path], view=view)

    def distance(self) -> None:
        """Write a figure and a CSV file of attention distances over all images."""
        from vitcli import attention_plots
        from vitcli.atomic import write_text

        with output.Meter("images") as meter:
            found = self.inspector.distance(self.args.images, meter.advance)
        for one in found.images:
            self.read.add(os.path.realpath(one.file))
            if one.error is not None:
                self.complain(one, one.error)
        images = len(found.images) - self.failed
        if not images:
            return
        figure, table = self.figure_path("distance.png"), self.directory / "distance.csv"
        distances = found.array.tolist()
        cells = [f"{i},{j},{x}" for i, row in enumerate(distances) for j, x in enumerate(row)]
        attention_plots.distance_by_depth(found.array, figure)
        write_text(table, "\n".join(["layer,head,pixels", *cells, ""]))
        self.arrays["distance"] = found.array
        text = f"mean attention distance over {pluralize(images, 'image')}"
        self.report(text, [figure, table], view="distance", images=images, distances=distances)

    def images(self, view: str, found: Iterable[ImageInspection]) -> None:
        """Draw the figures of each image, and a contact sheet if there are several."""
        import numpy as np

        from vitcli import attention_plots

        panels: list[Panel] = []
        arrays: dict[str, tuple[str, Any]] = {}  # by figure name
        unit = "relevance" if self.args.method == "gradient" else "attention"
        with output.Meter("images") as meter:
            for one in found:
                meter.advance()
                if one.error is not None:
                    self.complain(one, one.error)
                    continue
                assert one.image is not None and one.array is not None
                stem = Path(one.file).stem or "image"
                while len(os.fsencode(stem)) > LONGEST:
                    stem = stem[:-1]
                names = (f"{stem}-{number}" if number > 1 else stem for number in count(1))
                name = next(name for name in names if name not in arrays)
                arrays[name] = one.file, one.array
                self.read.add(os.path.realpath(one.file))
                path = self.figure_path(f"{name}-{view}.png")
                answer = ""
                values: dict[str, Any] = {"file": one.file, "view": view}
                if one.label is not None and one.index is not None:
                    label = self.labels[one.index]
                    form = "{:.4g}" if self.inspector.info.score == "none" else "{:.1%}"
                    answer = f": {label} {form.format(one.score)}"
                    about = {"index": one.index, "id": one.label.id, "label": label}
                    values["class"] = {**about, "score": one.score}
                title = Path(one.file).name + answer
                panel = attention_plots.Panel(title, one.image, one.array)
                if view == "heads":
                    attention_plots.head_grid(*panel[1:], panel.title, path)
                else:
                    attention_plots.side_by_side(panel, unit, path)
                    if len(panels) < attention_plots.SHEET:
                        panels.append(panel.smaller())
                text, outputs = one.file + answer, [path]
                if one.faithfulness is not None and one.random is not None:
                    outputs.append(self.figure_path(f"{name}-faithfulness.png"))
                    own, noise = one.faithfulness, one.random
                    attention_plots.faithfulness_curves(
                        (own.deletion, noise.deletion),
                        (own.insertion, noise.insertion),
                        *(title, outputs[1]),
                    )
                    areas = {"map": own.areas(), "random": noise.areas()}
                    values["faithfulness"] = areas
                    parts = (
                        f"{key} {area:.3f} (random {areas['random'][key]:.3f})"
                        for key, area in areas["map"].items()
                    )
                    text += f"; {', '.join(parts)}"
                self.report(text, outputs, **values)
        if len(panels) > 1:
            sheet = self.figure_path(f"{view}.png")
            attention_plots.contact_sheet(panels, sheet)
            output.note(f"contact sheet: {sheet}")
        if arrays:
            files, stacked = zip(*arrays.values(), strict=True)
            self.arrays |= {view: np.stack(stacked), "files": np.array(files)}

    def save(self, path: str) -> None:
        """Write the arrays of all figures."""
        import numpy as np

        from vitcli.atomic import atomic_write

        with atomic_write(path) as file:
            np.savez(file, **self.arrays)
        output.note(f"arrays: {path}")
