"""Options of `vit pretrain` and `vit finetune`, each written once.

All default to None, "not given": what is not given comes from --config, else from the defaults of
the task in config.py, which is where these help texts take them from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from vitcli.config import AugmentConfig, DataConfig, TrainConfig
from vitcli.presets import PRESETS


def _option(*names: str, help: str, default: object = None, **settings: Any) -> Any:
    shown = f"  [default: {default}]" if default is not None else ""
    return typer.Option(*names, help=help + shown, **settings)


HELP_GROUPS = {
    "Data and model": (
        *("data", "model", "variant", "overrides", "output", "resolution", "classes"),
        *("val_fraction", "keep_head"),
    ),
    "Recipe": (
        *("preset", "steps", "epochs", "batch_size", "lr", "retrain", "warmup", "schedule"),
        *("optimizer", "weight_decay", "clip_norm", "layer_decay", "freeze", "ema", "patience"),
    ),
    "Loss": ("loss", "class_weights", "balanced_sampling", "label_smoothing", "head_bias"),
    "Augmentation and regularisation": (
        *("crop_area", "flip", "randaugment", "erasing", "mixup", "cutmix", "dropout"),
        "drop_path",
    ),
    "Patches and pixels": ("patch_size", "save_patch_size", "posemb_method", "preprocess"),
    "Runs": (
        *("config", "resume", "force", "seed", "eval_every", "save_every", "save_dtype"),
        "tensorboard",
    ),
    "Machine": ("device", "precision", "workers", "accumulate"),
}
"""Headings of `--help`, and the options below each."""

_RUN = TrainConfig(data=DataConfig(""), output="")
_IMAGE = AugmentConfig()

InitialModel = Annotated[
    str | None,
    _option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="What to start from.",
        default="vit-b16-i21k; offline, the model inside the package",
    ),
]
ContinueModel = Annotated[
    str | None,
    _option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="Go on from this model's weights instead of random ones.",
    ),
]
KeepHead = Annotated[
    bool | None,
    typer.Option(
        "--keep-head",
        help="Keep what the model knows of your classes (matched by id, then name), instead of "
        "starting with a head of zeros.",
    ),
]
Variant = Annotated[
    str | None,
    _option(
        "--variant",
        metavar="NAME/PATCH",
        help="Ti, S, B, L or H, and the patch size; R50+B/16 for a hybrid; R50x1 for a ResNet.",
        default=_RUN.variant,
    ),
]
Overrides = Annotated[
    list[str] | None,
    _option(
        "--set",
        metavar="KEY=VALUE",
        help="A size or choice of the architecture that departs from the variant (depth, width, "
        "pool, posemb, layer_scale, ...).",
    ),
]
Data = Annotated[
    str | None,
    _option(
        "--data",
        metavar="PATH",
        help="A folder of class folders, a CSV (path,label), a parquet file or folder, or tar "
        "shards ({00000..00009} counts).",
    ),
]
Classes = Annotated[
    str | None,
    _option("--classes", metavar="FILE", help="Class names, one a line, in index order."),
]
ValFraction = Annotated[
    float | None,
    _option(
        "--val-fraction",
        metavar="X",
        help="The part held out where the data has no validation part.",
        default=DataConfig.val_fraction,
    ),
]
RunOutput = Annotated[
    str | None,
    _option(
        "--output", "-o", metavar="FOLDER", help="The run's folder.", default="runs/NAME-OF-DATA"
    ),
]
Config = Annotated[
    str | None,
    _option("--config", metavar="FILE", help="Run what a config.json describes; options override."),
]
Resume = Annotated[
    str | None,
    _option("--resume", metavar="FOLDER", help="Go on with the interrupted run in this folder."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")]
Resolution = Annotated[
    str | None,
    _option("--resolution", metavar="N|HxW", help="Pixels.", default="the checkpoint's"),
]
PatchSize = Annotated[
    int | None,
    _option(
        "--patch-size",
        metavar="N",
        min=1,
        help="Train at this patch size; the embedding is resampled.",
    ),
]
SavePatchSize = Annotated[
    int | None,
    _option(
        "--save-patch-size",
        metavar="N",
        min=1,
        help="Store the model for larger images of the same grid, with patches of this size.",
    ),
]
PosembMethod = Annotated[
    Literal["bilinear", "bicubic", "bicubic-hf"] | None,
    _option(
        "--posemb-method",
        help="How position embeddings are resized.",
        default=_RUN.posemb_method,
    ),
]
PreprocessOption = Annotated[
    list[str] | None,
    _option(
        "--preprocess",
        metavar="KEY=VALUE",
        help="A field of the pre-processing (crop_mode, crop_pct, interpolation, mean, std).",
    ),
]
PresetName = Annotated[
    str | None,
    _option(
        "--preset",
        metavar="|".join(PRESETS),
        help="The paper's recipe for such data; options override.",
        autocompletion=lambda incomplete: [n for n in PRESETS if n.startswith(incomplete)],
    ),
]
Steps = Annotated[
    int | None, _option("--steps", metavar="N", min=1, help="Optimizer steps.", default="auto rule")
]
Epochs = Annotated[
    float | None, _option("--epochs", metavar="X", help="Instead of --steps: passes over the data.")
]
BatchSize = Annotated[
    int | None,
    _option(
        "--batch-size", "-b", metavar="N", min=1, help="Images in a step.", default="auto rule"
    ),
]
Accumulate = Annotated[
    int | None,
    _option(
        "--accumulate",
        metavar="N",
        min=1,
        help="Parts that a batch is split into.",
        default="by memory",
    ),
]
Optimizer = Annotated[
    Literal["sgd", "adam", "adamw"] | None,
    _option(
        "--optimizer",
        help="sgd (momentum 0.9), adam, or adamw.  [default: sgd to finetune, adamw to pretrain]",
    ),
]
Lr = Annotated[
    str | None,
    _option(
        "--lr",
        metavar="X[,X...]",
        help="Peak learning rate. Of several, the best on the validation part is chosen, and "
        "trains on everything.",
        default="auto rule",
    ),
]
Retrain = Annotated[
    bool | None,
    typer.Option(
        "--retrain/--no-retrain",
        help="After a sweep: train once more on everything, or keep the best run of the sweep.  "
        "[default: retrain]",
    ),
]
WeightDecay = Annotated[
    float | None,
    _option(
        "--weight-decay",
        metavar="X",
        help="Of matrices alone.  [default: 0 to finetune, 0.1 to pretrain]",
    ),
]
Warmup = Annotated[
    int | None,
    _option("--warmup", metavar="N", min=0, help="Steps of linear warm-up.", default="auto rule"),
]
Schedule = Annotated[
    Literal["cosine", "linear", "constant"] | None,
    _option("--schedule", help="Decay after the warm-up.", default=_RUN.schedule),
]
ClipNorm = Annotated[
    float | None,
    _option("--clip-norm", metavar="X", help="Global gradient norm.", default=_RUN.clip_norm),
]
Loss = Annotated[
    Literal["softmax", "sigmoid"] | None,
    _option("--loss", help="Cross-entropy.", default=_RUN.loss),
]
LabelSmoothing = Annotated[
    float | None,
    _option(
        "--label-smoothing",
        metavar="X",
        help="Spread over all classes.",
        default=_RUN.label_smoothing,
    ),
]
HeadBias = Annotated[
    float | None,
    _option(
        "--head-bias",
        metavar="X",
        help="Initial bias of the head, as in -10.",
        default=_RUN.head_bias,
    ),
]
ClassWeights = Annotated[
    str | None,
    _option(
        "--class-weights",
        metavar="balanced|FILE",
        help="How much each class counts in the loss: balanced, inversely to its number of "
        "images, or a file of lines CLASS,WEIGHT.",
        default="all alike",
    ),
]
BalancedSampling = Annotated[
    bool | None,
    typer.Option(
        "--balanced-sampling", help="Show as many images of every class, small ones more often."
    ),
]
Freeze = Annotated[
    str | None,
    _option(
        "--freeze",
        metavar="backbone|N",
        help="Do not train the backbone (a linear probe), or the patch embedding and the first N "
        "blocks.",
        default="train all",
    ),
]
LayerDecay = Annotated[
    float | None,
    _option(
        "--layer-decay",
        metavar="X",
        help="Factor on the learning rate from each layer to the one below it, as 0.75.",
        default="off",
    ),
]
Ema = Annotated[
    float | None,
    _option(
        "--ema",
        metavar="X",
        help="Decay of a running (Polyak) average of the weights, as 0.9999; the better on "
        "validation is stored.",
        default="off",
    ),
]
Patience = Annotated[
    int | None,
    _option(
        "--patience",
        metavar="N",
        min=1,
        help="End the run after N evaluations without a better accuracy.",
        default="off",
    ),
]
Dropout = Annotated[
    float | None,
    _option(
        "--dropout", metavar="X", help="After each dense layer but q, k, v.", default=_RUN.dropout
    ),
]
DropPath = Annotated[
    float | None,
    _option(
        "--drop-path",
        metavar="X",
        help="Stochastic depth of the last block.",
        default=_RUN.drop_path,
    ),
]
CropArea = Annotated[
    str | None,
    _option(
        "--crop-area",
        metavar="MIN,MAX",
        help="Inception crop: part of the area kept.",
        default="{},{:g}".format(*_IMAGE.crop_area),
    ),
]
Flip = Annotated[
    bool | None,
    typer.Option("--flip/--no-flip", help="Mirror half of the images.  [default: flip]"),
]
RandAugment = Annotated[
    str | None,
    _option(
        "--randaugment", metavar="N,M", help="Layers and magnitude, as in 2,10.", default="off"
    ),
]
Erasing = Annotated[
    float | None,
    _option(
        "--erasing", metavar="X", help="Probability of random erasing.", default=_IMAGE.erasing
    ),
]
Mixup = Annotated[
    float | None, _option("--mixup", metavar="X", help="Alpha of mixup.", default=_IMAGE.mixup)
]
Cutmix = Annotated[
    float | None, _option("--cutmix", metavar="X", help="Alpha of cutmix.", default=_IMAGE.cutmix)
]
Seed = Annotated[
    int | None,
    _option("--seed", metavar="N", min=0, help="Decides all randomness.", default=_RUN.seed),
]
TrainDevice = Annotated[
    str | None,
    _option(
        "--device", metavar="auto|cpu|cuda[:N]|mps", help="What computes.", default=_RUN.device
    ),
]
TrainPrecision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"] | None,
    _option("--precision", help="Of activations.", default=_RUN.precision),
]
Workers = Annotated[
    int | None,
    _option("--workers", metavar="N", min=0, help="Processes that decode.", default="by device"),
]
EvalEvery = Annotated[
    int | None,
    _option(
        "--eval-every", metavar="N", min=1, help="Steps between evaluations.", default="auto rule"
    ),
]
SaveEvery = Annotated[
    int | None,
    _option(
        "--save-every", metavar="N", min=1, help="Steps between states.", default="one a minute"
    ),
]
TensorBoard = Annotated[
    bool | None,
    typer.Option(
        "--tensorboard/--no-tensorboard",
        help="Write the figures for TensorBoard too, under FOLDER/tensorboard.  "
        "[default: no-tensorboard]",
    ),
]
SaveDtype = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    _option("--save-dtype", help="Of the stored weights.", default=_RUN.save_dtype),
]
