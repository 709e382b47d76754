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
from torch import Tensor

from vitcli.checkpoints.load import LoadedModel, load
from vitcli.config import ClassLabel, Preprocess, Size
from vitcli.data import images as image_files
from vitcli.data.classes import listed
from vitcli.data.fit import Fit
from vitcli.data.inputs import ImageInput
from vitcli.data.transforms import EvalTransform, to_float
from vitcli.devices import choose_device
from vitcli.errors import ConfigError, DataError
from vitcli.hub import registry
from vitcli.inspection.attention import (
    DistanceMeter,
    Floats,
    Method,
    attention_maps,
    check_layer,
    check_transformer,
    head_maps,
)
from vitcli.inspection.components import (
    feature_colours,
    filter_components,
    patch_features,
    posemb_similarity,
)
from vitcli.inspection.faithfulness import Faithfulness, faithfulness, random_maps
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
        self.name = registry.aliases().get(str(spec), str(spec))
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
        """Names of the outputs; "class 0" and so on where the checkpoint has none."""
        count = self.info.model.num_classes
        return self.info.classes or tuple(ClassLabel(str(i), f"class {i}") for i in range(count))

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
        if found:
            hint = f"give its index: {', '.join(map(str, found))}"
            raise ConfigError(f"{len(found)} classes are called '{name}'", hint=hint)
        known = listed([label.name for label in self.classes], 12)
        raise ConfigError(f"the model has no class '{name}'", hint=f"its classes are {known}")

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
