"""`vit export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vitcli.checkpoints.info import assumptions_text
from vitcli.cli import output
from vitcli.cli.options import CHECKPOINT, RESIZED, DownloadOptions, ending, fetching
from vitcli.cli.parameters import UsageError, command
from vitcli.config import PosembMethod, Size, variant_name
from vitcli.fields import option, parse_size

if TYPE_CHECKING:
    from vitcli.program import ExportResult, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Export(DownloadOptions):
    """Options of `vit export`."""

    source: str = option(..., "SRC", CHECKPOINT)
    target: str = option(
        ..., "DST", "Output: a .onnx or .pt2 (torch.export) file.", parse=ending(".onnx", ".pt2")
    )
    inputs: Literal["normalized", "uint8"] = option(
        "normalized",
        "--inputs",
        "What the program takes. normalized: images (N, 3, H, W), normalized with the model's mean "
        "and std; uint8: the pixels of RGB images (N, H, W, 3), which the program normalizes.",
    )
    outputs: Literal["logits", "scores", "features"] | None = option(
        None,
        "--outputs",
        "What the program returns: logits, their scores (softmax or sigmoid), or the features that "
        "the head reads.  [default: logits; features if the model has no head]",
    )
    batch_size: int | None = option(
        None, "--batch-size -b N", "Fixed batch size.  [default: any]", min=1
    )
    resolution: Size | None = option(None, "--resolution N|HxW", RESIZED, parse=parse_size)
    posemb_method: PosembMethod = option(
        "bilinear", "--posemb-method", "Interpolation method for position embeddings."
    )
    dtype: Literal["float32", "float16", "int8"] = option(
        "float32",
        "--dtype",
        "Data type of the weights; inputs and outputs keep theirs. int8 (.onnx only) quantizes the "
        "matrices of the blocks.",
    )
    opset: int | None = option(
        None,
        "--opset N",
        "Version of the ONNX operators, 18 to 23.  [default: torch's]",
        min=18,
        max=23,
    )
    force: bool = option(False, "--force", "Overwrite existing output.")


@command(Export)
def export(args: Export) -> None:
    """Export a model to ONNX or torch.export.

    The result runs without vit. Before it is written, its output for random images is compared with
    the model's. How images are prepared, and the classes, are stored in the file as JSON.

    \b
    Examples:
      vit export runs/pets pets.onnx
      vit export vit-b16-i1k-384 b16.pt2 --inputs uint8 --outputs scores
    """
    if not args.target.lower().endswith(".onnx"):
        for given, name in ((args.opset, "--opset"), (args.dtype == "int8", "--dtype int8")):
            if given:
                raise UsageError(f"{name} requires a .onnx file")
    output.check_writable(args.target)
    from vitcli import program

    with fetching(args) as how, output.Meter("exporting", len(program.STAGES)) as meter:

        def show(stage: int) -> None:
            numbers = [f"step {stage + 1} of {meter.total}"]
            meter.show(program.STAGES[stage], stage, meter.total, numbers)

        job = program.export(
            args.source,
            args.target,
            inputs=args.inputs,
            outputs=args.outputs,
            batch_size=args.batch_size,
            resolution=args.resolution,
            posemb_method=args.posemb_method,
            dtype=args.dtype,
            opset=args.opset,
            force=args.force,
            on_stage=show,
            **how,
        )
    if assumed := assumptions_text(job.info):
        output.note(f"{args.source}: {assumed}")
    if args.json:
        output.json_line(_as_json(args.source, job))
        return
    operators = f", opset {job.opset}" if job.opset else ""
    output.line(
        output.printable(
            f"wrote {job.output}: {variant_name(job.info.model)}, {job.dtype}{operators}"
        )
    )
    for what, port in (("input", job.input), ("output", job.result)):
        output.line(f"{what} {port.name}: {port.dtype} ({', '.join(map(str, port.shape))})")
    output.line(
        f"verified with {job.runtime}: on random images, its {job.result.name} differ from vit's "
        f"by at most {job.difference:.2g} (largest value {job.largest:.3g})"
    )


def _as_json(source: str, job: ExportResult) -> dict[str, Any]:
    def port(about: TensorSpec) -> dict[str, Any]:
        return {"name": about.name, "dtype": about.dtype, "shape": about.shape}

    return {
        "source": source,
        "output": str(job.output),
        "input": port(job.input),
        "result": port(job.result),
        "dtype": job.dtype,
        "opset": job.opset,
        "runtime": job.runtime,
        "difference": job.difference,
        "largest": job.largest,
    }
