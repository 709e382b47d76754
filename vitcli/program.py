"""Export a model as a program that runs without `vit`: ONNX, or a torch ExportedProgram (.pt2).

The program contains the network and, optionally, input normalization and the conversion of logits
to scores. What a graph cannot express (resizing, cropping, class names) is stored as JSON, as in
the header of a checkpoint: under "vit" in the metadata of ONNX, in the extra file "vit" of a .pt2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitcli.atomic import atomic_directory, cannot_write
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import ModelConfig, PosembMethod, ProgramDtype, ProgramInputs, ProgramOutputs
from vitcli.data.transforms import to_float
from vitcli.errors import CheckpointError, ConfigError, OutputError, missing_extra
from vitcli.fields import Size, check_choice, check_positive
from vitcli.hub.fetch import Progress
from vitcli.inference import Inference
from vitcli.prediction import Predictor, to_scores
from vitcli.weight_files import PROGRAMS
from vitcli.words import join_or

STAGES = ("tracing the model", "writing the program", "comparing with vit")
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.3}
"""Maximum difference from the float32 model, relative to the largest value."""
SMALL = 1e-3
"""Lower bound of the largest value in that comparison."""
OPSETS = range(18, 24)
"""ONNX opset versions supported by torch's exporter."""


class TensorSpec(NamedTuple):
    """An input or output of the program."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """"batch" is a dynamic dimension."""


@dataclass(frozen=True)
class ExportResult:
    """An exported program, and how closely it matches the model."""

    output: Path
    input: TensorSpec
    result: TensorSpec
    info: CheckpointInfo = field(repr=False)
    """Metadata of the model, at the resolution of the program."""
    dtype: ProgramDtype
    """Dtype of the weights and of most of the computation."""
    opset: int | None
    """None if not ONNX."""
    runtime: str
    """Name and version of the runtime used for the comparison."""
    difference: float
    """Maximum absolute difference from the float32 model."""
    largest: float
    """Largest absolute output of the float32 model."""


def export(
    spec: str | Path,
    output: str | Path,
    *,
    inputs: ProgramInputs = "normalized",
    outputs: ProgramOutputs | None = None,
    batch_size: int | None = None,
    resolution: int | Size | None = None,
    posemb_method: PosembMethod = "bilinear",
    dtype: ProgramDtype = "float32",
    opset: int | None = None,
    force: bool = False,
    offline: bool = False,
    on_progress: Progress | None = None,
    allow_pickle: bool = False,
    on_stage: Callable[[int], None] = lambda stage: None,
) -> ExportResult:
    """Export a model as a program, after verifying on random images that their outputs match.

    Args:
        spec: a path, a model name such as "default", or a Hub repo, "org/name[@revision]".
        output: a .onnx or .pt2 file. The format limits .onnx files to 2 GB; the weights of larger
            models are stored in a second file, NAME.onnx.data.
        inputs: normalized images, float32 (batch, 3, height, width); or the pixels of resized RGB
            images, uint8 (batch, height, width, 3), which the program normalizes.
        outputs: logits or scores, float32 (batch, classes); or the input of the head, float32
            (batch, feature_dim). None for logits, or features of a model without a head.
        batch_size: fixed batch size; None for a dynamic one.
        resolution: input size, an int for both sides or (height, width); None for the checkpoint's.
        posemb_method: how to resize position embeddings for another resolution.
        dtype: dtype of the weights; inputs and outputs do not change. int8 (ONNX only) quantizes
            only the blocks' matrices, with one scale each, and activations dynamically.
        opset: ONNX opset version; None for torch's default.
        force: overwrite an existing output.
        offline: never use the network.
        on_progress: called while a checkpoint is downloaded.
        allow_pickle: accept Hub repos that have only pickled weights; no code in them is run.
        on_stage: called with the index of each of `STAGES` when it begins.

    Raises:
        VitError: the model cannot be loaded, or has no head; the output exists or cannot be
            written; the outputs do not match.
        MissingExtraError: a package required for ONNX is not installed.
    """
    path = Path(output).expanduser()
    target = Path(os.path.realpath(path))
    check_choice("inputs", ProgramInputs, inputs)
    check_choice("dtype", ProgramDtype, dtype)
    check_positive(batch_size=batch_size)
    write = _choose_writer(path, dtype, opset)
    if path.exists() and not force:
        raise OutputError("already exists", where=path, hint="use --force to replace it")
    load_options: Any = offline, on_progress, resolution, posemb_method, allow_pickle
    predictor = Predictor(spec, "cpu", "fp32", *load_options)
    if dtype == "int8" and not isinstance(predictor.info.model, ModelConfig):
        what = "a ResNet cannot be exported in int8, which only matrix products support"
        raise ConfigError(what, where=predictor.name, hint="use float16 or float32")
    outputs = _resolve_outputs(predictor, outputs)
    on_stage(0)
    is_replaced = target.suffix.lower() == ".onnx" and target.exists()
    model = reference = Program(predictor.load(), inputs, outputs)
    if dtype == "float16":
        model = Program(Predictor(spec, "cpu", "fp16", *load_options).load(), inputs, outputs)
    sizes = [batch_size] if batch_size else [2, 1, 3]
    specs = _tensor_specs(predictor.info, inputs, outputs, batch_size)
    with _neutral_settings(), atomic_directory(target.parent) as directory:
        examples = [reference.random_images(size, seed=size) for size in sizes]
        expected = [reference(images) for images in examples]
        largest = max(float(values.abs().max()) for values in expected)
        if not math.isfinite(largest):
            what = "some outputs are not finite: the weights contain NaN, or are too large"
            raise CheckpointError(what, where=predictor.name)
        dynamic = None if batch_size else {"images": {0: Dim("batch", min=1)}}
        traced = torch.export.export(model, (examples[0],), dynamic_shapes=dynamic)
        for node in traced.graph.nodes:
            node.meta.pop("stack_trace", None)  # which has paths of this machine
        on_stage(1)
        try:
            exported = write(directory / target.name, traced, specs, predictor.info)
        except OSError as error:
            raise cannot_write(path, error) from error
        on_stage(2)
        actual = [exported.run(images) for images in examples]
        difference = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
        if not difference <= TOLERANCES[dtype] * max(largest, SMALL):  # also catches NaN
            raise OutputError(
                f"{exported.runtime} computes different {outputs}: the largest difference is "
                f"{difference:.2g}, the largest value {largest:.3g}; nothing was written",
                where=path,
                hint="use --dtype float32" if dtype != "float32" else None,
            )
        data = target.with_name(f"{target.name}.data")
        is_stale = is_replaced and data.exists() and not (directory / data.name).exists()
    if is_stale:  # left over from the replaced program
        data.unlink()
    info, opset = predictor.info, exported.opset
    return ExportResult(path, *specs, info, dtype, opset, exported.runtime, difference, largest)


class Program(nn.Module):
    """The module to export: a model with optional pre- and postprocessing.

    Args:
        inference: the model on the CPU, with its encoder in the dtype of the program.
    """

    def __init__(
        self, inference: Inference, inputs: ProgramInputs, outputs: ProgramOutputs
    ) -> None:
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
        """Generate random inputs for the comparison."""
        generator, size = torch.Generator().manual_seed(seed), self.info.model.image_size
        if self.inputs == "uint8":
            return torch.randint(256, (count, *size, 3), generator=generator, dtype=torch.uint8)
        return torch.randn((count, 3, *size), generator=generator)


def _resolve_outputs(predictor: Predictor, outputs: ProgramOutputs | None) -> ProgramOutputs:
    """Resolve the default of `outputs`. Raises ConfigError if the model has no such output."""
    outputs = outputs or ("logits" if predictor.info.model.num_classes else "features")
    check_choice("outputs", ProgramOutputs, outputs)
    if outputs != "features":
        hint = "export its features instead with --outputs features"
        predictor.info.require_head(predictor.name, hint)
    return outputs


def _tensor_specs(
    info: CheckpointInfo, inputs: ProgramInputs, outputs: ProgramOutputs, batch_size: int | None
) -> tuple[TensorSpec, TensorSpec]:
    """Return the specs of input and output. Names follow transformers' ONNX models."""
    batch, (height, width) = batch_size or "batch", info.model.image_size
    input_spec = TensorSpec("pixel_values", "float32", (batch, 3, height, width))
    if inputs == "uint8":
        input_spec = TensorSpec("pixels", "uint8", (batch, height, width, 3))
    size = info.model.feature_dim if outputs == "features" else info.model.num_classes
    return input_spec, TensorSpec(outputs, "float32", (batch, size))


def _metadata_json(info: CheckpointInfo) -> str:
    """Return a checkpoint's header JSON, without provenance."""
    return dataclasses.replace(info, provenance={}).to_metadata()["vit"]


@contextlib.contextmanager
def _neutral_settings() -> Iterator[None]:
    """Set aside the caller's settings of torch, and suppress the exporters' warnings, none of which
    concern the model."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    autocast = torch.autocast("cpu", enabled=False)
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.device("cpu"), autocast:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


# ---------------------------------------------------------------------------------------------
# File formats


class _Export(NamedTuple):
    """A program written to disk."""

    run: Callable[[Tensor], Tensor]
    runtime: str
    opset: int | None = None


_Write = Callable[[Path, ExportedProgram, tuple[TensorSpec, TensorSpec], CheckpointInfo], _Export]


def _choose_writer(path: Path, dtype: ProgramDtype, opset: int | None) -> _Write:
    """Return the writer for a file name. Raises OutputError, ConfigError, MissingExtraError."""
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        if opset is not None and opset not in OPSETS:
            raise ConfigError(f"opset {opset} is not one of {OPSETS[0]} to {OPSETS[-1]}")
        packages = ("onnxscript", "onnxruntime")
        if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
            raise missing_extra(missing, "exporting to ONNX")
        return functools.partial(_write_onnx, dtype=dtype, opset=opset)
    if suffix != ".pt2":
        raise OutputError(f"does not end in {join_or(PROGRAMS)}", where=path)
    if dtype == "int8" or opset is not None:
        option = "dtype int8" if dtype == "int8" else "an opset"
        raise ConfigError(f"{option} requires a .onnx file")
    return _write_pt2


def _write_onnx(
    file: Path,
    program: ExportedProgram,
    specs: tuple[TensorSpec, TensorSpec],
    info: CheckpointInfo,
    dtype: ProgramDtype,
    opset: int | None,
) -> _Export:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    in_spec, out_spec = specs
    dynamic: Any = {"images": {0: "batch"}} if "batch" in in_spec.shape else None
    onnx_program = torch.onnx.export(
        program,
        input_names=[in_spec.name],
        output_names=[out_spec.name],
        dynamic_shapes=dynamic,
        opset_version=opset,
        dynamo=True,
        verbose=False,
    )
    assert onnx_program is not None
    onnx_program.model.metadata_props["vit"] = _metadata_json(info)
    if dtype == "int8":
        _quantize(onnx_program, file)
    else:
        onnx_program.save(str(file))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([out_spec.name], {in_spec.name: images.numpy()})[0])

    runtime = f"onnxruntime {version('onnxruntime')}"
    return _Export(run, runtime, onnx_program.model.opset_imports[""])


def _quantize(program: torch.onnx.ONNXProgram, file: Path) -> None:
    """Write an ONNX file with the blocks' matrices in int8. Heads, which process one vector per
    image, are not quantized."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        unquantized = Path(directory, file.name)
        program.save(str(unquantized))
        quantization.quantize_dynamic(
            unquantized,
            file,
            op_types_to_quantize=["MatMul"],
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=unquantized.with_name(f"{file.name}.data").exists(),
        )


def _write_pt2(
    file: Path, program: ExportedProgram, specs: tuple[TensorSpec, TensorSpec], info: CheckpointInfo
) -> _Export:
    # torch aborts the process if it cannot write to a file.
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"vit": _metadata_json(info)})
    file.write_bytes(buffer.getbuffer())
    loaded = torch.export.load(file).module()
    return _Export(loaded, f"torch {torch.__version__}")
