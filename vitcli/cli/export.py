"""`vit export`."""

from __future__ import annotations

from dataclasses import dataclass

from vitcli.architectures.variants import variant_name
from vitcli.cli import output, progress
from vitcli.cli.options import CHECKPOINT, RESIZED, RESOLUTION, DownloadOptions, ending, fetching
from vitcli.cli.parameters import command
from vitcli.config import (
    POSEMB_METHODS,
    PosembMethod,
    ProgramDtype,
    ProgramInputs,
    ProgramOutputs,
    Size,
)
from vitcli.fields import option, parse_size
from vitcli.weight_files import PROGRAMS


@dataclass(frozen=True, kw_only=True)
class Export(DownloadOptions):
    """Options of `vit export`."""

    source: str = option(..., "SRC", CHECKPOINT)
    target: str = option(
        ..., "DST", "Output: a .onnx or .pt2 (torch.export) file.", parse=ending(*PROGRAMS)
    )
    inputs: ProgramInputs = option(
        "normalized",
        "--inputs",
        "What the program takes. normalized: images (N, 3, H, W), normalized with the model's mean "
        "and std; uint8: the pixels of RGB images (N, H, W, 3), which the program normalizes.",
    )
    outputs: ProgramOutputs | None = option(
        None,
        "--outputs",
        "What the program returns: logits, their scores (softmax or sigmoid), or the features (the "
        "input of the head).  [default: logits; features if the model has no head]",
    )
    batch_size: int | None = option(
        None, "--batch-size -b N", "Fixed batch size.  [default: any]", min=1, max=65536
    )
    resolution: Size | None = option(None, "--resolution N|HxW", RESIZED, parse=parse_size)
    posemb_method: PosembMethod = option(
        "bilinear", "--posemb-method", POSEMB_METHODS, requires=RESOLUTION
    )
    dtype: ProgramDtype = option(
        "float32",
        "--dtype",
        "Data type of the weights; inputs and outputs keep theirs. int8 (.onnx only) quantizes the "
        "matrices of the blocks.",
    )
    opset: int | None = option(
        None, "--opset N", "ONNX opset version, 18 to 23.  [default: torch's]", min=18, max=23
    )
    force: bool = option(False, "--force", "Overwrite existing output.")


@command(Export)
def export(args: Export) -> None:
    """Export a model to ONNX or torch.export.

    The exported program runs without vit. Before it is written, its outputs for random images are
    compared with the model's. The preprocessing and the classes are stored in the file as JSON.

    \b
    Examples:
      vit export runs/pets pets.onnx
      vit export vit-b16-i1k-384 b16.pt2 --inputs uint8 --outputs scores
    """
    output.check_writable(args.target)
    from vitcli import program

    with fetching(args) as kwargs, progress.Display() as display:

        def show(stage: int) -> None:
            count = len(program.STAGES)
            display.show(program.STAGES[stage], stage, count, [f"step {stage + 1} of {count}"])

        exported = program.export(
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
            **kwargs,
        )
    if args.json:
        fields = {name: value for name, value in vars(exported).items() if name != "info"}
        tensors = {"input": exported.input._asdict(), "result": exported.result._asdict()}
        output.json_line(
            {"source": args.source, **fields, "output": str(exported.output), **tensors}
        )
        return
    opset = f", opset {exported.opset}" if exported.opset else ""
    output.line(
        f"wrote {exported.output}: {variant_name(exported.info.model)}, {exported.dtype}{opset}"
    )
    for kind, tensor in (("input", exported.input), ("output", exported.result)):
        output.line(f"{kind} {tensor.name}: {tensor.dtype} ({', '.join(map(str, tensor.shape))})")
    output.line(
        f"verified with {exported.runtime}: on random images, its {exported.result.name} differ "
        f"from vit's by at most {exported.difference:.2g} (largest value {exported.largest:.3g})"
    )
