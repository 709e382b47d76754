"""Configuration of a training run: all options of `vit pretrain` and `vit finetune`.

A new option is a new field here; help, parsing, `--config` and config.json follow from it.
Standard library only.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

from vitcli.architectures.variants import architecture
from vitcli.config import (
    AUGMENTATION,
    CHANGE_PREPROCESS,
    CLASSIFY,
    DATA,
    HUB,
    MACHINE,
    POSEMB_METHODS,
    Architecture,
    AugmentConfig,
    DataConfig,
    ModelConfig,
    PosembMethod,
    Precision,
    Preprocess,
    SaveDtype,
    Size,
    model_or_path,
)
from vitcli.errors import ConfigError
from vitcli.fields import (
    Requirement,
    check_fields,
    from_text,
    key_value,
    limited,
    option,
    parse_device,
    parse_directory,
    parse_size,
)
from vitcli.machine import RANK_TIMEOUT, is_launched
from vitcli.train.objective_config import OBJECTIVE, MaskingConfig, Objective

Task = Literal["pretrain", "finetune"]

# Headings of `--help`.
RECIPE = "Recipe"
LOSS = "Loss"
PATCHES = "Patches and preprocessing"
RUN = "Run"

NEW_MODEL = Requirement(
    "cannot be combined with --model: the checkpoint determines the architecture",
    lambda run: run.model is None,
)
TRAINED_BLOCKS = Requirement(
    "has no effect with --freeze backbone", lambda run: run.freeze != "backbone"
)
SOFTMAX = Requirement(
    "requires --objective classify and --loss softmax",
    lambda run: run.objective == "classify" and run.loss == "softmax",
)
TEACHER = Requirement("requires --teacher", lambda run: run.teacher is not None)
DEVICES = Requirement(
    "requires --devices or torchrun", lambda run: bool(run.devices) or is_launched()
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run of `vit pretrain` or `vit finetune`; None means automatic or off."""

    data: DataConfig
    train_images: int | None = option(
        None,
        "--train-images N",
        "Number of training images; required if shards at URLs have no sizes.json next to them.",
        DATA,
        requires=Requirement(
            "requires --data to be shards at URLs",
            lambda run: run.data.is_remote and not run.data.path.startswith(HUB),
        ),
        min=1,
    )
    streams: int | None = option(
        None,
        "--streams N",
        "Number of parallel streams, across all workers, for reading shards at URLs or a dataset "
        "on the Hub; affects the order of the images.  [default: the number of shards, at most 64]",
        requires=Requirement(
            "requires --data to be shards at URLs or a dataset on the Hub",
            lambda run: run.data.is_remote,
        ),
        min=1,
    )
    task: Task = "finetune"
    """Determines the initial weights and the defaults; the training loop is the same."""
    command: str = ""
    """The command line of the user, for the model card."""
    note: str = ""
    """A line for the model card."""
    model: str | None = option(
        None,
        "--model -m NAME|PATH|REPO",
        {
            "": "Model to start from: a name (see `vit models`), run directory, checkpoint file "
            "or Hub repo.  [default: none (random weights)]",
            "finetune": "Model to start from: a name (see `vit models`), run directory, checkpoint "
            "file or Hub repo.  [default: vit-b16-i21k; default-pretrained if "
            "vit-b16-i21k is not downloaded and the Hub cannot be reached]",
        },
        parse=model_or_path,
    )
    keep_head: bool = option(
        False,
        "--keep-head",
        "Keep the head's weights for classes that the model already has (matched by id, then by "
        "name) instead of starting from zero.",
        task="finetune",
    )
    variant: str = option(
        "Ti/16",
        "--variant NAME/PATCH",
        "Architecture: Ti, S, B, L or H with a patch size, such as B/16; a hybrid, such as "
        "R50+B/16; or a BiT ResNet, such as R50x1. With --preset, the default is B/16 (S/16 for "
        "s16-i1k).",
        task="pretrain",
        requires=NEW_MODEL,
    )
    overrides: dict[str, Any] = option(
        {},
        "--set KEY=VALUE",
        "Change a field of the architecture (depth, width, pool, posemb, layer_scale, ...), for "
        "example depth=6; repeatable. Given an unknown field or value, vit lists the valid ones.",
        parse=key_value(
            ModelConfig, stem="--variant", image_size="--resolution", num_classes="the dataset"
        ),
        task="pretrain",
        requires=NEW_MODEL,
    )
    resolution: Size | None = option(
        None,
        "--resolution N|HxW",
        {
            "": "Input size in pixels; position embeddings are resized to match.  [default: the "
            "model's]",
            "pretrain": "Input size in pixels; position embeddings of --model are resized to "
            "match.  [default: the model's; 224 from scratch]",
        },
        parse=parse_size,
    )
    posemb_method: PosembMethod = option(
        "bilinear",
        "--posemb-method",
        POSEMB_METHODS,
        requires=Requirement(
            "has no effect unless --resolution resizes position embeddings",
            lambda run: bool(run.resolution) and (run.task == "finetune" or bool(run.model)),
        ),
    )

    objective: Objective = option(
        "classify",
        "--objective",
        "What to predict: the class of each image (classify) or, without labels, the colors of "
        "corrupted patches (masked-patch) or the pixels of hidden patches (mae). masked-patch "
        "changes the defaults to --optimizer adam --weight-decay 0, and mae to --betas 0.9,0.95 "
        "--weight-decay 0.05 --scale 0.2,1.",
        OBJECTIVE,
        task="pretrain",
    )
    masking: MaskingConfig = MaskingConfig()

    steps: int | None = option(
        None,
        "--steps N",
        {
            "": "Number of optimizer steps.  [default: auto]",
            "pretrain": "Number of optimizer steps.  [default: 90 epochs]",
        },
        RECIPE,
        min=1,
    )
    epochs: float | None = option(
        None,
        "--epochs X",
        "Number of passes over the training split; alternative to --steps.",
        above=0,
        max=1e6,
    )
    batch_size: int | None = option(
        None, "--batch-size -b N", "Images per optimizer step.  [default: auto]", min=1
    )
    lr: float | None = option(
        None,
        "--lr X,...",
        "Peak learning rate. If several are given, each is tried; a final run then trains on the "
        "training and validation images with the rate that reached the best validation accuracy.  "
        "[default: auto]",
        parse=functools.partial(from_text, tuple[float, ...]),
        above=0,
    )
    sweep: tuple[float, ...] = limited((), above=0)
    """Peak learning rates to try; the one with the best validation accuracy becomes `lr`."""
    retrain: bool = option(
        True,
        "--retrain/--no-retrain",
        "With several learning rates: train the final run, or keep the best run of the sweep.",
        requires=Requirement("requires several values of --lr", lambda run: bool(run.sweep)),
    )
    warmup: int | None = option(
        None, "--warmup N", "Number of linear warm-up steps.  [default: auto]", min=0
    )
    schedule: Literal["cosine", "linear", "constant"] = option(
        "cosine", "--schedule", "Learning rate after warm-up; cosine and linear decay to 0."
    )
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = option(
        "sgd",
        "--optimizer",
        "Optimizer: SGD with momentum, Adam, AdamW, or Muon for the weight matrices of the blocks "
        "and AdamW for everything else.",
    )
    momentum: float = option(
        0.9,
        "--momentum X",
        "Momentum of SGD.",
        requires=Requirement("requires --optimizer sgd", lambda run: run.optimizer == "sgd"),
        min=0,
        below=1,
    )
    betas: tuple[float, float] = option(
        (0.9, 0.999),
        "--betas X,X",
        "Betas of Adam and AdamW, including the AdamW used with Muon.",
        requires=Requirement(
            "has no effect with --optimizer sgd", lambda run: run.optimizer != "sgd"
        ),
        min=0,
        below=1,
    )
    weight_decay: float = option(
        0.0,
        "--weight-decay X",
        "Weight decay, applied to weight matrices only; decoupled for AdamW and Muon.",
        min=0,
    )
    decay_by: Literal["lr", "schedule"] = option(
        "lr",
        "--decay-by",
        "Factor of decoupled weight decay at each step. lr: the learning rate, as in PyTorch and "
        "the ViT paper; schedule: the learning rate divided by its peak, as in big_vision.",
        requires=Requirement("requires --weight-decay above 0", lambda run: run.weight_decay > 0),
    )
    clip_norm: float | None = option(
        1.0, "--clip-norm X", "Clip gradients to a global norm of X; 0 turns it off.", min=0
    )
    layer_decay: float | None = option(
        None,
        "--layer-decay X",
        "Multiply the learning rate by X for each layer below the head, for example 0.75.  "
        "[default: off]",
        task="finetune",
        requires=TRAINED_BLOCKS,
        above=0,
        max=1,
    )
    freeze: Literal["backbone"] | int | None = option(
        None,
        "--freeze backbone|N",
        "Freeze the backbone (linear probe), or the patch embedding and the first N blocks.  "
        "[default: off]",
        task="finetune",
        requires=Requirement(
            "cannot be combined with --lora; --lora 0 turns it off", lambda run: not run.lora
        ),
        min=0,
    )
    lora: int | None = option(
        None,
        "--lora RANK",
        "LoRA: train only the head and updates of this rank to the blocks' weight matrices; the "
        "updates are merged into the stored weights. Changes the defaults to --optimizer adamw and "
        "ten times the learning rate.  [default: 0, off]",
        task="finetune",
        requires=Requirement("cannot be combined with --freeze", lambda run: run.freeze is None),
        min=0,
    )
    ema: float | None = option(
        None,
        "--ema X",
        "Keep an exponential moving average of the weights with decay X, for example 0.9999, and "
        "store the weights or their average, whichever does better on the validation split.  "
        "[default: 0, off]",
        min=0,
        below=1,
    )
    store: Literal["best", "last"] = option(
        "best",
        "--store",
        "Weights to store: those with the best validation score (if tied, the lowest loss), or the "
        "last; without a validation split, always the last.",
    )
    patience: int | None = option(
        None,
        "--patience N",
        "Stop after N evaluations without a better validation score.  [default: 0, off]",
        min=0,
    )

    loss: Literal["softmax", "sigmoid"] = option(
        "softmax",
        "--loss",
        "Softmax cross-entropy, or sigmoid cross-entropy per class.",
        LOSS,
        requires=Requirement(
            "requires --objective classify, and must be softmax with --teacher",
            lambda run: run.objective == "classify" and (run.loss == "softmax" or not run.teacher),
        ),
    )
    teacher: str | None = option(
        None,
        "--teacher NAME|PATH|REPO",
        "Knowledge distillation: match this model's scores for the same augmented images, resized "
        "to its input size. It must have all of the dataset's classes.  [default: off]",
        parse=model_or_path,
        requires=SOFTMAX,
    )
    teacher_weight: float = option(
        1.0,
        "--teacher-weight X",
        "Weight of the distillation loss; the loss on the labels gets the rest. With 1, the labels "
        "are not used.",
        requires=TEACHER,
        above=0,
        max=1,
    )
    temperature: float = option(
        1.0,
        "--temperature X",
        "Distillation temperature: the logits of both models are divided by it.",
        requires=TEACHER,
        above=0,
    )
    class_weights: Literal["balanced"] | dict[str, float] | None = option(
        None,
        "--class-weights balanced|FILE",
        "Weight of each class in the loss: balanced (inversely proportional to its number of "
        "images), or a file with a class, a comma or tab, and a weight on each line.  "
        "[default: all 1]",
        parse=str,
        requires=CLASSIFY,
    )
    balanced_sampling: bool = option(
        False,
        "--balanced-sampling",
        "Sample all classes equally often, repeating images of small classes.",
        requires=CLASSIFY,
    )
    label_smoothing: float = option(
        0.0,
        "--label-smoothing X",
        "Label smoothing: probability to spread evenly over all classes.",
        requires=CLASSIFY,
        min=0,
        below=1,
    )
    head_bias: float = option(
        0.0,
        "--head-bias X",
        "Initial bias of the head, except for kept classes; for example -10 with --loss sigmoid.",
        requires=CLASSIFY,
    )

    augment: AugmentConfig = AugmentConfig()
    dropout: float = option(
        0.0,
        "--dropout X",
        "Dropout probability after adding the position embeddings and after every linear layer "
        "except the query, key and value projections.",
        AUGMENTATION,
        requires=TRAINED_BLOCKS,
        min=0,
        below=1,
    )
    drop_path: float = option(
        0.0,
        "--drop-path X",
        "Stochastic depth: drop probability of the last block, rising linearly from 0 at the "
        "first.",
        requires=TRAINED_BLOCKS,
        min=0,
        below=1,
    )

    patch_size: int | None = option(
        None,
        "--patch-size N",
        "Train with patches of N x N pixels; the patch embedding of --model is resampled.  "
        "[default: the model's]",
        PATCHES,
        requires=Requirement(
            "cannot be combined with --set patch_size",
            lambda run: "patch_size" not in run.overrides,
        ),
        min=1,
    )
    save_patch_size: int | None = option(
        None,
        "--save-patch-size N",
        "Store the model with patches of N x N pixels; the grid stays the same, so the input size "
        "changes.  [default: as trained]",
        min=1,
    )
    preprocess: dict[str, Any] = option(
        {},
        "--preprocess KEY=VALUE",
        CHANGE_PREPROCESS,
        parse=key_value(Preprocess, size="--resolution"),
    )

    output: str = option(
        ...,
        "--output -o DIR",
        "Directory to write the run to.  [default: runs/DATASET]",
        RUN,
        parse=parse_directory,
    )
    seed: int = option(
        0,
        "--seed N",
        "Random seed for initial weights, data order, augmentation and dropout.",
        min=0,
        max=2**32 - 1,
    )
    eval_every: int | None = option(
        None, "--eval-every N", "Steps between evaluations.  [default: auto]", min=1
    )
    probe_every: int | None = option(
        None,
        "--probe-every N",
        "Steps between few-shot evaluations: least squares on the features of 5 and 10 training "
        "images per class.  [default: 0, off]",
        task="pretrain",
        min=0,
    )
    strict: bool = option(
        False,
        "--strict",
        "Check all images first and stop if one cannot be read, instead of skipping it.",
    )
    max_bad: int | None = option(
        None,
        "--max-bad N",
        "Stop if more than N images cannot be read.  [default: a tenth of the training images, "
        "at least 100]",
        min=0,
        on_resume=True,
    )
    log_every: int | None = option(
        None, "--log-every N", "Steps between lines of metrics.jsonl.  [default: auto]", min=1
    )
    save_every: int | None = option(
        None,
        "--save-every N",
        "Steps between saved states, which --resume continues from.  [default: once a minute]",
        min=1,
    )
    save_dtype: SaveDtype = option("float32", "--save-dtype", "Data type of the stored weights.")
    tensorboard: bool = option(
        False, "--tensorboard/--no-tensorboard", "Also write TensorBoard logs to DIR/tensorboard."
    )

    device: str = option(
        "auto",
        "--device auto|cpu|cuda[:N]|mps",
        "Device to train on; auto is the first available of cuda, mps and cpu.",
        MACHINE,
        parse=parse_device,
        on_resume=True,
    )
    precision: Precision = option(
        "auto",
        "--precision",
        "Precision of activations; auto is bf16 if the hardware supports it, else fp32. Weights "
        "and optimizer state stay fp32.",
    )
    workers: int | None = option(
        None,
        "--workers N",
        "Number of processes that decode images.  [default: 1 on a CPU; with a GPU, one per core "
        "up to 16]",
        on_resume=True,
        min=0,
        max=1024,
    )
    accumulate: int | None = option(
        None,
        "--grad-accum --accumulate N",
        "Accumulate gradients over N micro-batches.  [default: depends on free memory]",
        on_resume=True,
        min=1,
    )

    shard: bool = option(
        False,
        "--shard",
        "Shard weights, gradients and optimizer state over the devices (FSDP2), for models that "
        "do not fit on one.",
        on_resume=True,
        requires=DEVICES,
    )
    compile: bool = option(
        False, "--compile", "Compile the blocks of the model with torch.compile.", on_resume=True
    )
    grad_checkpointing: bool = option(
        False,
        "--grad-checkpointing",
        "Store only the input of each block and recompute the rest in the backward pass: less "
        "memory, about a third more time.",
        on_resume=True,
        requires=TRAINED_BLOCKS,
    )
    rank_timeout: float = option(
        RANK_TIMEOUT,
        "--rank-timeout SECONDS",
        "With several devices: stop the run if a rank does not respond for this long.",
        on_resume=True,
        requires=DEVICES,
        above=0,
        max=1e7,
    )

    def new_architecture(self) -> Architecture:
        """Return the architecture given by `variant` and `overrides`. Raises ConfigError."""
        patch = {"patch_size": (self.patch_size,) * 2} if self.patch_size else {}
        fields = {"image_size": self.resolution or (224, 224), **patch, **self.overrides}
        return architecture(self.variant, **fields)

    def __post_init__(self) -> None:
        check_fields(self)
        for rate in self.sweep:
            if self.sweep.count(rate) > 1:
                raise ConfigError(f"--lr: {rate:g} is given more than once")
        if self.decay_by == "schedule" and self.optimizer not in ("adamw", "muon"):
            raise ConfigError(
                f"--decay-by schedule cannot be used with {self.optimizer}",
                hint="use --optimizer adamw or muon, or --decay-by lr",
            )
        if self.class_weights == "balanced" and self.balanced_sampling:
            raise ConfigError(
                "--class-weights balanced and --balanced-sampling cannot be combined",
                hint="leave out one of them",
            )
        if self.sweep and self.objective != "classify":
            raise ConfigError("several values of --lr require --objective classify")
        if self.batch_size and self.batch_size < (self.accumulate or 1):
            raise ConfigError(
                f"--grad-accum {self.accumulate} exceeds --batch-size {self.batch_size}"
            )
        # Bilinear, since antialias=False requires it and the model may set it.
        Preprocess(**{"interpolation": "bilinear", **self.preprocess})
        if self.task == "pretrain" and self.model is None:
            self.new_architecture()
