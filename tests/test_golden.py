"""Compare with original implementations, whose arrays are in tests/golden/. Every array is checked,
including those at a larger resolution (`hires_*`).

    python tests/test_golden.py [CASE...]

or `make golden` prints a table: case, arrays, largest |difference|, tolerance.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from checkpoints.golden_cases import GOLDEN, cases, unpack
from vitcli.architectures import posemb
from vitcli.checkpoints.load import LoadedModel, LoadedViT, load
from vitcli.config import PosembMethod
from vitcli.evaluation.fewshot import sample_shots
from vitcli.evaluation.ridge import RidgeSolver
from vitcli.models.resnet import ResNet

METHODS: dict[str, PosembMethod] = {
    "timm": "bicubic",
    "vit_jax": "bilinear",
    "big_vision": "bilinear",
    "hf": "bicubic-hf",
    "hf_dinov2_registers": "bicubic",  # transformers antialiases in this model alone
}
"""How each library resizes position embeddings."""
INPUTS = {"image_u8", "input", "hires_image_u8"}
"""Input arrays."""


class Row(NamedTuple):
    """The largest difference of an array from the original's."""

    array: str
    difference: float
    tolerance: float

    @property
    def passes(self) -> bool:
        return self.difference <= self.tolerance


def compare(name: str) -> list[Row]:
    """Compare every array of a case."""
    path = CASES[name]
    others = {"preprocess": _preprocess, "posembed_resize": _posembed, "fewshot_lsr": _fewshot}
    return list(others[name]() if name in others else _model(path))


# ---------------------------------------------------------------------------------------------
# Models


def _model(file: Path) -> Iterator[Row]:
    directory = file.parent
    case = json.loads((directory / "case.json").read_text())
    arrays = np.load(directory / "io.npz")
    with tempfile.TemporaryDirectory() as place:
        file = unpack(file, Path(place))
        pixels = arrays["input"]
        images = pixels if pixels.shape[1] == 3 else pixels.transpose(0, 3, 1, 2)
        # A file without position embeddings does not store the resolution; a ResNet takes any.
        model = load(file, resolution=images.shape[2:])
        found = compute(model, torch.from_numpy(np.ascontiguousarray(images)))
        if case["hires_px"]:
            method = next(
                m for key, m in reversed(METHODS.items()) if directory.name.startswith(key)
            )
            model = load(file, resolution=case["hires_px"], posemb_method=method)
            prepared = _normalize(arrays["hires_image_u8"], model)
            found |= {f"hires_{n}": array for n, array in compute(model, prepared).items()}
    for name in arrays.files:
        if name not in INPUTS:
            array = found[name.removesuffix("_image0")]
            array = array[:1] if name.endswith("_image0") else array
            yield _row(name, array.numpy(), arrays[name], case["tolerance"].get(name, 1e-6))


def _normalize(pixels: Any, model: LoadedModel) -> Tensor:
    """Convert uint8 images (N, H, W, 3) to the model's input, without resizing."""
    mean, std = np.float32(model.preprocess.mean), np.float32(model.preprocess.std)
    scaled = (pixels.astype(np.float32) / 255 - mean) / std
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))


def compute(model: LoadedModel, images: Tensor) -> dict[str, Tensor]:
    """All arrays that a golden case may contain, by name."""
    seen: dict[str, Tensor] = {}

    def keep(module: nn.Module, *names: str) -> None:
        module.register_forward_hook(
            lambda module, inputs, output: seen.update(dict.fromkeys(names, output.detach()))
        )

    is_vit = isinstance(model, LoadedViT)
    resnet = model.patch_embed.backbone if is_vit else model
    for k, stage in enumerate(getattr(resnet, "stages", ())):
        keep(stage, f"stage_{k}", f"stem_block{k + 1}")
    if is_vit:
        last = len(model.blocks)
        keep(model.patch_embed, "patch_embed")
        keep(model.norm_pre, "hidden_00")
        keep(model.fc_norm, "head_input")
        for k, block in enumerate(model.blocks):
            keep(block, f"block_{k:02d}", f"hidden_{k + 1:02d}")
    else:
        keep(model.stem, "stem")
    with torch.inference_mode():
        seen["logits"] = seen["output"] = model(images)
        seen["pre_logits"] = seen["pooler_output"] = model.features(images)
        if not is_vit:
            seen["forward_features"] = ResNet.forward(model, images)
            return seen
        tokens = model.encode(images)
        seen["forward_features"] = seen["encoder_norm"] = seen["encoded"] = tokens
        config = model.config
        # CLIP normalizes the class token only.
        clip = config.pre_norm and config.activation == "quick_gelu"
        seen["last_hidden_state"] = seen[f"hidden_{last:02d}"] if clip else tokens
        if model.head_dist is not None:
            seen["cls_logits"] = seen["logits_head"] = model.head(tokens[:, 0])
            seen["distillation_logits"] = model.head_dist(tokens[:, 1])
            seen["logits_head_dist"] = seen["distillation_logits"]
        patches = seen["patch_embed"]
        seen["embedding"] = patches.reshape(len(patches), *config.grid, config.width)
        covered = config.num_prefix_tokens - config.posemb_prefix
        seen["with_posemb"] = seen["hidden_00"][:, covered:]
        if (table := model.position_embeddings()) is not None:
            seen["pos_embed"] = seen["pos_embedding"] = table.detach()
    for k in range(len(getattr(resnet, "stages", ()))):  # flax is channels-last
        seen[f"stem_block{k + 1}"] = seen[f"stem_block{k + 1}"].permute(0, 2, 3, 1)
    return seen


# ---------------------------------------------------------------------------------------------
# Other cases


def _preprocess() -> Iterator[Row]:
    """Photographs preprocessed as in timm, big_vision (exactly) and transformers (to one level)."""
    from data.preprocess_cases import CASES, IMAGES, NAMES, parts
    from vitcli.data.fit import Fit

    files = (GOLDEN / "preprocess").glob("*.npz")
    arrays = {key: array for file in files for key, array in np.load(file).items()}
    for name, (case, (preprocess, levels)) in itertools.product(NAMES, CASES.items()):
        # Opened here, since JPEG bytes would be decoded at a reduced scale for small sizes.
        with Image.open(IMAGES / name) as image:
            pixels = np.asarray(Fit(preprocess)(image)).transpose(2, 0, 1).astype(float)
        for part, values in parts(pixels).items():
            tolerance = max(levels / 100, 1e-4) if part == "mean" else levels
            key = f"{name}|{case}|{part}"
            yield _row(key, values, arrays[key], tolerance)


def _posembed() -> Iterator[Row]:
    """Position embeddings resized by every method, in numpy and torch."""
    arrays = np.load(GOLDEN / "posembed_resize" / "posembed.npz")
    for case in json.loads((GOLDEN / "posembed_resize" / "cases.json").read_text()):
        table = arrays[case["input"]][:, case["skip_prefix"] :]
        old, new = tuple(case["old"]), tuple(case["new"])
        prefix = table.shape[1] - old[0] * old[1]
        found = posemb.resize(table, prefix, old, new, case["method"])
        assert np.array_equal(found[:, :prefix], table[:, :prefix])
        in_torch = posemb.resize(torch.from_numpy(table), prefix, old, new, case["method"])
        assert in_torch.dtype is torch.float32 and np.array_equal(in_torch, found)
        tolerance = 1e-6 if case["method"] == "bilinear" else 1e-5
        yield _row(case["key"], found, arrays[case["key"]].reshape(found.shape), tolerance)


def _fewshot() -> Iterator[Row]:
    """Samples, accuracies and weights of big_vision's closed-form few-shot protocol."""
    directory = GOLDEN / "fewshot_lsr"
    arrays = np.load(directory / "fewshot.npz")
    x, y = arrays["x_train"], arrays["y_train"].astype(np.int64)
    for case in json.loads((directory / "accuracies.json").read_text()):
        l2, seed, shots = case["l2"], case["seed"], case["shots"]
        draw, name = f"seed{seed}_shots{shots}", f"l2={l2:g},seed={seed},{shots}"
        chosen = sample_shots(y, 10, shots, seed)
        yield _row(f"{name} draw", chosen, arrays[f"idx_{draw}"], 0)
        solver = RidgeSolver(x[chosen], y[chosen], 10)
        head = solver.solve(l2)
        test = arrays["x_test"]
        right = (head.predict(test) == arrays["y_test"]).mean()
        yield _row(f"{name} accuracy", right, case["accuracy_float64"], 1e-6)
        if (weights := f"l2_{l2:g}_{draw}_weights") in arrays:
            expected = solver.standardize(test) @ arrays[weights]
            yield _row(f"{name} logits", test @ head.weight.T + head.bias, expected, 1e-6)


def _row(name: str, found: Any, expected: Any, tolerance: float) -> Row:
    assert np.shape(found) == np.shape(expected), name
    return Row(name, float(np.abs(found - expected).max()), tolerance)


# ---------------------------------------------------------------------------------------------
# All cases


CASES = cases()


def test_number_of_cases() -> None:
    assert len({file.parent.name if file.is_file() else file.name for file in CASES.values()}) == 31
    assert len(CASES) == 35  # some models come in several files


@pytest.mark.parametrize("name", CASES)
def test_arrays_match_original(name: str) -> None:
    rows = compare(name)
    assert rows and [row for row in rows if not row.passes] == []


def main(names: Sequence[str]) -> int:
    """Print the worst array of every case, or all arrays of the named cases."""
    torch.set_num_threads(1)
    width = max(map(len, CASES)) + 2
    print(f"{'case':{width}}{'arrays':>7}  {'worst array':28}{'|difference|':>13}{'tolerance':>11}")
    failed = 0
    for name in names or CASES:
        rows = compare(name)
        worst = max(rows, key=lambda row: row.difference / (row.tolerance or 1))
        for row in rows if names else [worst]:
            label = row.array if len(row.array) <= 26 else f"...{row.array[-23:]}"
            numbers = f"{row.difference:13.1e}{row.tolerance:11.1e}"
            mark = "" if row.passes else "  FAILS"
            print(f"{name:{width}}{len(rows):>7}  {label:28}{numbers}{mark}", flush=True)
        failed += not all(row.passes for row in rows)
    print(f"{len(names or CASES) - failed} pass, {failed} fail")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
