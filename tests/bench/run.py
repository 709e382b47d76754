"""Speed of `vit` compared with timm, transformers, scikit-learn and `cp`: `make bench`.

Times whole processes, from start to exit. The commands of a suite alternate, so that a machine that
slows down affects them all; ratios are taken within a round, and medians are printed. The first
round is not counted: it warms the disk cache and compiles Python files.

With `--against DIR`, the same commands also run in another checkout of vit: before and after.
"""

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
VIT, PEER = [sys.executable, "-m", "vitcli"], [sys.executable, str(HERE / "peer.py")]
SUITES = ("start", "photo", "directory", "fewshot", "checkpoints", "train")


@dataclass(frozen=True)
class Suite:
    """Commands to compare, and the largest allowed ratio of each of vit's to the fastest peer."""

    title: str
    peers: dict[str, list[str]]
    ours: dict[str, list[str]]
    bars: tuple[float, ...]
    lines: int | None = None
    """Number of lines that each command must print; None: any."""
    writes: Path | None = None
    """The directory that the commands write to; before each run, it is emptied and disks synced."""


def suites(material: Path) -> dict[str, Suite]:
    """The suites that time whole processes, on the files written by `peer.py material`."""
    timm, transformers, photographs, ours, npz, out = (
        str(material / name)
        for name in ("timm-b16", "transformers-b16", "photographs", "vit-b16", "b16.npz", "output")
    )
    photo, tensors = f"{photographs}/000.jpg", f"{timm}/model.safetensors"
    predict = [*VIT, "predict", "--model", timm, "--json"]
    return {
        "start": Suite(
            "Start-up",
            {"import torch": [sys.executable, "-c", "import torch"]},
            {
                "vit --help": [*VIT, "--help"],
                "vit models": [*VIT, "models"],
                "vit models show": [*VIT, "models", "show", "vit-b16-i21k"],
            },
            bars=(0.25, 0.3, 0.3),
        ),
        "photo": Suite(
            "One photograph through a B/16",
            {
                "timm": [*PEER, "timm", timm, photo],
                "transformers pipeline": [*PEER, "transformers", transformers, photo],
            },
            {"vit predict": [*predict, photo]},
            bars=(0.5,),
            lines=1,
        ),
        "directory": Suite(
            "199 photographs through a B/16",
            {
                "timm, float32": [*PEER, "timm", timm, photographs],
                "timm, bfloat16": [*PEER, "timm", timm, photographs, "bfloat16"],
                "transformers pipeline, bfloat16": [
                    *(*PEER, "transformers", transformers, photographs, "bfloat16")
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
                "safetensors, loaded and saved": [*PEER, "safetensors-copy", timm, out],
                "timm, loaded at 384 px and saved": [*PEER, "timm-resize", timm, out],
            },
            {
                "vit resize-posemb": [
                    *(*VIT, "resize-posemb", tensors, "--grid", "24"),
                    *("-o", f"{out}/x.safetensors"),
                ],
                "vit convert, timm's to ours": [*VIT, "convert", timm, f"{out}/x"],
                "vit convert, ours to timm's": [*VIT, "convert", ours, f"{out}/x", "--to", "timm"],
                "vit convert, npz to ours": [*VIT, "convert", npz, f"{out}/x.safetensors"],
            },
            bars=(3, 3, 3, 5),
            writes=Path(out),
        ),
    }


def run(command: list[str], checkout: Path = ROOT, **options: bool) -> subprocess.CompletedProcess:
    """Run a command with a checkout's code and the Hub offline."""
    paths = [str(checkout), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs
    return subprocess.run(command, text=True, cwd=checkout, env=environment, **options)


def seconds(command: list[str], checkout: Path = ROOT, lines: int | None = None) -> float:
    """Return the wall time of a command, which must succeed and print `lines` lines."""
    start = time.perf_counter()
    result = run(command, checkout, capture_output=True)
    wall, printed = time.perf_counter() - start, len(result.stdout.splitlines())
    if result.returncode or lines not in (None, printed):
        sys.exit(f"{' '.join(command)}\n{result.stderr}\nexit {result.returncode}, {printed} lines")
    return wall


def measure(suite: Suite, runs: int, against: Path | None) -> dict[str, list[float]]:
    """Return the seconds of each counted run of each command; the commands alternate."""
    commands = [(name, command, ROOT) for name, command in {**suite.peers, **suite.ours}.items()]
    if against is not None:
        commands += [(before(name), command, against) for name, command in suite.ours.items()]
    times: dict[str, list[float]] = {name: [] for name, _, _ in commands}
    for turn in range(-1, runs):
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
    """The label of a command of the other checkout."""
    return f"{name}, before"


def report(suite: Suite, times: dict[str, list[float]]) -> None:
    """Print medians, ranges and ratios to the fastest peer, then which commands meet their bar."""
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
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each command")
    parser.add_argument("--only", nargs="+", choices=SUITES, default=SUITES, metavar="SUITE")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of vit")
    arguments = parser.parse_args()
    against = arguments.against and arguments.against.resolve()

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = (re.findall(r"model name\s*: (.*)", cpuinfo) or [platform.processor()])[0]
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "timm", "transformers")]
    print(f"{os.cpu_count()} x {processor}; {', '.join(versions)}", flush=True)
    if "fewshot" in arguments.only:
        for checkout in [ROOT, *([against] if against else [])]:
            run([sys.executable, str(HERE / "fewshot_solve.py")], checkout)
    if "train" in arguments.only:
        options = ["--against", str(against)] if against else []
        run([sys.executable, str(HERE / "training.py"), "--turns", str(arguments.runs), *options])
    if set(arguments.only) <= {"fewshot", "train"}:
        return
    with tempfile.TemporaryDirectory() as directory:
        seconds([*PEER, "material", directory])
        for name in ("vit-b16", "b16.npz"):
            seconds([*VIT, "convert", f"{directory}/timm-b16", f"{directory}/{name}"])
        for name, suite in suites(Path(directory)).items():
            if name in arguments.only:
                report(suite, measure(suite, arguments.runs, against))


if __name__ == "__main__":
    main()
