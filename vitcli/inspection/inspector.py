"""Inspect a Vision Transformer: attention over images, features, filters, position embeddings.

`inspect` is the Python entry point and returns the arrays that `vit inspect` draws. Attention
itself is in `attention.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from vitcli.config import ClassLabel, MapMethod, PosembMethod, Preprocess, Size, View
from vitcli.data import images as image_files
from vitcli.data.classes import ClassIndex, quote_list
from vitcli.data.fit import Fit
from vitcli.data.transforms import EvalTransform, to_float
from vitcli.errors import ConfigError, DataError
from vitcli.fields import check_choice
from vitcli.inference import CorePool
from vitcli.inspection.attention import (
    Floats,
    attention_distance,
    attention_maps,
    check_layer,
    head_maps,
)
from vitcli.inspection.components import (
    feature_colors,
    filter_components,
    patch_features,
    posemb_similarity,
)
from vitcli.inspection.faithfulness import Faithfulness, faithfulness_of, random_maps
from vitcli.models.vit import ViT
from vitcli.prediction import Predictor, iter_images, to_scores

if TYPE_CHECKING:
    from vitcli.prediction import Images


@dataclass(frozen=True)
class ImageInspection:
    """The result for one image, or the error that prevented reading it."""

    file: str
    image: npt.NDArray[np.uint8] | None = None
    """(h, w, 3): the part seen by the model, with the original aspect ratio, at most 768 px."""
    pixels: Tensor | None = None
    """(1, 3, H, W): the input of the model."""
    array: npt.NDArray[np.floating] | None = None
    """attention: (rows, columns); heads: (heads, rows, columns); pca: (rows, columns, 3) RGB;
    distance: (blocks, heads)."""
    index: int | None = None
    """The requested class, or else the predicted one; None without a head."""
    label: ClassLabel | None = None
    """Id and name of that class."""
    score: float | None = None
    """Score of that class."""
    faithfulness: Faithfulness | None = None
    random: Faithfulness | None = None
    """Mean curves of random maps, for comparison."""
    error: DataError | None = None


@dataclass(frozen=True)
class Inspection:
    """The arrays of one view.

    attention (n, rows, columns), heads (n, heads, rows, columns), pca (n, rows, columns, 3);
    filters (m, height, width, 3), posemb (rows * rows, columns * columns); distance
    (blocks, heads), in pixels, the mean over the images.
    """

    array: npt.NDArray[np.floating]
    images: tuple[ImageInspection, ...] = ()
    """Results in the order of the array, for views of images; those with an error have no row."""


MAX_SIDE = 768
"""Maximum size in pixels of the longer side of an image to draw."""
RANDOM_MAPS = 5
"""Number of random maps whose curves are averaged."""


class Inspector:
    """Computes the views of a Vision Transformer, in float32.

    Args:
        predictor: the model, in fp32.

    Raises:
        ConfigError: the model is a BiT ResNet.
        VitError: see `vitcli.load`.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.name, self.info, self.classes = predictor.name, predictor.info, predictor.classes
        if not isinstance(predictor.model, ViT):
            raise ConfigError(
                "a BiT ResNet has no attention to inspect", hint="choose a ViT or a hybrid"
            )
        self.check_finite = predictor.check_finite
        self.model: ViT = predictor.model
        self.model.computes_all_tokens = True
        self.device, self.offline = predictor.load().device, predictor.offline
        self.transform = EvalTransform(self.info.preprocess)

    def find_class(self, name: str) -> int:
        """Find a class by id, name or index, and return its index. Ids and names take precedence:
        a class named "1" need not have index 1.

        Raises:
            ConfigError: there is no such class, or the name is ambiguous.
        """
        matches = ClassIndex(self.classes).find(ClassLabel(name, name))
        if not matches and name.isdecimal() and int(name) < len(self.classes):
            return int(name)
        if len(matches) == 1:
            return matches[0]
        if matches:
            hint = f"give its index: {', '.join(map(str, matches))}"
            raise ConfigError(f"{len(matches)} classes are called '{name}'", hint=hint)
        known = quote_list([label.name for label in self.classes], 12)
        raise ConfigError(f"the model has no class '{name}'", hint=f"its classes are {known}")

    def _read(self, images: Images, index: int | None = None) -> Iterator[ImageInspection]:
        """Read images and score a class on each (default: the top one)."""
        for source in iter_images(images, self.offline):
            try:
                encoded = source.read()
                pixels = self._preprocess(encoded)
                image = visible_crop(image_files.decode(encoded), self.info.preprocess)
            except DataError as error:
                yield ImageInspection(source.name, error=error)
                continue
            result = ImageInspection(source.name, image, pixels)
            if self.classes:
                with torch.inference_mode():
                    logits = self.model(pixels)[0]
                scores = to_scores(logits, self.info.score)
                class_index = int(logits.argmax()) if index is None else index
                label, score = self.classes[class_index], float(scores[class_index])
                self.check_finite(score)
                result = replace(result, index=class_index, label=label, score=score)
            yield result

    def _preprocess(self, encoded: Any) -> Tensor:
        """Preprocess an image to the input of the model, (1, 3, H, W)."""
        return to_float(self.transform(encoded)[None], self.info.preprocess).to(self.device)

    def attend(
        self,
        images: Images,
        method: MapMethod = "rollout",
        layer: int | None = None,
        head: int | None = None,
        label: str | int | None = None,
        faithfulness: bool = False,
    ) -> Iterator[ImageInspection]:
        """Compute the attention map of each image.

        Args:
            method, layer, head: see `attention.attention_maps`.
            label: the class to explain ("gradient") and to score (`faithfulness`): id, name or
                index; None for the predicted class of each image.
            faithfulness: also compute deletion and insertion curves (`faithfulness_of`).
        """
        class_index = None if label is None else self.find_class(str(label))
        check_layer(self.model, layer, head)
        if head is not None and method != "block":
            raise ConfigError(f"method '{method}' averages over heads", hint="use --method block")
        if (method == "gradient" or faithfulness) and not self.classes:
            raise ConfigError(
                "the model has no classification head, so there is no class to explain",
                hint="choose --method rollout or block, without --faithfulness",
            )
        with contextlib.closing(CorePool(self.device)) as cores:
            for result in self._read(images, class_index):
                pixels, index = result.pixels, result.index
                if pixels is not None:
                    target = None if index is None else torch.tensor([index], device=self.device)
                    array = attention_maps(self.model, pixels, method, layer, head, target)[0]
                    result = replace(result, array=array)
                    if faithfulness and index is not None:
                        maps = [array, *random_maps(self.model.config.grid, RANDOM_MAPS)]
                        measure = partial(faithfulness_of, self.model, pixels[0])
                        curves, *random = (measure(m, index, self.info.score, cores) for m in maps)
                        mean = Faithfulness(*np.array(random).mean(axis=0))
                        result = replace(result, faithfulness=curves, random=mean)
                yield result

    def heads(self, images: Images, layer: int | None = None) -> Iterator[ImageInspection]:
        """Compute the attention of every head in one block (default: the last) for each image."""
        check_layer(self.model, layer)
        for result in self._read(images):
            if result.pixels is not None:
                result = replace(result, array=head_maps(self.model, result.pixels, layer)[0])
            yield result

    def pca(self, images: Images) -> Iterator[ImageInspection]:
        """Compute RGB maps of the patch features of all images; see `feature_colors`."""
        results, features = list[ImageInspection](), list[Floats]()
        for result in self._read(images):
            if result.pixels is not None:
                features.append(patch_features(self.model, result.pixels))
            results.append(replace(result, pixels=None))
        colors = iter(feature_colors(np.concatenate(features)) if features else ())
        for result in results:
            yield result if result.error else replace(result, array=next(colors))

    def distances(self, images: Images) -> Iterator[ImageInspection]:
        """Compute the attention distances of each image; see `attention_distance`."""
        for source in iter_images(images, self.offline):
            try:
                array = attention_distance(self.model, self._preprocess(source.read()))
                self.check_finite(float(array.sum()))
                yield ImageInspection(source.name, array=array)
            except DataError as error:
                yield ImageInspection(source.name, error=error)


def visible_crop(image: Image.Image, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    """Crop an image to the part seen by the model, (h, w, 3), with the original aspect ratio and at
    most `MAX_SIDE` pixels on the longer side; letterbox borders are white."""
    height, width = Fit(preprocess).resized_size((image.height, image.width))
    y_scale, x_scale = image.height / height, image.width / width
    top = (height - preprocess.size[0]) / 2 * y_scale
    left = (width - preprocess.size[1]) / 2 * x_scale
    box = [left, top, image.width - left, image.height - top]
    crop_size = max(1, round(box[2] - box[0])), max(1, round(box[3] - box[1]))
    crop = Image.new("RGB", crop_size, "white")
    crop.paste(image.convert("RGB"), (round(-left), round(-top)))
    crop.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.asarray(crop)


@torch.inference_mode(False)  # the caller's would exclude gradients
def inspect(
    spec: str | Path,
    images: Images = (),
    view: View = "attention",
    *,
    method: MapMethod = "rollout",
    layer: int | None = None,
    head: int | None = None,
    label: str | int | None = None,
    faithfulness: bool = False,
    resolution: int | Size | None = None,
    posemb_method: PosembMethod = "bilinear",
    device: str | torch.device = "auto",
    offline: bool = False,
    allow_pickle: bool = False,
) -> Inspection:
    """Compute the arrays of a view of a model; see `Inspection` for their shapes.

    Args:
        spec: a path, a model name such as "default", or a Hub repo, "org/name[@revision]".
        images: as for `vitcli.predict`; unused for "filters" and "posemb".
        view: attention, heads, pca, filters, posemb or distance.
        method, layer, head, label, faithfulness: see `Inspector.attend`.
        resolution: input size of the model; position embeddings are resized by `posemb_method`.
        device: auto, cpu, cuda, cuda:N or mps.
        offline: never use the network.
        allow_pickle: accept Hub repos that have only pickled weights; no code in them is run.

    Raises:
        VitError: the model cannot be loaded, has no attention, or does not support the view.
    """
    check_choice("view", View, view)
    check_choice("method", MapMethod, method)
    given = method, head, label, faithfulness, None if view == "heads" else layer
    if view != "attention" and given != ("rollout", None, None, False, None):
        what = "method, head, label and faithfulness require view 'attention'"
        raise ConfigError(f"{what}, and layer requires 'attention' or 'heads'")
    inspector = Inspector(
        Predictor(spec, device, "fp32", offline, None, resolution, posemb_method, allow_pickle)
    )
    if view == "filters":
        return Inspection(filter_components(inspector.model))
    if view == "posemb":
        return Inspection(posemb_similarity(inspector.model))
    if view == "distance":
        results = tuple(inspector.distances(images))
    elif view == "pca":
        results = tuple(inspector.pca(images))
    elif view == "heads":
        results = tuple(inspector.heads(images, layer))
    else:
        results = tuple(inspector.attend(images, method, layer, head, label, faithfulness))
    arrays = [result.array for result in results if result.array is not None]
    if view == "distance":
        if not results:
            raise ConfigError("view 'distance' requires images")
        return Inspection(np.mean(arrays, axis=0) if arrays else np.full((1, 1), np.nan), results)
    return Inspection(np.stack(arrays) if arrays else np.empty(0, np.float32), results)
