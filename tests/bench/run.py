"""Speed of `vit` beside timm, transformers, scikit-learn and `cp`: `make bench`.

Whole processes are timed, from the command to its last line of output. The commands of a suite take
turns, so a machine that slows down slows them all; ratios are taken within a turn, and medians are
printed. The first turn is not counted: it warms the disk cache and compiles Python files.

With `--against DIR`, another checkout of vit takes turns too: the same commands, before and after.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUITES = ("start", "photo", "directory", "fewshot", "checkpoints", "train")


@dataclass(frozen=True)
class Suite:
    """Commands to compare, and how much of the fastest peer's time each of vit's may take."""

    title: str
    peers: dict[str, list[str]]
    ours: dict[str, list[str]]
    bars: tuple[float, ...]
    lines: int | None = None
    """Lines that each command has to print; None: any."""
    writes: Path | None = None
    """The directory that the commands write to: emptied before each run, the disk synced."""


def suites(python: str, peers: str, material: Path) -> dict[str, Suite]:
    """The suites that time whole processes, on files that `peer.py material` wrote."""
    vit, peer = [python, "-m", "vitcli"], [peers, str(HERE / "peer.py")]
    timm, transformers, photographs, ours, npz, out = (
        str(material / name)
        for name in ("timm-b16", "transformers-b16", "photographs", "vit-b16", "b16.npz", "output")
    )
    photo, tensors = f"{photographs}/000.jpg", f"{timm}/model.safetensors"
    predict = [*vit, "predict", "--model", timm, "--json"]
    return {
        "start": Suite(
            "Start-up",
            {"import torch": [python, "-c", "import torch"]},
            {
                "vit --help": [*vit, "--help"],
                "vit models": [*vit, "models"],
                "vit models show": [*vit, "models", "show", "vit-b16-i21k"],
            },
            bars=(0.25, 0.3, 0.3),
        ),
        "photo": Suite(
            "One photograph through a B/16",
            {
                "timm": [*peer, "timm", timm, photo],
                "transformers pipeline": [*peer, "transformers", transformers, photo],
            },
            {"vit predict": [*predict, photo]},
            bars=(0.5,),
            lines=1,
        ),
        "directory": Suite(
            "199 photographs through a B/16",
            {
                "timm, float32": [*peer, "timm", timm, photographs],
                "timm, bfloat16": [*peer, "timm", timm, photographs, "bfloat16"],
                "transformers pipeline, bfloat16": [
                    *(*peer, "transformers", transformers, photographs, "bfloat16")
                ],
            },
            {"vit predict": [*predict, photographs]},
            bars=(0.6,),
            lines=199,
        ),
        "checkpoints": Suite(
            "A B/16 (346 MB) through the disk",
            {
                "cp and sync": ["sh", "-c", 'cp "$0" "$1" && sync "$1"', tensors, f"{out}/x"],
                "safetensors, loaded and saved": [*peer, "safetensors-copy", timm, out],
                "timm, loaded at 384 px and saved": [*peer, "timm-resize", timm, out],
            },
            {
                "vit resize-posemb": [
                    *(*vit, "resize-posemb", tensors, "--grid", "24"),
                    *("-o", f"{out}/x.safetensors"),
                ],
                "vit convert, timm's to ours": [*vit, "convert", timm, f"{out}/x"],
                "vit convert, ours to timm's": [*vit, "convert", ours, f"{out}/x", "--to", "timm"],
                "vit convert, npz to ours": [*vit, "convert", npz, f"{out}/x.safetensors"],
            },
            bars=(3, 3, 3, 5),
            writes=Path(out),
        ),
    }


def run(command: list[str], checkout: Path = ROOT, **options: bool) -> subprocess.CompletedProcess:
    """Runs a command with a checkout's code and no network."""
    paths = [str(checkout), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    found = os.pathsep.join(path for path in paths if path)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": found}
    return subprocess.run(command, text=True, cwd=checkout, env=environment, **options)


def seconds(command: list[str], checkout: Path = ROOT, lines: int | None = None) -> float:
    """Wall time of a command, which has to succeed and to print so many lines."""
    start = time.perf_counter()
    done = run(command, checkout, capture_output=True)
    wall, printed = time.perf_counter() - start, len(done.stdout.splitlines())
    if done.returncode or lines not in (None, printed):
        sys.exit(f"{' '.join(command)}\n{done.stderr}\nexit {done.returncode}, {printed} lines")
    return wall


def measure(suite: Suite, runs: int, warmup: bool, against: Path | None) -> dict[str, list[float]]:
    """The seconds of every counted run of each command, the commands taking turns."""
    commands = [(name, command, ROOT) for name, command in {**suite.peers, **suite.ours}.items()]
    if against is not None:
        commands += [(before(name), command, against) for name, command in suite.ours.items()]
    times: dict[str, list[float]] = {name: [] for name, _, _ in commands}
    for turn in range(-int(warmup), runs):
        for name, command, checkout in commands:
            if suite.writes is not None:
                shutil.rmtree(suite.writes, ignore_errors=True)
                suite.writes.mkdir()
                os.sync()
            wall = seconds(command, checkout, suite.lines)
            if turn >= 0:
                times[name].append(wall)
    return times


def before(name: str) -> str:
    """What a command of the other checkout is called."""
    return f"{name}, before"


def report(suite: Suite, times: dict[str, list[float]]) -> None:
    """Prints medians, ranges and ratios to the fastest peer, then how each command does."""
    fastest = min(suite.peers, key=lambda name: statistics.median(times[name]))
    print(f"\n{suite.title}, {len(times[fastest])} runs each")
    print(f"  {'':<36}{'median':>9}{'min':>8}{'max':>8}{'ratio':>8}")
    for name, walls in times.items():
        row = f"  {name:<36}{statistics.median(walls):>7.2f} s{min(walls):>8.2f}{max(walls):>8.2f}"
        print(f"{row}{ratio(walls, times[fastest]):>8.2f}")
    for name, bar in zip(suite.ours, suite.bars, strict=True):
        share = ratio(times[name], times[fastest])
        verdict = "met" if share <= bar else "MISSED"
        print(f"  {name}: {share:.2f} of {fastest} (at most {bar}: {verdict})", end="")
        other = times.get(before(name))
        print(f", {ratio(times[name], other):.2f} of before" if other else "")


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios within a turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def write_material(python: str, peers: str, material: Path) -> None:
    """Writes the files of the suites that do not exist yet."""
    if not (material / "transformers-b16").exists():
        seconds([peers, str(HERE / "peer.py"), "material", str(material)])
    for name in ("vit-b16", "b16.npz"):
        if not (material / name).exists():
            source, target = str(material / "timm-b16"), str(material / name)
            seconds([python, "-m", "vitcli", "convert", source, target])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each command")
    parser.add_argument("--no-warmup", action="store_true", help="count from the first run on")
    parser.add_argument("--only", nargs="+", choices=SUITES, default=SUITES, metavar="SUITE")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of vit")
    parser.add_argument("--python", default=sys.executable, help="Python that has vit's packages")
    parser.add_argument("--peers", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--material", type=Path, help="keep images and models in this directory")
    arguments = parser.parse_args()
    against = arguments.against and arguments.against.resolve()

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = (re.findall(r"model name\s*: (.*)", cpuinfo) or [platform.processor()])[0]
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "timm", "transformers")]
    print(f"{os.cpu_count()} x {processor}; {', '.join(versions)}", flush=True)
    if "fewshot" in arguments.only:
        for checkout in [ROOT, *([against] if against else [])]:
            run([arguments.peers, str(HERE / "fewshot_solve.py")], checkout)
    if "train" in arguments.only:
        more = ["--against", str(against)] if against else []
        run([arguments.peers, str(HERE / "training.py"), "--turns", str(arguments.runs), *more])
    if set(arguments.only) <= {"fewshot", "train"}:
        return
    material = arguments.material or Path(tempfile.mkdtemp(prefix="vit-bench-"))
    try:
        write_material(arguments.python, arguments.peers, material.resolve())
        for name, suite in suites(arguments.python, arguments.peers, material.resolve()).items():
            if name in arguments.only:
                report(suite, measure(suite, arguments.runs, not arguments.no_warmup, against))
    finally:
        if not arguments.material:
            shutil.rmtree(material, ignore_errors=True)


if __name__ == "__main__":
    main()
