"""Writing figures: a common style, fonts for many scripts, atomic writes.

Uses matplotlib without pyplot, so no window is opened. The suffix of the file (.png, .pdf, .svg)
determines its format.
"""

import contextlib
import io
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.rcsetup import cycler

from vitcli.atomic import atomic_write

BLUE, ORANGE, GRAY = "#0072b2", "#d55e00", "#555555"
COLORS = (BLUE, ORANGE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", GRAY)
"""A colorblind-safe palette (Okabe and Ito)."""
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "grid.color": "#808080",
    "grid.alpha": 0.2,  # faint on light and dark backgrounds
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "hatch.linewidth": 0.6,
    "savefig.bbox": "tight",  # labels beside axes of a fixed aspect ratio may not fit otherwise
    "savefig.pad_inches": 0.05,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a class may be named "$5 or $10"
}


FONTS = (
    "DejaVu Sans",  # matplotlib's own: Latin and many other scripts
    "Noto Sans CJK SC",  # Linux
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Emoji",
    "Hiragino Sans",  # macOS
    "PingFang SC",
    "Apple SD Gothic Neo",
    "Arial Unicode MS",
    "Yu Gothic",  # Windows
    "Microsoft YaHei",
    "Malgun Gothic",
    "Nirmala UI",
    "Segoe UI Emoji",
)
"""Font families; each character is drawn in the first that is installed and has it."""


@contextlib.contextmanager
def figure_file(
    path: str | Path, width: float, height: float, grid: bool = True
) -> Iterator[Figure]:
    """Context manager that creates a figure (size in inches) in the common style and writes it
    atomically on exit. Characters that no font of `FONTS` covers are drawn as boxes.

    Raises:
        OutputError: the file cannot be written.
    """
    suffix = Path(path).suffix.lower().removeprefix(".") or "png"
    # Omit date and version, so that the output is reproducible.
    stamps = {"png": ["Software"], "svg": ["Date", "Creator"], "pdf": ["CreationDate", "Producer"]}
    installed = {*fontManager.get_font_names()}  # others would be warned about
    fonts = [family for family in FONTS if family in installed]
    style: Any = {**STYLE, "axes.grid": grid, "font.family": fonts}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph \d+ |Matplotlib currently does not")
            figure.savefig(buffer, format=suffix, dpi=200, metadata=dict.fromkeys(stamps[suffix]))
    with atomic_write(Path(path)) as file:
        file.write(buffer.getvalue())


def one_line(text: str, max_length: int, tail: int = 0) -> str:
    """Truncate text to `max_length` characters, of which the last `tail` are its end, and replace
    unprintable ones by spaces."""
    line = "".join(c if c.isprintable() else " " for c in text)
    start = line[: max_length - 1 - tail]
    return line if len(line) <= max_length else f"{start}…{line[len(line) - tail :]}"


def short_names(names: Iterable[str]) -> list[str]:
    """Shorten names in the middle, as those of classes or paths may differ only at the end."""
    return [one_line(name, 24, tail=12) for name in names]
