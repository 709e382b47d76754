"""Time and memory to open a directory of a million images.

    python tests/bench/listing.py [--images 1300000]

Creates 1,000 class directories of symlinks to one file. Then, three times in alternation, each in
its own process: lists them with `ls -R`, which sorts the names in each directory, as a dataset
must; and opens them. Prints the shortest time of each, also relative to `ls -R` (the target is
1.2), and its peak memory per image.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CLASSES = 1000

LS = """
import os, subprocess
def work(root):
    command, bytewise = ["ls", "-R", root], {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, env=bytewise, stdout=subprocess.PIPE, check=True)
    return result.stdout.count(b"\\n")
"""
OPEN = """
from vitcli.config import DataConfig
from vitcli.data.dataset import open_dataset
import vitcli.data.directory
def work(root):
    global source
    source = open_dataset(DataConfig(root)).train
    return len(source)
"""
MEASURE = """
import json, os, resource, sys, time
{work}
def memory():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, wall, cpu = memory(), time.perf_counter(), time.process_time()
count = work(sys.argv[1])
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps([wall, cpu, (memory() - before) / count]))
"""


def make(root: Path, images: int) -> None:
    target = root.parent / "one.jpg"
    target.write_bytes(b"")
    for number in range(CLASSES):
        directory = root / f"n{1440764 + 7 * number:08}"
        directory.mkdir(parents=True)
        for i in range(images // CLASSES):
            (directory / f"{directory.name}_{13 * i}.JPEG").symlink_to(target)


def measure(work: str, root: Path) -> tuple[float, float, float]:
    """Return wall time and CPU time in seconds, and peak memory in bytes per image."""
    command = [sys.executable, "-c", MEASURE.format(work=work), str(root)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, cpu, memory = json.loads(result.stdout)
    return wall, cpu, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1_300_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make(root := Path(scratch) / "links", args.images)
        found: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(3):
            for name, work in (("ls -R", LS), ("opened", OPEN)):
                found.setdefault(name, []).append(measure(work, root))
        plain = min(wall for wall, _, _ in found["ls -R"])
        for name, runs in found.items():
            wall, cpu, memory = map(min, zip(*runs, strict=True))
            print(
                f"{name:8} {wall:6.2f} s ({wall / plain:.2f}x)   processor {cpu:6.2f} s   "
                f"{memory:4.0f} bytes an image"
            )


if __name__ == "__main__":
    main()
