"""`vit inspect`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vitcli.atomic import make_directory
from vitcli.checkpoints.info import unique_names
from vitcli.cli import output, progress
from vitcli.cli.options import (
    ModelOptions,
    check_overwrite,
    ending,
    model_files,
    note_missing_names,
    open_predictor,
)
from vitcli.cli.parameters import UsageError, command
from vitcli.cli.parts import result_name
from vitcli.config import MapMethod, View
from vitcli.errors import OutputError
from vitcli.fields import Requirement, option, parse_directory
from vitcli.words import pluralize, public_url

if TYPE_CHECKING:
    from vitcli.figures.attention_plots import Panel
    from vitcli.inspection.inspector import ImageInspection, Inspector


def _shows(*views: View) -> Callable[[Any], bool]:
    """Whether the command shows images in one of the views."""
    return lambda args: bool(args.images) and (args.view or "attention") in views


ATTENTION = Requirement("requires images and --view attention", _shows("attention"))
MAX_STEM_BYTES = 200
"""Maximum bytes of an image's stem in a figure's file name, which may have 255."""


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelOptions):
    """Options of `vit inspect`."""

    images: list[str] = option(
        [], "IMAGES", "Images, given as for `vit predict`. Without images, the weights are shown."
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
        "inspection", "--output -o DIR", "Directory to write the figures to.", parse=parse_directory
    )
    method: MapMethod = option(
        "rollout",
        "--method",
        "How to compute the map. rollout: attention multiplied through the blocks; block: the "
        "attention of one block; gradient: attention weighted by the gradient of a class.",
        requires=ATTENTION,
    )
    layer: int | None = option(
        None,
        "--layer N",
        "Block to show, counted from 0; with rollout or gradient, the last block to include.  "
        "[default: the last]",
        requires=Requirement(
            "requires images and --view attention or heads", _shows("attention", "heads")
        ),
    )
    head: int | None = option(
        None,
        "--head N",
        "Head to show, counted from 0, for --method block.  [default: the mean of all]",
        requires=Requirement("requires --method block", lambda args: args.method == "block"),
    )
    label: str | None = option(
        None,
        "--class CLASS",
        "Class to explain with --method gradient, and to score with --faithfulness: id, name or "
        "index.  [default: the predicted class]",
        requires=Requirement(
            "requires --method gradient or --faithfulness",
            lambda args: args.method == "gradient" or args.faithfulness,
        ),
    )
    faithfulness: bool = option(
        False,
        "--faithfulness",
        "Test each map by deletion and insertion: the score of the class as patches are removed "
        "or revealed in the map's order, compared with random maps.",
        requires=ATTENTION,
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
    if view is not None and (view in ("filters", "posemb")) == bool(images):
        problem = "shows the weights and takes no images" if images else "requires images"
        raise UsageError(f"--view {view} {problem}")
    from vitcli.figures import attention_plots
    from vitcli.inspection.inspector import Inspector

    with attention_plots.background(args.dark):
        check_overwrite(model_files(args.model), args.arrays, "'--arrays'")
        output.check_writable(args.arrays)
        output.check_writable(os.path.join(args.output, "figure.png"), parents=True)
        predictor = open_predictor(args, args.resolution)
        inspector = Inspector(predictor)
        if images:
            note_missing_names(predictor)
        writer = _FigureWriter(inspector, args)
        if not images:
            has_posemb = inspector.model.config.posemb not in ("none", "relative")
            default_views = ["filters", "posemb"] if has_posemb else ["filters"]
            writer.draw_weights([view] if view else default_views)
        elif view == "distance":
            writer.draw_distance(inspector.distances(images))
        elif view == "pca":
            writer.draw_images("pca", inspector.pca(images))
        elif view == "heads":
            writer.draw_images("heads", inspector.heads(images, args.layer))
        else:
            arguments = (args.method, args.layer, args.head, args.label, args.faithfulness)
            writer.draw_images("attention", inspector.attend(images, *arguments))
        if args.arrays and writer.arrays:
            writer.save_arrays(args.arrays)
    if writer.failed:
        raise typer.Exit(1)


class _FigureWriter:
    """Draws the views and reports the files written."""

    def __init__(self, inspector: Inspector, args: Inspect) -> None:
        self.inspector, self.args, self.directory = inspector, args, Path(args.output)
        self.labels = unique_names(inspector.classes)
        self.failed = 0
        self.arrays: dict[str, Any] = {}
        self.inputs = {os.path.realpath(name) for name in args.images}
        self.outputs = set[Path]()

    def figure_path(self, name: str) -> Path:
        """Return the path of a figure, whose directory is created. Raises OutputError if it would
        overwrite an image."""
        make_directory(self.directory)
        path, directories = self.directory / name, tuple(root + os.sep for root in self.inputs)
        real_path = os.path.realpath(path)
        inside = real_path.startswith(directories) and path.exists() and path not in self.outputs
        if real_path in self.inputs or inside:
            raise OutputError("is one of the images", where=path, hint="choose another --output")
        self.outputs.add(path)
        return path

    def report(self, text: str, outputs: Iterable[Path], **values: Any) -> None:
        """Print one result as a line of text or a JSON object."""
        paths = [str(path) for path in outputs]
        if self.args.json:
            output.json_line({"model": self.inspector.name, **values, "outputs": paths})
        else:
            output.line(f"{text}; {', '.join(paths)}")

    def readable(self, results: Iterable[ImageInspection]) -> Iterator[ImageInspection]:
        """Yield the results of readable images; report the others."""
        with progress.Meter("images") as meter:
            for result in results:
                meter.advance()
                self.inputs.add(os.path.realpath(result.file))
                if result.error is None:
                    yield result
                    continue
                self.failed += 1
                output.error(f"{public_url(result.file)}: {result.error.what}")
                if self.args.json:
                    output.json_line({"file": result.file, "error": result.error.what})

    def draw_weights(self, views: list[str]) -> None:
        """Draw the figures of the weights."""
        from vitcli.figures import attention_plots, plots
        from vitcli.inspection import components

        model = self.inspector.model
        for view in views:
            path = self.figure_path(f"{view}.png")
            if view == "filters":
                self.arrays[view] = components.filter_components(model)
                attention_plots.filter_tiles(self.arrays[view], path)
            else:
                self.arrays[view] = components.posemb_similarity(model)
                title = "position embeddings, {} x {}".format(*model.config.grid)
                plots.position_similarity([(title, self.arrays[view])], path)
            self.inspector.check_finite(float(self.arrays[view].sum()))
            self.report(view, [path], view=view)

    def draw_distance(self, results: Iterable[ImageInspection]) -> None:
        """Write a figure and a CSV file of attention distances over all images."""
        import numpy as np

        from vitcli.atomic import write_text
        from vitcli.figures import attention_plots

        arrays: list[Any] = [result.array for result in self.readable(results)]
        if not arrays:
            return
        figure, csv_path = self.figure_path("distance.png"), self.directory / "distance.csv"
        mean = np.mean(arrays, axis=0)
        distances, images = mean.tolist(), len(arrays)
        lines = [f"{i},{j},{x}" for i, row in enumerate(distances) for j, x in enumerate(row)]
        attention_plots.distance_by_depth(mean, figure)
        write_text(csv_path, "\n".join(["layer,head,pixels", *lines, ""]))
        self.arrays["distance"] = mean
        text = f"mean attention distance over {pluralize(images, 'image')}"
        self.report(text, [figure, csv_path], view="distance", images=images, distances=distances)

    def draw_images(self, view: str, results: Iterable[ImageInspection]) -> None:
        """Draw the figures of each image, and a contact sheet if there are several."""
        import numpy as np

        from vitcli.figures import attention_plots

        panels: list[Panel] = []
        arrays: dict[str, tuple[str, Any]] = {}  # by figure name
        quantity = "relevance" if self.args.method == "gradient" else "attention"
        for result in self.readable(results):
            assert result.image is not None and result.array is not None
            stem = result_name(result.file) or "image"
            while len(os.fsencode(stem)) > MAX_STEM_BYTES:
                stem = stem[:-1]
            names = (f"{stem}-{number}" if number > 1 else stem for number in count(1))
            name = next(name for name in names if name not in arrays)
            arrays[name] = result.file, result.array
            path = self.figure_path(f"{name}-{view}.png")
            prediction = ""
            values: dict[str, Any] = {"file": result.file, "view": view}
            if result.label is not None and result.index is not None:
                label = self.labels[result.index]
                score_format = "{:.4g}" if self.inspector.info.score == "none" else "{:.1%}"
                prediction = f": {label} {score_format.format(result.score)}"
                class_fields = {"index": result.index, "id": result.label.id, "label": label}
                values["class"] = {**class_fields, "score": result.score}
            title = Path(result.file).name + prediction
            panel = attention_plots.Panel(title, result.image, result.array)
            if view == "heads":
                attention_plots.head_grid(*panel[1:], panel.title, path)
            else:
                attention_plots.side_by_side(panel, quantity, path)
                if len(panels) < attention_plots.MAX_SHEET_IMAGES:
                    panels.append(panel.smaller())
            text, outputs = result.file + prediction, [path]
            if result.faithfulness is not None and result.random is not None:
                outputs.append(self.figure_path(f"{name}-faithfulness.png"))
                map_curves, random_curves = result.faithfulness, result.random
                attention_plots.faithfulness_curves(
                    (map_curves.deletion, random_curves.deletion),
                    (map_curves.insertion, random_curves.insertion),
                    title,
                    outputs[1],
                )
                areas = {"map": map_curves.areas(), "random": random_curves.areas()}
                values["faithfulness"] = areas
                scores = (
                    f"{key} {area:.3f} (random {areas['random'][key]:.3f})"
                    for key, area in areas["map"].items()
                )
                text += f"; {', '.join(scores)}"
            self.report(text, outputs, **values)
        if len(panels) > 1:
            sheet = self.figure_path(f"{view}.png")
            attention_plots.contact_sheet(panels, sheet)
            output.note(f"contact sheet: {sheet}")
        if arrays:
            files, stacked = zip(*arrays.values(), strict=True)
            self.arrays |= {view: np.stack(stacked), "files": np.array(files)}

    def save_arrays(self, path: str) -> None:
        """Write the arrays of all figures."""
        import numpy as np

        from vitcli.atomic import atomic_write

        with atomic_write(path) as file:
            np.savez(file, **self.arrays)
        output.note(f"arrays: {path}")
