"""Writing figures: a common style, fonts for any script, atomic writes.

Uses matplotlib without pyplot, so no window is opened. The suffix of the file (.png, .pdf, .svg)
determines its format.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager, get_font
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


@contextlib.contextmanager
def figure_file(
    path: str | Path, width: float, height: float, text: str = "", grid: bool = True
) -> Iterator[Figure]:
    """Context manager that creates a figure (size in inches) in the common style, with fonts that
    cover `text`, and writes it atomically on exit.

    Raises:
        OutputError: the file cannot be written.
    """
    suffix = Path(path).suffix.lower().removeprefix(".") or "png"
    # Omit date and version, so that the output is reproducible.
    stamps = {"png": ["Software"], "svg": ["Date", "Creator"], "pdf": ["CreationDate", "Producer"]}
    style: Any = {**STYLE, "axes.grid": grid, "font.family": _choose_fonts(text)[0]}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
            figure.savefig(buffer, format=suffix, dpi=200, metadata=dict.fromkeys(stamps[suffix]))
    with atomic_write(Path(path)) as file:
        file.write(buffer.getvalue())


def _choose_fonts(text: str) -> tuple[list[str], set[str]]:
    """Return font families that cover `text`, matplotlib's own before other installed fonts, and
    the characters that no font covers."""
    families, missing = ["DejaVu Sans"], {c for c in text if c.isprintable()}
    fonts = sorted(fontManager.ttflist, key=lambda font: font.name != families[0])
    for font in fonts:
        if not missing:
            break
        if font.style != "normal" or "Last" in font.name:  # Last Resort has only placeholders
            continue
        with contextlib.suppress(OSError, RuntimeError):
            covered = {c for c in missing if ord(c) in get_font(font.fname).get_charmap()}
            missing -= covered
            families += [font.name] * bool(covered and font.name not in families)
    return families, missing


def one_line(text: str, max_length: int, tail: int = 0) -> str:
    """Truncate text to `max_length` characters, of which the last `tail` are its end, and replace
    unprintable ones by spaces."""
    line = "".join(c if c.isprintable() else " " for c in text)
    start = line[: max_length - 1 - tail]
    return line if len(line) <= max_length else f"{start}…{line[len(line) - tail :]}"


def drawable(names: Sequence[str], path: str | Path) -> list[str]:
    """Names as they can be drawn: shortened in the middle, as those of classes or paths may differ
    only at the end; or "#3" if no font covers one."""
    lines = [one_line(name, 24, tail=12) for name in names]
    if str(path).lower().endswith(".svg"):
        return lines
    missing = _choose_fonts("".join(lines))[1]
    return [f"#{i}" if missing & set(line) else line for i, line in enumerate(lines)]
