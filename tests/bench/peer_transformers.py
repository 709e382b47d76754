"""Classifies with transformers' pipeline, as its documentation does.

`python peer_transformers.py MODEL_FOLDER IMAGES`, a file or a folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from peers import torchvision_operators  # noqa: F401  (first, see there)

# isort: split

from transformers import pipeline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()

    one = arguments.images.is_file()
    images = [arguments.images] if one else sorted(arguments.images.iterdir())
    classify = pipeline("image-classification", model=str(arguments.model), dtype=arguments.dtype)
    batch_size = 1 if one else arguments.batch_size
    for answer in classify([str(p) for p in images], batch_size=batch_size, top_k=5):
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
