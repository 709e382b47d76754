"""Speed of `vit` beside the real timm and transformers: `make bench`.

Whole processes, from the command to its last line of output. The commands of a suite take turns,
run by run, so that a machine that slows down slows them all; a ratio is taken within each turn, and
medians are printed. One turn that is not counted comes first (disk cache, compiled Python files).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Suite:
    """Commands that are compared, ours last, and the parts of the best peer's time that ours may
    take, one for each."""

    title: str
    peers: dict[str, list[str]]
    ours: dict[str, list[str]]
    bars: tuple[float, ...]
    answers: int | None = None
    """Lines of output that each command has to print; None: any."""
    writes: Path | None = None
    """The folder that each command writes to: emptied before each run, the disk brought to rest."""

    @property
    def commands(self) -> dict[str, list[str]]:
        return {**self.peers, **self.ours}


def suites(python: str, peers: str, material: Path) -> dict[str, Suite]:
    """The suites of `--only`, on material that `material.py` wrote."""
    vit = [python, "-m", "vitcli"]
    timm = [peers, str(HERE / "peer_timm.py"), str(material / "timm-b16")]
    transformers = [peers, str(HERE / "peer_transformers.py"), str(material / "transformers-b16")]
    folder = str(material / "photographs")
    photo = str(material / "photographs" / "000.jpg")
    ours = ["--model", str(material / "timm-b16"), "--json"]
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
            {"timm": [*timm, photo], "transformers pipeline": [*transformers, photo]},
            {"vit predict": [*vit, "predict", photo, *ours]},
            bars=(0.5,),
            answers=1,
        ),
        "folder": Suite(
            "199 photographs through a B/16",
            {
                "timm, float32": [*timm, folder],
                "timm, bfloat16": [*timm, folder, "--dtype", "bfloat16"],
                "transformers pipeline, bfloat16": [*transformers, folder, "--dtype", "bfloat16"],
            },
            {"vit predict": [*vit, "predict", folder, *ours]},
            bars=(0.6,),
            answers=199,
        ),
        "checkpoints": checkpoint_suite(vit, peers, material),
    }


def checkpoint_suite(vit: list[str], peers: str, material: Path) -> Suite:
    """346 MB through the disk. The fastest peer is `cp` and a sync of what it wrote."""
    timms, ours, npz = (str(material / name) for name in ("timm-b16", "vit-b16", "b16.npz"))
    tensors, out = str(material / "timm-b16" / "model.safetensors"), material / "output"
    file, folder = str(out / "x.safetensors"), str(out / "x")
    peer = [peers, str(HERE / "peer_checkpoints.py")]
    return Suite(
        "A B/16 through the disk",
        {
            "cp and sync": ["sh", "-c", 'cp "$0" "$1" && sync "$1"', tensors, file],
            "safetensors, loaded and saved": [*peer, "safetensors", timms, str(out)],
            "timm, loaded at 384 px and saved": [*peer, "timm", timms, str(out)],
        },
        {
            "vit resize-posemb": [*vit, "resize-posemb", tensors, "--grid", "24", "-o", file],
            "vit convert, timm's to ours": [*vit, "convert", timms, folder],
            "vit convert, ours to timm's": [*vit, "convert", ours, folder, "--to", "timm"],
            "vit convert, npz to ours": [*vit, "convert", npz, file],
        },
        bars=(3, 3, 3, 5),
        writes=out,
    )


def environment() -> dict[str, str]:
    """In which the commands find this repository's code, and no network."""
    paths = [str(ROOT), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def seconds(command: list[str], answers: int | None) -> float:
    """Wall time of one run; it has to succeed and to print as many lines as it should."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    wall = time.perf_counter() - start
    lines = len(done.stdout.splitlines())
    if done.returncode or (answers is not None and lines != answers):
        sys.exit(f"{' '.join(command)}\n{done.stderr}\nexit {done.returncode}, {lines} lines")
    return wall


def measure(suite: Suite, runs: int, warmup: bool) -> dict[str, list[float]]:
    """Seconds of every counted run of every command, the commands taking turns."""
    times: dict[str, list[float]] = {name: [] for name in suite.commands}
    for turn in range(-int(warmup), runs):
        for name, command in suite.commands.items():
            if suite.writes is not None:
                empty(suite.writes)
            wall = seconds(command, suite.answers)
            if turn >= 0:
                times[name].append(wall)
    return times


def empty(folder: Path) -> None:
    """Removes what the run before wrote, and waits until the disk is at rest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()


def report(suite: Suite, times: dict[str, list[float]]) -> None:
    """A table of medians and ranges; then for each of ours what part of the best peer it takes."""
    best = min(suite.peers, key=lambda name: statistics.median(times[name]))
    print(f"\n{suite.title}, {len(times[best])} runs each")
    print(f"  {'':<34}{'median':>9}{'min':>8}{'max':>8}{'to the best':>13}")
    for name, walls in times.items():
        row = f"  {name:<34}{statistics.median(walls):>7.2f} s{min(walls):>8.2f}{max(walls):>8.2f}"
        print(f"{row}{ratio(walls, times[best]):>13.2f}")
    for name, bar in zip(suite.ours, suite.bars, strict=True):
        part = ratio(times[name], times[best])
        verdict = "met" if part <= bar else "MISSED"
        print(f"  {name}: {part:.2f} of {best}; at most {bar}: {verdict}")


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios within a turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def describe_machine(peers: str) -> str:
    """Processors and versions, without which a figure says little."""
    code = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in N))"
    names = ("torch", "timm", "transformers")
    command = [peers, "-c", f"N = {names!r}; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor()
    return f"{os.cpu_count()} x {processor}; {done.stdout.strip()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each command")
    parser.add_argument("--no-warmup", action="store_true", help="count from the first run on")
    names = "start, photo, folder, fewshot, checkpoints"
    parser.add_argument("--only", nargs="+", metavar="SUITE", help=names)
    parser.add_argument("--python", default=sys.executable, help="Python that has vitcli")
    parser.add_argument("--peers", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--material", type=Path, help="keep images and models in this folder")
    arguments = parser.parse_args()

    print(describe_machine(arguments.peers), flush=True)
    if not arguments.only or "fewshot" in arguments.only:
        subprocess.run([arguments.peers, str(HERE / "fewshot_solve.py")], env=environment())
    if arguments.only == ["fewshot"]:
        return
    material = arguments.material or Path(tempfile.mkdtemp(prefix="vit-bench-"))
    try:
        if not (material / "transformers-b16").exists():
            material.mkdir(parents=True, exist_ok=True)
            seconds([arguments.peers, str(HERE / "material.py"), str(material)], None)
        for name in ("vit-b16", "b16.npz"):
            if not (material / name).exists():
                convert = [arguments.python, "-m", "vitcli", "convert", str(material / "timm-b16")]
                seconds([*convert, str(material / name)], None)
        for name, suite in suites(arguments.python, arguments.peers, material).items():
            if not arguments.only or name in arguments.only:
                report(suite, measure(suite, arguments.runs, not arguments.no_warmup))
    finally:
        if not arguments.material:
            shutil.rmtree(material, ignore_errors=True)


if __name__ == "__main__":
    main()
