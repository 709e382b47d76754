"""Time and memory to open a directory of a million images.

    python tests/bench/listing.py [--images 1300000]

Creates 1,000 class directories of symlinks to one file. Then, three times in alternation: lists
them with `ls -R`, which sorts the names in each directory, as a dataset must; and opens them in a
process of its own. Prints the shortest time of each (the target is 1.2 of `ls -R`), and the memory
per image.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLASSES = 1000

OPEN = """
import json, resource, sys, time
from vitcli.config import DataConfig
from vitcli.data.dataset import open_dataset
import vitcli.data.directory
def memory():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, start = memory(), time.perf_counter()
source = open_dataset(DataConfig(sys.argv[1])).train
print(json.dumps([time.perf_counter() - start, (memory() - before) / len(source)]))
"""


def make(root: Path, images: int) -> None:
    target = root.parent / "one.jpg"
    target.write_bytes(b"")
    for number in range(CLASSES):
        directory = root / f"n{1440764 + 7 * number:08}"
        directory.mkdir(parents=True)
        for i in range(images // CLASSES):
            (directory / f"{directory.name}_{13 * i}.JPEG").symlink_to(target)


def list_with_ls(root: Path) -> float:
    """Return the wall time in seconds."""
    start = time.perf_counter()
    bytewise = {**os.environ, "LC_ALL": "C"}
    subprocess.run(["ls", "-R", str(root)], env=bytewise, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - start


def open_images(root: Path) -> tuple[float, float]:
    """Return the wall time in seconds, and the peak memory in bytes per image."""
    command = [sys.executable, "-c", OPEN, str(root)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, memory = json.loads(result.stdout)
    return wall, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1_300_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make(root := Path(scratch) / "links", args.images)
        runs = [(list_with_ls(root), *open_images(root)) for _ in range(3)]
    plain, opened, memory = map(min, zip(*runs, strict=True))
    print(f"ls -R {plain:.2f} s, opened {opened:.2f} s ({opened / plain:.2f}x), ", end="")
    print(f"{memory:.0f} bytes an image")


if __name__ == "__main__":
    main()
