"""`vit inspect`."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import typer

from vitcli.cli import output
from vitcli.cli.options import RESIZED, Computing
from vitcli.cli.parameters import command
from vitcli.config import Size
from vitcli.fields import option, parse_size

if TYPE_CHECKING:
    from vitcli.attention_plots import Panel
    from vitcli.inspection.inspector import Inspected, Inspector

View = Literal["attention", "heads", "pca", "distance", "filters", "posemb"]


def _parse_arrays(path: str) -> str:
    if not path.endswith(".npz"):
        raise ValueError(f"'{path}' does not end in .npz")
    return path


@dataclass(frozen=True, kw_only=True)
class Inspect(Computing):
    """Options of `vit inspect`."""

    images: list[str] = option(
        [],
        "IMAGES",
        "Files, directories, glob patterns, URLs or @list.txt, as for `vit predict`. Without "
        "images, the weights are shown.",
    )
    view: View | None = option(
        None,
        f"--view {'|'.join(get_args(View))}",
        "What to show. attention: a map over each image; heads: every head of one layer; pca: "
        "patch features as colours; distance: mean attention distance by layer; filters, posemb: "
        "patch filters and position embeddings, without images.  [default: attention; without "
        "images: filters and posemb]",
    )
    output: str = option("inspection", "--output -o DIR", "Directory to write the figures to.")
    method: Literal["rollout", "last", "gradient"] = option(
        "rollout",
        "--method",
        "How to compute the map. rollout: attention multiplied through the layers; last: attention "
        "of one layer; gradient: attention weighted by the gradient of a class.",
    )
    layer: int | None = option(
        None, "--layer N", "Layer to show, counted from 0.  [default: the last]"
    )
    head: int | None = option(
        None,
        "--head N",
        "Head to show, counted from 0, for --method last.  [default: the mean of all]",
    )
    label: str | None = option(
        None,
        "--class CLASS",
        "Class to explain: index, id or name.  [default: the predicted class]",
    )
    faithfulness: bool = option(
        False,
        "--faithfulness",
        "Measure how faithful each map is: the score of the class while patches are removed or "
        "revealed in the order of the map, compared with random maps.",
    )
    arrays: str | None = option(
        None, "--arrays FILE.npz", "Also save the arrays behind the figures.", parse=_parse_arrays
    )
    dark: bool = option(False, "--dark", "Draw on a dark background.")
    resolution: Size | None = option(None, "--resolution N|HxW", RESIZED, parse=parse_size)


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
        raise typer.BadParameter(f"--view {view} shows the weights and takes no images")
    if not weights_only and not images:
        raise typer.BadParameter(f"--view {view} needs images")
    directory = _make(Path(args.output))
    from vitcli.inspection.inspector import Inspector

    with output.FetchDisplay(args.quiet) as fetching:
        inspector = Inspector(
            args.model,
            resolution=args.resolution,
            device=args.device,
            offline=args.offline,
            on_progress=fetching,
            allow_pickle=args.allow_pickle,
        )
    show = _Show(inspector, directory, args.dark, args.json, args.quiet)
    if weights_only:
        show.weights([view] if view else ["filters", "posemb"])
    elif view == "distance":
        show.distance(images)
    elif view == "pca":
        show.images("pca", inspector.colours(images), "")
    elif view == "heads":
        show.images("heads", inspector.heads(images, args.layer), "attention")
    else:
        method = args.method
        found = inspector.attend(
            images, method, args.layer, args.head, args.label, args.faithfulness
        )
        show.images("attention", found, "relevance" if method == "gradient" else "attention")
    if args.arrays:
        show.save(args.arrays)
    if show.failed:
        raise typer.Exit(1)


def _make(directory: Path) -> Path:
    from vitcli.errors import OutputError

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be used as a directory: {error.strerror}"
        raise OutputError(what, where=directory) from error
    return directory


class _Show:
    """Draws views and prints what was written."""

    def __init__(
        self, inspector: Inspector, directory: Path, dark: bool, json: bool, quiet: bool
    ) -> None:
        self.inspector, self.directory = inspector, directory
        self.dark, self.json, self.quiet = dark, json, quiet
        self.failed = 0
        self.arrays: dict[str, Any] = {}

    def report(self, text: str, outputs: Iterable[Path], **values: Any) -> None:
        """One result: a line of text, or a JSON object."""
        written = [str(path) for path in outputs]
        if self.json:
            output.json_line({"model": self.inspector.name, **values, "outputs": written})
        else:
            output.line(f"{output.printable(text)}; {', '.join(written)}")

    def weights(self, views: list[str]) -> None:
        from vitcli import attention_plots, plots
        from vitcli.inspection import components

        for view in views:
            path = self.directory / f"{view}.png"
            if view == "filters":
                self.arrays[view] = components.filter_components(self.inspector.model)
                attention_plots.filter_tiles(self.arrays[view], path, self.dark)
            else:
                self.arrays[view] = components.posemb_similarity(self.inspector.model)
                rows, columns = self.inspector.model.config.grid
                title = f"position embeddings, {rows} x {columns}"
                with attention_plots.background(self.dark):
                    plots.position_similarity([(title, self.arrays[view])], path)
            self.report(view, [path], view=view)

    def distance(self, images: list[str]) -> None:
        from vitcli import attention_plots
        from vitcli.atomic import write_text

        with output.Meter("images", quiet=self.quiet) as meter:
            found = self.inspector.distance(images, meter.advance)
        for one in found.errors:
            self.complain(one)
        if not found.images:
            return
        pixels = found.pixels
        attention_plots.distance_by_depth(pixels, self.directory / "distance.png", self.dark)
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["layer", "head", "pixels"])
        writer.writerows(
            [i, j, float(x)] for i, row in enumerate(pixels) for j, x in enumerate(row)
        )
        write_text(self.directory / "distance.csv", table.getvalue())
        self.arrays["distance"] = pixels
        outputs = [self.directory / f"distance.{kind}" for kind in ("png", "csv")]
        text = f"mean attention distance over {found.images:,} images"
        values = {"images": found.images, "distances": pixels.tolist()}
        self.report(text, outputs, view="distance", **values)

    def images(self, view: str, found: Iterable[Inspected], unit: str) -> None:
        """Figures of each image, and a contact sheet of several."""
        import numpy as np

        from vitcli import attention_plots

        names = _names(self.directory)
        panels: list[Panel] = []
        files: list[str] = []
        arrays: list[Any] = []
        with output.Meter("images", quiet=self.quiet) as meter:
            for one in found:
                if one.seen is None or one.array is None:
                    self.complain(one)
                    meter.advance()
                    continue
                title = _title(one)
                path = names(one.file, view)
                panel = attention_plots.Panel(title, one.seen.image, one.array)
                if view == "heads":
                    attention_plots.head_grid(*panel[1:], title, path, self.dark)
                else:
                    attention_plots.side_by_side(panel, unit, path, self.dark)
                    if len(panels) < attention_plots.SHEET:
                        panels.append(panel.smaller())
                self.report(title, [path, *self.curves(one, title, path)], **_values(view, one))
                arrays.append(one.array)
                files.append(one.file)
                meter.advance()
        if len(panels) > 1:
            sheet = self.directory / f"{view}.png"
            attention_plots.contact_sheet(panels, sheet, self.dark)
            output.note(f"contact sheet: {sheet}", self.quiet)
        if arrays:
            self.arrays |= {view: np.stack(arrays), "files": np.array(files)}

    def curves(self, one: Inspected, title: str, path: Path) -> Iterator[Path]:
        """The curves of a map, where they were measured."""
        from vitcli import attention_plots

        if one.faithfulness is None or one.random is None:
            return
        curves = path.with_name(path.name.replace("-attention", "-faithfulness"))
        own, noise = one.faithfulness, one.random
        deletion, insertion = (own.deletion, noise.deletion), (own.insertion, noise.insertion)
        attention_plots.faithfulness_curves(deletion, insertion, title, curves, self.dark)
        output.note(
            f"{title}: deletion {own.deletion_area:.3f} (random {noise.deletion_area:.3f}), "
            f"insertion {own.insertion_area:.3f} (random {noise.insertion_area:.3f})",
            self.quiet or self.json,
        )
        yield curves

    def complain(self, one: Inspected) -> None:
        self.failed += 1
        assert one.error is not None
        output.error(f"{output.printable(one.file)}: {one.error.what}")
        if self.json:
            output.json_line({"file": one.file, "error": one.error.what})

    def save(self, path: str) -> None:
        import numpy as np

        from vitcli.atomic import whole_file

        with whole_file(path) as file:
            np.savez(file, **self.arrays)
        output.note(f"arrays: {path}", self.quiet)


def _title(one: Inspected) -> str:
    name = Path(one.file).name
    if one.label is None:
        return name
    return f"{name}: {one.label.name} {one.score:.1%}"


def _values(view: str, one: Inspected) -> dict[str, Any]:
    values: dict[str, Any] = {"file": one.file, "view": view}
    if one.label is not None:
        about = {"index": one.index, "id": one.label.id, "label": one.label.name}
        values["class"] = {**about, "score": one.score}
    if one.faithfulness is not None and one.random is not None:
        for name, curves in (("map", one.faithfulness), ("random", one.random)):
            areas = {"deletion": curves.deletion_area, "insertion": curves.insertion_area}
            values.setdefault("faithfulness", {})[name] = areas
    return values


def _names(directory: Path) -> Callable[[str, str], Path]:
    """Names of figures: that of the image, numbered where several have it."""
    used: set[str] = set()

    def name(file: str, view: str) -> Path:
        stem = Path(file).stem or "image"
        chosen, count = stem, 1
        while chosen in used:
            count += 1
            chosen = f"{stem}-{count}"
        used.add(chosen)
        return directory / f"{chosen}-{view}.png"

    return name
