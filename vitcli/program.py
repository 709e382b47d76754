"""A model as a program that runs without `vit`: ONNX, or an exported program of torch (.pt2).

The program holds the network and, as far as that is asked for, what surrounds it: normalization
before, scores after. What no graph holds (how images are resized and cropped, the classes) stands
in the file as JSON, the same that a checkpoint has in its header: under "vit" in the metadata of
ONNX, and in the extra file "vit" of a .pt2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitcli.atomic import whole_directory
from vitcli.config import PosembMethod, Size
from vitcli.data.transforms import to_float
from vitcli.errors import CheckpointError, ConfigError, MissingExtraError, OutputError
from vitcli.fields import check_choice, check_positive
from vitcli.inference import Inference
from vitcli.prediction import Predictor, to_scores

if TYPE_CHECKING:
    from vitcli.checkpoints.info import CheckpointInfo
    from vitcli.hub.fetch import Progress

Inputs = Literal["normalized", "uint8"]
Outputs = Literal["logits", "scores", "features"]
Dtype = Literal["float32", "float16", "int8"]

STAGES = ("tracing the model", "writing the program", "comparing with vit")
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.3}
"""The largest difference from the model in float32, as a share of the largest value."""
SMALL = 1e-3
"""Values below this are compared as if they were as large."""
OPSETS = range(18, 24)
"""Versions of ONNX's operators that torch's exporter writes."""


class Port(NamedTuple):
    """What goes into the program, or comes out of it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """"batch" stands for any number."""


@dataclass(frozen=True)
class Exported:
    """A program that was written, and how far it agrees with the model."""

    output: Path
    input: Port
    result: Port
    info: CheckpointInfo
    """Of the model, at the resolution of the program."""
    dtype: Dtype
    """Of the weights and of most of the computation."""
    opset: int | None
    """None: not ONNX."""
    runtime: str
    """What ran the program for the comparison, and its version."""
    difference: float
    """The largest, absolute, from the model in float32."""
    largest: float
    """The largest absolute value that the model computed."""


def export(
    spec: str | Path,
    output: str | Path,
    *,
    inputs: Inputs = "normalized",
    outputs: Outputs | None = None,
    batch_size: int | None = None,
    resolution: int | Size | None = None,
    posemb_method: PosembMethod = "bilinear",
    dtype: Dtype = "float32",
    opset: int | None = None,
    force: bool = False,
    offline: bool = False,
    on_progress: Progress | None = None,
    allow_pickle: bool = False,
    on_stage: Callable[[int], None] = lambda stage: None,
) -> Exported:
    """Writes a model as a program, once that has computed what the model computes on random images.

    Args:
        spec: a path, a name or a Hub repo, of any layout that we read.
        output: a .onnx or .pt2 file. Next to .onnx files of more than 2 GB, which the format does
            not allow, the weights are in a second file, NAME.onnx.data.
        inputs: normalized images, float32 (batch, 3, height, width); or the pixels of resized RGB
            images, uint8 (batch, height, width, 3), which the program normalizes.
        outputs: logits or their scores, float32 (batch, classes); or the input of the head, float32
            (batch, feature_dim). None: logits, or features of a model without a head.
        batch_size: the only one that the program takes; None: it takes any.
        resolution: of the images, both sides or (height, width); None: the checkpoint's.
        posemb_method: how position embeddings are resized for another resolution.
        dtype: of the weights; input and output stay as they are. int8 (ONNX only): matrices of the
            blocks alone, with a scale each; activations are quantized as the program runs.
        opset: version of ONNX's operators; None: torch's default.
        force: replace an existing output.
        offline: never use the network.
        on_progress: called while a checkpoint is downloaded.
        allow_pickle: accept a Hub repo that has its weights only as a pickle; nothing in it is run.
        on_stage: called with the index of each of `STAGES` when it begins.

    Raises:
        VitError: the model cannot be loaded, or has no head; the output exists or cannot be
            written; the program computes something else.
        MissingExtraError: a package that ONNX needs is not installed.
    """
    path, target = Path(output), Path(os.path.realpath(output))
    for name, kind, value in (("inputs", Inputs, inputs), ("dtype", Dtype, dtype)):
        check_choice(name, kind, value)
    check_positive(batch_size=batch_size)
    form = _form_of(path, dtype, opset)
    if path.exists() and not force:
        raise OutputError("already exists", where=path, hint="use --force to replace it")
    fetched: Any = offline, on_progress, resolution, posemb_method, allow_pickle
    predictor = Predictor(spec, "cpu", "fp32", *fetched)
    outputs = _outputs_of(predictor, outputs)
    on_stage(0)
    model = plain = Program(predictor.load(), inputs, outputs)
    if dtype == "float16":
        model = Program(Predictor(spec, "cpu", "fp16", *fetched).load(), inputs, outputs)
    examples = [plain.random_images(n, seed=n) for n in ([batch_size] if batch_size else [2, 1, 3])]
    ports = _ports(predictor.info, inputs, outputs, batch_size)
    with torch.no_grad(), _quiet(), whole_directory(target.parent) as directory:
        expected = [plain(images) for images in examples]
        largest = max(float(values.abs().max()) for values in expected)
        if not math.isfinite(largest):
            what = "some outputs are not finite numbers: the weights contain NaN, or are too large"
            raise CheckpointError(what, where=predictor.name)
        dynamic = None if batch_size else {"images": {0: Dim("batch", min=1)}}
        traced = torch.export.export(model, (examples[0],), dynamic_shapes=dynamic)
        on_stage(1)
        written = form(directory / target.name, traced, ports, predictor.info)
        on_stage(2)
        found = [written.run(images) for images in examples]
        pairs = list(zip(found, expected, strict=True))
        difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        if not difference <= TOLERANCES[dtype] * max(largest, SMALL):  # NaN does not agree
            raise OutputError(
                f"{written.runtime} computes different {outputs}: the largest difference is "
                f"{difference:.2g}, the largest value {largest:.3g}; nothing was written",
                where=path,
                hint="use --dtype float32" if dtype != "float32" else None,
            )
        data = target.with_name(f"{target.name}.data")
        stale = data.exists() and not (directory / data.name).exists()
    if stale:  # of the program that was replaced
        data.unlink()
    info, opset = predictor.info, written.opset
    return Exported(path, *ports, info, dtype, opset, written.runtime, difference, largest)


class Program(nn.Module):
    """What is exported: a model, with what is asked for around it.

    Args:
        inference: the model on the CPU, its encoder in the type of the program.
    """

    def __init__(self, inference: Inference, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__()
        self.model, self.info, self.dtype = inference.model, inference.info, inference.dtype
        self.inputs, self.outputs = inputs, outputs
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        if self.inputs == "uint8":
            images = to_float(images.permute(0, 3, 1, 2), self.info.preprocess)
        compute = self.model.features if self.outputs == "features" else self.model
        values: Tensor = compute(images.to(self.dtype)).float()
        return to_scores(values, self.info.score) if self.outputs == "scores" else values

    def random_images(self, count: int, seed: int) -> Tensor:
        """Inputs to compare programs on."""
        generator, size = torch.Generator().manual_seed(seed), self.info.model.image_size
        if self.inputs == "uint8":
            return torch.randint(256, (count, *size, 3), generator=generator, dtype=torch.uint8)
        return torch.randn((count, 3, *size), generator=generator)


def _outputs_of(predictor: Predictor, outputs: Outputs | None) -> Outputs:
    """What comes out of the program. Raises ConfigError."""
    has_head = predictor.info.model.num_classes > 0
    outputs = outputs or ("logits" if has_head else "features")
    check_choice("outputs", Outputs, outputs)
    if outputs != "features" and not has_head:
        raise ConfigError(
            "the model has no classification head",
            where=predictor.name,
            hint="export its features instead with --outputs features",
        )
    return outputs


def _ports(
    info: CheckpointInfo, inputs: Inputs, outputs: Outputs, batch_size: int | None
) -> tuple[Port, Port]:
    """Input and output. Names are those of transformers' models in ONNX."""
    batch, (height, width) = batch_size or "batch", info.model.image_size
    given = Port("pixel_values", "float32", (batch, 3, height, width))
    if inputs == "uint8":
        given = Port("pixels", "uint8", (batch, height, width, 3))
    values = info.model.feature_dim if outputs == "features" else info.model.num_classes
    return given, Port(outputs, "float32", (batch, values))


def _description(info: CheckpointInfo) -> str:
    """What a checkpoint has in its header, but for how it was made."""
    return dataclasses.replace(info, provenance={}).to_metadata()["vit"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings, of which none is about the model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------------------------------------
# Forms


class _Written(NamedTuple):
    """A program on disk."""

    run: Callable[[Tensor], Tensor]
    runtime: str
    opset: int | None = None


_Form = Callable[[Path, ExportedProgram, tuple[Port, Port], "CheckpointInfo"], _Written]


def _form_of(path: Path, dtype: Dtype, opset: int | None) -> _Form:
    """How a file of that name is written. Raises OutputError, ConfigError, MissingExtraError."""
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        if opset is not None and opset not in OPSETS:
            raise ConfigError(f"opset {opset} is not one of {OPSETS[0]} to {OPSETS[-1]}")
        for module in ("onnxscript", "onnxruntime"):
            if importlib.util.find_spec(module) is None:
                raise MissingExtraError(module, "exporting to ONNX")
        return functools.partial(_write_onnx, dtype=dtype, opset=opset)
    if suffix != ".pt2":
        raise OutputError("does not end in .onnx or .pt2", where=path)
    if dtype == "int8" or opset is not None:
        option = "dtype int8" if dtype == "int8" else "an opset"
        raise ConfigError(f"{option} requires a .onnx file")
    return _write_pt2


def _write_onnx(
    file: Path,
    program: ExportedProgram,
    ports: tuple[Port, Port],
    info: CheckpointInfo,
    dtype: Dtype,
    opset: int | None,
) -> _Written:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    given, result = ports
    dynamic: Any = {"images": {0: "batch"}} if "batch" in given.shape else None
    made = torch.onnx.export(
        program,
        input_names=[given.name],
        output_names=[result.name],
        dynamic_shapes=dynamic,
        opset_version=opset,
        dynamo=True,
        verbose=False,
    )
    assert made is not None
    made.model.metadata_props["vit"] = _description(info)
    if dtype == "int8":
        _quantize(made, file)
    else:
        made.save(str(file))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([result.name], {given.name: images.numpy()})[0])

    runtime = f"onnxruntime {version('onnxruntime')}"
    return _Written(run, runtime, made.model.opset_imports[""])


def _quantize(made: torch.onnx.ONNXProgram, file: Path) -> None:
    """Writes an ONNX file with the matrices of the blocks in int8. Heads, which see one vector for
    each image, stay as they are."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        whole = Path(directory, file.name)
        made.save(str(whole))
        quantization.quantize_dynamic(
            whole,
            file,
            op_types_to_quantize=["MatMul"],
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=whole.with_name(f"{file.name}.data").exists(),
        )


def _write_pt2(
    file: Path, program: ExportedProgram, ports: tuple[Port, Port], info: CheckpointInfo
) -> _Written:
    with open(file, "wb") as opened:  # which names the reason where it cannot be written
        torch.export.save(program, opened, extra_files={"vit": _description(info)})
    again = torch.export.load(file).module()
    return _Written(again, f"torch {torch.__version__}")
