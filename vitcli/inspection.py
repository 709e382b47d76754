"""Inspecting a Vision Transformer: attention over images, features, filters, position embeddings.

`inspect` is the one entry; the arrays it returns are what `vit inspect` draws. Attention itself is
in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from vitcli.attention import (
    DistanceMeter,
    Floats,
    Method,
    attention_maps,
    check_layer,
    check_transformer,
    head_maps,
)
from vitcli.checkpoints.load import LoadedModel, load
from vitcli.checkpoints.resize import similarity
from vitcli.config import ClassLabel, Preprocess, Size
from vitcli.data import images as image_files
from vitcli.data.fit import Fit
from vitcli.data.inputs import ImageInput
from vitcli.data.transforms import EvalTransform, to_float
from vitcli.devices import choose_device
from vitcli.errors import ConfigError, DataError
from vitcli.models.vit import ViT
from vitcli.prediction import as_images

if TYPE_CHECKING:
    from vitcli.hub.fetch import Progress
    from vitcli.prediction import AnyImage

ImageView = Literal["attention", "heads", "pca"]
WeightView = Literal["filters", "posemb"]
View = Literal[ImageView, WeightView, "distance"]


@dataclass(frozen=True)
class Seen:
    """One image as the model sees it."""

    file: str
    image: npt.NDArray[np.uint8]
    """(h, w, 3) the part that the model sees, in the image's own proportions, at most 1024 px."""
    pixels: Tensor
    """(3, H, W) the model's input."""
    prediction: int | None = None
    """The class with the highest score; None without a head."""
    score: float | None = None
    """That of the prediction."""


@dataclass(frozen=True)
class Inspected:
    """What was found in one image, or why it could not be read."""

    file: str
    seen: Seen | None = None
    array: Floats | None = None
    """attention: (rows, columns); heads: (heads, rows, columns); pca: (rows, columns, 3) RGB."""
    index: int | None = None
    """The class that is explained ("gradient"), else the predicted one; None without a head."""
    label: ClassLabel | None = None
    """Its id and name."""
    score: float | None = None
    """Its score."""
    faithfulness: Faithfulness | None = None
    random: Faithfulness | None = None
    """The mean of the curves of random maps, for comparison."""
    error: DataError | None = None


@dataclass(frozen=True)
class Inspection:
    """The arrays of one view.

    attention (n, rows, columns), heads (n, heads, rows, columns), pca (n, rows, columns, 3);
    filters (m, height, width, 3), posemb (rows * rows, columns * columns); distance
    (layers, heads).
    """

    array: Floats | npt.NDArray[np.float64]
    images: tuple[Inspected, ...] = ()
    """In the order of the array, for views of images; those with an error have no row."""


LARGEST = 1024
"""Pixels of the longer side of an image that is kept to be drawn."""


class Inspector:
    """A Vision Transformer in float32, and the images it is asked about.

    Raises:
        ConfigError: the model is a BiT ResNet, or cannot have that resolution.
        VitError: as `vitcli.load`.
    """

    def __init__(
        self,
        spec: str | Path,
        *,
        resolution: int | Size | None = None,
        device: str = "auto",
        offline: bool = False,
        on_progress: Progress | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self.device, self.offline = choose_device(device), offline
        loaded: LoadedModel = load(
            spec,
            self.device,
            resolution=resolution,
            offline=offline,
            on_progress=on_progress,
            allow_pickle=allow_pickle,
        )
        self.model: ViT = check_transformer(loaded)
        self.info = loaded.info
        self.transform = EvalTransform(loaded.info.preprocess)

    @property
    def classes(self) -> tuple[ClassLabel, ...]:
        """Names of the outputs; their indices where the checkpoint has none."""
        count = self.info.model.num_classes
        return self.info.classes or tuple(ClassLabel(str(i), str(i)) for i in range(count))

    def find_class(self, name: str) -> int:
        """The index of a class given by index, id or name.

        Raises:
            ConfigError: there is none, or several have that name.
        """
        if name.isdecimal() and int(name) < len(self.classes):
            return int(name)
        found = [i for i, label in enumerate(self.classes) if name in label]
        if len(found) == 1:
            return found[0]
        problem = f"{len(found)} classes are called '{name}'" if found else f"no class '{name}'"
        hint = "give its index or id: " + ", ".join(str(i) for i in found) if found else None
        raise ConfigError(problem, hint=hint)

    def read(self, images: AnyImage | Iterable[AnyImage]) -> Iterator[Seen | Inspected]:
        """Each image as the model sees it; one that cannot be read as an `Inspected` error."""
        for source in as_images(images, self.offline):
            try:
                yield self._read(source)
            except DataError as error:
                yield Inspected(source.name, error=error)

    def _read(self, source: ImageInput) -> Seen:
        encoded = source.read()
        pixels = self._pixels(encoded)
        image = shown_part(image_files.decode(encoded), self.info.preprocess)
        if not self.info.model.num_classes:
            return Seen(source.name, image, pixels[0])
        with torch.inference_mode():
            scores = self.scores(self.model(pixels))[0]
        best = int(scores.argmax())
        return Seen(source.name, image, pixels[0], best, float(scores[best]))

    def scores(self, logits: Tensor) -> Tensor:
        """Logits (B, K) as the checkpoint's scores."""
        return logits.sigmoid() if self.info.score == "sigmoid" else logits.softmax(dim=1)

    def attend(
        self,
        images: AnyImage | Iterable[AnyImage],
        method: Method = "rollout",
        layer: int | None = None,
        head: int | None = None,
        label: str | None = None,
        measure: bool = False,
    ) -> Iterator[Inspected]:
        """The attention map of each image.

        Args:
            method, layer, head: see `attention.attention_maps`.
            label: the class to explain ("gradient") and to follow (`measure`): index, id or name;
                None: each image's predicted class.
            measure: also compute deletion and insertion curves (`faithfulness`).
        """
        wanted = None if label is None else self.find_class(label)
        check_layer(self.model, layer, head)
        if (method == "gradient" or measure) and not self.info.model.num_classes:
            raise ConfigError(
                "the model has no classification head, so there is no class to explain",
                hint="choose --method rollout or last, without --faithfulness",
            )
        for seen in self.read(images):
            if isinstance(seen, Inspected):
                yield seen
                continue
            batch, target = seen.pixels[None], seen.prediction if wanted is None else wanted
            chosen = None if target is None else torch.tensor([target], device=self.device)
            array = attention_maps(self.model, batch, method, layer, head, chosen)[0]
            found = self._labelled(seen, array, target)
            if measure and target is not None:
                own, noise = self._measure(seen, array, target)
                found = replace(found, faithfulness=own, random=noise)
            yield found

    def _labelled(self, seen: Seen, array: Floats, target: int | None) -> Inspected:
        if target is None:
            return Inspected(seen.file, seen, array)
        score = seen.score
        if target != seen.prediction:
            with torch.inference_mode():
                score = float(self.scores(self.model(seen.pixels[None]))[0, target])
        return Inspected(seen.file, seen, array, target, self.classes[target], score)

    def _measure(self, seen: Seen, array: Floats, target: int) -> tuple[Faithfulness, Faithfulness]:
        """The curves of a map, and the mean ones of random maps."""
        noise = [
            faithfulness(self.model, seen.pixels, relevance, target, self.info.score)
            for relevance in random_maps(self.model.config.grid, RANDOM_MAPS)
        ]
        mean = Faithfulness(
            np.mean([curves.deletion for curves in noise], axis=0, dtype=np.float32),
            np.mean([curves.insertion for curves in noise], axis=0, dtype=np.float32),
        )
        own = faithfulness(self.model, seen.pixels, array, target, self.info.score)
        return own, mean

    def heads(
        self, images: AnyImage | Iterable[AnyImage], layer: int | None = None
    ) -> Iterator[Inspected]:
        """Every head's attention of one layer (None: the last), for each image."""
        check_layer(self.model, layer)
        for seen in self.read(images):
            if isinstance(seen, Inspected):
                yield seen
                continue
            array = head_maps(self.model, seen.pixels[None], layer)[0]
            yield self._labelled(seen, array, seen.prediction)

    def colours(self, images: AnyImage | Iterable[AnyImage]) -> list[Inspected]:
        """Patch features of all images together as RGB; see `feature_colours`."""
        found = list(self.read(images))
        seen = [one for one in found if isinstance(one, Seen)]
        if not seen:
            return [one for one in found if isinstance(one, Inspected)]
        features = [patch_features(self.model, one.pixels[None]) for one in seen]
        colours = iter(feature_colours(np.concatenate(features)))
        return [
            one
            if isinstance(one, Inspected)
            else self._labelled(one, next(colours), one.prediction)
            for one in found
        ]

    def distance(
        self,
        images: AnyImage | Iterable[AnyImage],
        on_image: Callable[[], None] = lambda: None,
    ) -> Distances:
        """Mean attention distance over all images, one at a time; nothing is kept of an image.

        Args:
            on_image: called after each.
        """
        meter, errors = DistanceMeter(self.model), list[Inspected]()
        for source in as_images(images, self.offline):
            try:
                meter.add(self._pixels(source.read()))
            except DataError as error:
                errors.append(Inspected(source.name, error=error))
            on_image()
        return Distances(meter.result(), meter.images, tuple(errors))

    def _pixels(self, encoded: Any) -> Tensor:
        """The model's input, (1, 3, H, W)."""
        return to_float(self.transform(encoded)[None], self.info.preprocess).to(self.device)


@dataclass(frozen=True)
class Distances:
    """Mean attention distances."""

    pixels: npt.NDArray[np.float64]
    """(layers, heads)."""
    images: int
    """How many were measured."""
    errors: tuple[Inspected, ...] = ()
    """Images that could not be read."""


def shown_part(image: Image.Image, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    """The part of an image that a model sees, (h, w, 3) in the image's own proportions, at most
    `LARGEST` pixels long; beyond the image's edge (letterbox) it is white."""
    height, width = Fit(preprocess).resized((image.height, image.width))
    down, across = image.height / height, image.width / width
    top = (height - preprocess.size[0]) / 2 * down
    left = (width - preprocess.size[1]) / 2 * across
    box = [left, top, image.width - left, image.height - top]
    part = Image.new("RGB", (round(box[2] - box[0]), round(box[3] - box[1])), "white")
    part.paste(image.convert("RGB"), (round(-left), round(-top)))
    part.thumbnail((LARGEST, LARGEST))
    return np.asarray(part)


# ---------------------------------------------------------------------------------------------
# Features and weights


@torch.no_grad()
def patch_features(model: ViT, images: Tensor) -> Floats:
    """Features of the patches after the last block, (B, rows, columns, D)."""
    tokens = model.encode(images)[:, model.config.num_prefix_tokens :]
    features: Floats = tokens.reshape(len(images), *model.config.grid, -1).float().cpu().numpy()
    return features


def principal_components(rows: npt.NDArray[Any], count: int) -> Floats:
    """The first principal components of rows (n, d): unit vectors (count, d), the sign of each
    chosen so that its largest entry is positive."""
    centred = np.asarray(rows, np.float64)
    centred = centred - centred.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    components = vectors[:, ::-1][:, :count].T
    largest = np.abs(components).argmax(axis=1)
    signs = np.sign(components[np.arange(len(components)), largest])
    result: Floats = (components * signs[:, None]).astype(np.float32)
    return result


def feature_colours(features: Floats) -> Floats:
    """Features (B, rows, columns, D) as RGB in [0, 1], (B, rows, columns, 3): their first three
    principal components over all images together, each scaled between its 1st and 99th percentile
    (DINOv2, arXiv 2304.07193, Figure 1)."""
    rows = features.reshape(-1, features.shape[-1])
    projected = (rows - rows.mean(axis=0)) @ principal_components(rows, 3).T
    low, high = np.percentile(projected, (1, 99), axis=0)
    colours: Floats = np.clip((projected - low) / np.maximum(high - low, 1e-12), 0, 1)
    return colours.reshape(*features.shape[:-1], 3)


def filter_components(model: ViT, count: int = 28) -> Floats:
    """The first principal components of the filters that see the image, (n, height, width, 3),
    each scaled to [0, 1] (Figure 7, left): of the patch embedding, or of a hybrid's first
    convolution. n is less than `count` where the filters are smaller."""
    weight = model.patch_embed.proj.weight
    if model.config.stem is not None:
        convolutions = model.patch_embed.backbone.modules()
        weight = next(m for m in convolutions if isinstance(m, nn.Conv2d)).weight
    filters = weight.detach().float().cpu().numpy()
    rows = filters.transpose(0, 2, 3, 1).reshape(len(filters), -1)
    components = principal_components(rows, min(count, rows.shape[1]))
    low, high = components.min(axis=1, keepdims=True), components.max(axis=1, keepdims=True)
    scaled: Floats = (components - low) / np.maximum(high - low, 1e-12)
    return scaled.reshape(-1, *filters.shape[2:], 3)


def posemb_similarity(model: ViT) -> npt.NDArray[np.float64]:
    """Cosine similarity of each patch's position embedding with every other's (Figure 7, centre),
    as tiles: (rows * rows, columns * columns), see `checkpoints.resize.similarity`.

    Raises:
        ConfigError: the model has no position embeddings.
    """
    state = model.state_dict()
    tables = {name: state[name].cpu().numpy() for name in state if name.startswith("pos_embed")}
    if not tables:
        raise ConfigError("the model has no position embeddings to show")
    tiles: npt.NDArray[np.float64] = similarity(tables, model.config)
    return tiles


# ---------------------------------------------------------------------------------------------
# Faithfulness


@dataclass(frozen=True)
class Faithfulness:
    """What becomes of a class's score as patches are removed or revealed in a map's order (Petsiuk
    et al., arXiv 1806.07421). A faithful map has a small deletion and a large insertion area."""

    deletion: Floats
    """(steps + 1,) scores, most relevant patches removed first: replaced by the mean colour."""
    insertion: Floats
    """(steps + 1,) scores, most relevant patches revealed first, over a blurred image."""

    @property
    def deletion_area(self) -> float:
        """Area under the deletion curve, in [0, 1]."""
        return float(np.trapezoid(self.deletion, dx=1 / (len(self.deletion) - 1)))

    @property
    def insertion_area(self) -> float:
        """Area under the insertion curve, in [0, 1]."""
        return float(np.trapezoid(self.insertion, dx=1 / (len(self.insertion) - 1)))


@torch.no_grad()
def faithfulness(
    model: ViT, image: Tensor, relevance: Floats, target: int, score: str, steps: int = 20
) -> Faithfulness:
    """Deletion and insertion curves of one map on one image.

    Args:
        image: (3, H, W), normalised; 0 is the mean colour.
        relevance: (rows, columns).
        target: the class whose score is followed.
        score: "softmax" or "sigmoid", as the model's logits are read.
        steps: parts that the patches are removed and revealed in.
    """
    rows, columns = model.config.grid
    order = np.argsort(-relevance.reshape(-1), kind="stable")
    height, width = image.shape[1:]
    patch = height // rows, width // columns
    side = 2 * max(patch) + 1
    blurred = nn.functional.avg_pool2d(
        nn.functional.pad(image[None], (side // 2,) * 4, mode="replicate"), side, stride=1
    )[0]
    deleted, inserted = [], []
    for step in range(steps + 1):
        chosen = np.zeros(rows * columns, bool)
        chosen[order[: round(len(order) * step / steps)]] = True
        mask = torch.from_numpy(chosen.reshape(rows, columns)).to(image.device)
        pixels = mask.repeat_interleave(patch[0], 0).repeat_interleave(patch[1], 1)
        pixels = nn.functional.pad(pixels, (0, width - pixels.shape[1], 0, height - len(pixels)))
        deleted.append(torch.where(pixels, torch.zeros_like(image), image))
        inserted.append(torch.where(pixels, image, blurred))
    logits = torch.cat([model(torch.stack(part)) for part in (deleted, inserted)])
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(dim=1)
    curves = scores[:, target].float().cpu().numpy()
    return Faithfulness(curves[: steps + 1], curves[steps + 1 :])


def random_maps(grid: tuple[int, int], count: int, seed: int = 0) -> Iterable[Floats]:
    """Maps of noise, what a map has to beat."""
    generator = np.random.default_rng(seed)
    return (generator.random(grid).astype(np.float32) for _ in range(count))


RANDOM_MAPS = 5
"""Maps of noise whose curves are averaged."""


def inspect(
    spec: str | Path,
    images: AnyImage | Iterable[AnyImage] = (),
    view: View = "attention",
    *,
    method: Method = "rollout",
    layer: int | None = None,
    head: int | None = None,
    label: str | None = None,
    measure: bool = False,
    resolution: int | Size | None = None,
    device: str = "auto",
    offline: bool = False,
    allow_pickle: bool = False,
) -> Inspection:
    """The arrays of a view of a model; see `Inspection` for their shapes.

    Args:
        spec: a file, a directory, a registry name or "org/repo[@revision]".
        images: as for `vitcli.predict`; none for "filters" and "posemb".
        view: attention, heads, pca, filters, posemb or distance.
        method, layer, head, label, measure: see `Inspector.attend`.
        resolution: of the model's input; the position embeddings are resized.
        device: auto, cpu, cuda, cuda:N or mps.
        offline: never touch the network.
        allow_pickle: accept a Hub repo whose weights are only a pickle; no code in it runs.

    Raises:
        VitError: the model cannot be loaded, has no attention, or lacks what is asked for.
    """
    inspector = Inspector(
        spec, resolution=resolution, device=device, offline=offline, allow_pickle=allow_pickle
    )
    if view == "filters":
        return Inspection(filter_components(inspector.model))
    if view == "posemb":
        return Inspection(posemb_similarity(inspector.model))
    if view == "distance":
        distances = inspector.distance(images)
        return Inspection(distances.pixels, distances.errors)
    if view == "pca":
        found = inspector.colours(images)
    elif view == "heads":
        found = list(inspector.heads(images, layer))
    else:
        found = list(inspector.attend(images, method, layer, head, label, measure))
    arrays = [one.array for one in found if one.array is not None]
    return Inspection(np.stack(arrays) if arrays else np.empty(0, np.float32), tuple(found))
