"""Configuration of preprocessing, datasets, augmentation and few-shot evaluation.

Standard library only, so that commands can read a configuration before (or without) importing
torch. Architectures are configured in `architectures/`, whose names this module re-exports.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vitcli.architectures.resnet import BiTConfig as BiTConfig
from vitcli.architectures.resnet import ResNetConfig as ResNetConfig
from vitcli.architectures.resnet import Size as Size
from vitcli.architectures.variants import architecture as architecture
from vitcli.architectures.variants import bit_config as bit_config
from vitcli.architectures.variants import looks_like_variant as looks_like_variant
from vitcli.architectures.variants import model_config as model_config
from vitcli.architectures.variants import variant_name as variant_name
from vitcli.architectures.vit import Activation as Activation
from vitcli.architectures.vit import Architecture as Architecture
from vitcli.architectures.vit import ModelConfig as ModelConfig
from vitcli.architectures.vit import Pool as Pool
from vitcli.errors import ConfigError, DataError
from vitcli.fields import Requirement, check_fields, from_text, limited, option
from vitcli.words import public_url

PosembMethod = Literal["bilinear", "bicubic", "bicubic-hf"]
POSEMB_METHODS = (
    "Interpolation of position embeddings: the ViT paper's (bilinear), timm's (bicubic) or "
    "transformers' (bicubic-hf)."
)
"""Help of `--posemb-method`."""
Score = Literal["softmax", "sigmoid", "none"]
"""The function from logits to scores; none: a regression, whose outputs are used as they are."""
Precision = Literal["auto", "fp32", "bf16", "fp16"]
SaveDtype = Literal["float32", "float16", "bfloat16"]
View = Literal["attention", "heads", "pca", "distance", "filters", "posemb"]
"""What `vit inspect` shows."""
MapMethod = Literal["rollout", "block", "gradient"]
"""How `vit inspect` computes an attention map."""
ProgramInputs = Literal["normalized", "uint8"]
ProgramOutputs = Literal["logits", "scores", "features"]
ProgramDtype = Literal["float32", "float16", "int8"]
"""What a program written by `vit export` takes and returns, and the dtype of its weights."""


# ---------------------------------------------------------------------------------------------
# Inputs and outputs


@dataclass(frozen=True)
class Preprocess:
    """How an image is converted to model input. From the checkpoint, never from a default."""

    size: Size = limited((224, 224), min=1)
    """Height and width of the model's input."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from RGB values in [0, 1]."""
    std: tuple[float, float, float] = limited((0.5, 0.5, 0.5), above=0)
    """Divisor of the RGB values after the mean is subtracted."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "lanczos"] = "bicubic"
    """Pillow's resampling filter."""
    crop_pct: float = limited(1.0, above=0, max=1)
    """Fraction of the resized image that the crop keeps: images are resized to size / crop_pct."""
    crop_mode: Literal["center", "squash", "border"] = "center"
    """center: resize the shorter side, crop the center; squash: resize both sides; border: resize
    the longer side, pad with the mean (letterbox). The names are timm's."""
    antialias: bool = True
    """False (bilinear only): interpolate each pixel from its four nearest neighbors, even when
    downsampling, as the authors' code does (tf.image.resize)."""
    crop_rounding: Literal["even", "down"] = "even"
    """Offset of the crop if its margins differ by a pixel: even: rounded to an even number (timm);
    down: the smaller margin (transformers, big_vision)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.antialias and self.interpolation != "bilinear":
            raise ConfigError(
                f"antialias=False requires bilinear interpolation, not {self.interpolation}"
            )


class ClassLabel(NamedTuple):
    """A class: its ID (WordNet synset if known, else the directory name) and its name.

    Names are not unique: ImageNet-1k has two classes called "crane".
    """

    id: str
    name: str


# ---------------------------------------------------------------------------------------------
# Data and training

# Headings of `--help`.
DATA = "Data and model"
AUGMENTATION = "Augmentation and regularization"
FEWSHOT = "Protocol"
MACHINE = "Machine"

CLASSIFY = Requirement("requires --objective classify", lambda run: run.objective == "classify")

_LOCAL_KINDS = (
    "a directory with a subdirectory per class, a CSV file (path,label), a Parquet file or "
    "directory"
)
DATA_KINDS = (
    f"{_LOCAL_KINDS}, tar shards by path or URL, such as 'train-{{00000..00009}}.tar' (quoted for "
    "the shell), or a dataset on the Hub, org/name"
)
"""The kinds of dataset that `--data` accepts; `data/dataset.py` opens them."""
DATA_HINT = f"pass {DATA_KINDS}"


CLASS_LIST = (
    "File that lists the dataset's classes in index order, for labels that are indices; each line "
    "is an id, optionally followed by a tab and a name.  [default: the dataset's classes.txt, if "
    "there is one]"
)
"""The help of `--classes`; `data/classes.py` reads the file."""
CHANGE_PREPROCESS = (
    "Change a field of the preprocessing, for example crop_pct=0.9; repeatable. Fields: mean and "
    "std (a number, or R,G,B), interpolation (nearest, bilinear, bicubic, box, lanczos), crop_pct "
    "(above 0, at most 1), crop_mode (center, squash, border), antialias (true, false), "
    "crop_rounding (even, down)."
)


HUB = "hf://datasets/"
"""Prefix of the path of a dataset on the Hub."""

_FILE_SUFFIXES = r"csv|tsv|parquet|tar|tgz|gz|bz2|xz|zip|txt"
_DATASET_REPO = re.compile(rf"\w[\w.-]*/\w(?![\w.-]*\.(?:{_FILE_SUFFIXES})$)[\w.-]*", re.ASCII)


def _absolute(path: str) -> str:
    """Make a path absolute, because a resumed run may start in another directory; with slashes on
    Windows too, as in URLs."""
    return os.path.abspath(os.path.expanduser(path)).replace(os.sep, "/")


def model_or_path(model: str) -> str:
    """Parse `--model`: make existing paths absolute, as `hub/registry.py` resolves them."""
    return _absolute(model) if os.path.exists(model) else model


def hub_or_path(path: str) -> str:
    """Prepend hf://datasets/ to what is not an existing path but a possible dataset on the Hub."""
    is_path = not _DATASET_REPO.fullmatch(path) or os.path.exists(path)
    return path if is_path else HUB + path


def _parse_data_path(path: str) -> str:
    """Parse `--data`: make local paths absolute, including each of several separated by `::`."""
    path = hub_or_path(path)
    return "::".join(part if "://" in part else _absolute(part) for part in path.split("::"))


@dataclass(frozen=True)
class DataConfig:
    """Where images and labels come from, and how they are split."""

    path: str = option(
        ...,
        "--data PATH",
        {
            "": f"Labeled images: {DATA_KINDS}.  [required, except with --resume or --config]",
            "pretrain": f"Images: {DATA_KINDS}; with --objective masked-patch or mae, also a "
            "directory of unlabeled images.  [required, except with --resume or --config]",
            "fewshot": f"Labeled images: {_LOCAL_KINDS}, or local tar shards.  [required]",
        },
        DATA,
        parse=_parse_data_path,
        on_resume=True,
    )
    classes: str | None = option(None, "--classes FILE", CLASS_LIST, parse=_absolute)
    val_fraction: float = option(
        0.1,
        "--val-fraction X",
        {
            "": "Fraction of each class to hold out for validation if the dataset has no "
            "validation split.",
            "fewshot": "Fraction of each class to hold out for testing if the dataset has neither "
            "a test nor a validation split.",
        },
        min=0,
        below=1,
    )
    split_seed: int = limited(0, min=0)
    """Seed of that split, separate from the run's so that runs with different seeds share it."""
    merge_val: bool = False
    """Also train on the validation split, and skip validation: for the final run, once all
    hyperparameters are chosen. The test split is never trained on."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """The last component of the path, without the query string of a signed URL."""
        return public_url(self.path.partition("::")[0]).rstrip("/").rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        """Whether the dataset is at a URL or on the Hub."""
        return "://" in self.path

    @property
    def repo(self) -> str | None:
        """The dataset's repo on the Hub; None for other kinds of data."""
        match = re.match(rf"{HUB}([\w.-]+/[\w.-]+)", self.path)
        return match[1] if match else None

    def reachable(self, offline: bool) -> DataConfig:
        """Return `self`.

        Raises:
            ConfigError: the dataset is remote, and `offline` is set.
            DataError: it is a local path that does not exist.
        """
        if offline and self.is_remote:
            hint = "leave out --offline, or download the dataset and pass the path of the copy"
            raise ConfigError("not a local path, and --offline is set", where=self.path, hint=hint)
        is_one_path = not (self.is_remote or "{" in self.path or "::" in self.path)
        if is_one_path and not os.path.exists(self.path):
            raise DataError("no such file or directory", where=self.path, hint=DATA_HINT)
        return self


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images. Random draws depend on (seed, epoch, sample) only."""

    crop_area: tuple[float, float] = option(
        (0.05, 1.0),
        "--scale --crop-area MIN,MAX",
        "Random resized crop: smallest and largest fraction of the image's area to keep; 1,1 only "
        "resizes.",
        AUGMENTATION,
        above=0,
        max=1,
    )
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Range of the crop's aspect ratio, width over height."""
    flip: bool = option(True, "--flip/--no-flip", "Flip half of the images horizontally.")
    randaugment: tuple[int, int] | None = option(
        None,
        "--randaugment N,M",
        "RandAugment: number of operations and their magnitude (0 to 30), for example 2,10; 0,0 "
        "turns it off.  [default: off]",
        min=0,
        max=30,
    )
    erasing: float = option(
        0.0, "--reprob --erasing X", "Probability of random erasing.", min=0, max=1
    )
    mixup: float = option(
        0.0, "--mixup X", "Mixup alpha; 0 turns it off.", requires=CLASSIFY, min=0
    )
    cutmix: float = option(
        0.0,
        "--cutmix X",
        "CutMix alpha; 0 turns it off. With mixup, each batch uses one of the two.",
        requires=CLASSIFY,
        min=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.crop_area[0] > self.crop_area[1]:
            raise ConfigError("--scale: MIN must not be above MAX, as in --scale 0.05,1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf:
            raise ConfigError(f"crop_ratio: {self.crop_ratio} is not MIN,MAX above 0")
        if self.randaugment and not self.randaugment[0]:
            object.__setattr__(self, "randaugment", None)


@dataclass(frozen=True)
class FewshotConfig:
    """Few-shot classification on frozen features; the defaults follow the protocol of big_vision
    (evaluators/fewshot_lsr.py) and the paper (section 4.1)."""

    data: DataConfig
    """The dataset. Tested on the test split if there is one, else on the validation split."""
    shots: tuple[int, ...] = option(
        (1, 5, 10, 25), "--shots N,...", "Training images per class.", FEWSHOT, min=1
    )
    seeds: tuple[int, ...] = option(
        (0, 1, 2), "--seeds N,...", "Random seeds for drawing the training images.", min=0
    )
    l2: tuple[float, ...] = option(
        (2.0**10,),
        "--l2 X,...|auto",
        "L2 regularization strengths; auto chooses one for each draw by leave-one-out error.",
        parse=lambda text: (
            () if text == "auto" else from_text(Literal["auto"] | tuple[float, ...], text)
        ),
        min=0,
    )
    pool: Literal["head", Pool] = option(
        "head",
        "--pool",
        "Features. head: the input of the model's head; token: the class token; gap: the mean of "
        "the patch tokens; map: attention pooling; token+gap: class token and mean.",
    )
    layer: int | None = option(
        None,
        "--layer N",
        "Use the features after block N, counted from 0; the final norm still applies.  "
        "[default: the last]",
        min=0,
    )
    transform: Literal["big_vision", "checkpoint"] = option(
        "big_vision",
        "--transform --preprocess",
        "big_vision, as in published results: resize to 256 x 256 pixels without antialiasing and "
        "crop the central 224 x 224 (in proportion at other sizes); checkpoint: the checkpoint's "
        "own resize and crop. Input size, mean and std are the checkpoint's in both cases.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("shots", "seeds", "l2"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or not (values or name == "l2"):
                text = ",".join(map(str, values))
                raise ConfigError(f"--{name}: must be one or more different numbers, not '{text}'")


TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "finetune": {},
    "pretrain": {"optimizer": "adamw", "weight_decay": 0.1},
    "fewshot": {"data.val_fraction": 0.2},
}
"""Overrides of the defaults of the dataclasses, which are for fine-tuning, by command."""


METRICS = {
    "top1": ("accuracy", "top-1"),
    "top5": ("accuracy", "top-5"),
    "macro_f1": ("f1", "macro F1"),
    "ece": ("ece", "ECE"),
}
"""The metrics in the one-line summary of an evaluation: {key: (type, display name)}."""
