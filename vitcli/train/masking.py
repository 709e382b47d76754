"""Shared code of the objectives that hide patches and predict their contents."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vitcli.config import Preprocess
from vitcli.data.order import mask_rng, validation_rng
from vitcli.data.source import Ints
from vitcli.devices import to_device
from vitcli.errors import ConfigError
from vitcli.models.vit import ViT
from vitcli.train.config import TrainConfig
from vitcli.train.objectives import Objective


class Masking(Objective):
    """Base class of objectives that hide patches and predict their contents; labels are not used.

    `prepare` draws the mask of each image independently, so it does not depend on how a batch is
    split. x remains the images (B, 3, H, W); y describes the masks.

    Args:
        model: a ViT or hybrid without a head.
        preprocess: the model's, to recover colors from its normalized inputs.

    Raises:
        ConfigError: the model has no patches, has fewer than two, or has some outside the image.
    """

    classifies = False

    def __init__(self, model: nn.Module, config: TrainConfig, preprocess: Preprocess) -> None:
        super().__init__(model)
        name = f"--objective {config.objective}"
        if not isinstance(model, ViT):
            raise ConfigError(f"{name} requires a model with patches, not a BiT ResNet")
        self.config, self.architecture = config, model.config
        (rows, columns), (height, width) = self.architecture.grid, self.architecture.patch_size
        self.num_patches = rows * columns
        size = self.architecture.image_size
        if self.num_patches < 2 or size[0] < rows * height or size[1] < columns * width:
            raise ConfigError(
                f"{name} requires at least two whole patches of {height} x {width} pixels, but the "
                f"images have {size[0]} x {size[1]} pixels",
                hint="set --resolution to a larger multiple of the patch size",
            )
        for module in (model.attn_pool, model.fc_norm, model.pre_logits):
            if module is not None:  # unused in the loss: DDP must not wait for its gradients
                module.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(preprocess.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(preprocess.std).view(3, 1, 1), persistent=False)

    mean: Tensor
    std: Tensor

    @property
    def ratio(self) -> float:
        """The fraction of the patches that is hidden."""
        return self.config.masking.ratio or DEFAULT_RATIOS[self.config.objective]

    @abstractmethod
    def draw_mask(self, rng: np.random.Generator) -> Ints:
        """Draw the mask of one image: its row of y."""

    @abstractmethod
    def reconstruct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (masked images, reconstructed images), both normalized like x."""

    def prepare(
        self, x: Tensor, labels: Tensor, step: int, first: int = 0, lead: int = 0
    ) -> tuple[Tensor, Tensor]:
        positions = range(first, first + len(x))
        rows = [self.draw_mask(mask_rng(self.config.seed, step, i)) for i in positions]
        return x, self._stack_masks(rows, x)

    def validation_masks(self, x: Tensor, indices: Sequence[int]) -> Tensor:
        """Draw y for validation images; depends only on their indices."""
        return self._stack_masks([self.draw_mask(validation_rng(index)) for index in indices], x)

    def _stack_masks(self, rows: Sequence[Ints], x: Tensor) -> Tensor:
        return to_device(torch.from_numpy(np.stack(rows)), x.device)

    def patchify(self, images: Tensor) -> Tensor:
        """Split images (B, C, H, W) into the pixels of patches (B, P, h, w, C), in row-major order.
        A hybrid has a patch for each cell of its feature map, with sides of its stride."""
        (rows, columns), (h, w) = self.architecture.grid, self.architecture.patch_size
        x = images[:, :, : rows * h, : columns * w]
        x = x.reshape(len(x), -1, rows, h, columns, w).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(len(x), rows * columns, h, w, -1)

    def unpatchify(self, patches: Tensor) -> Tensor:
        """The inverse of `patchify`: (B, P, h, w, C) to (B, C, rows h, columns w)."""
        (rows, columns), (h, w) = self.architecture.grid, self.architecture.patch_size
        x = patches.reshape(len(patches), rows, columns, h, w, -1).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(len(x), -1, rows * h, columns * w)

    def to_rgb(self, images: Tensor) -> Tensor:
        """Convert normalized images to RGB in [0, 1], float32."""
        return (images.float() * self.std + self.mean).clamp(0, 1)

    def from_rgb(self, colors: Tensor) -> Tensor:
        """The inverse of `to_rgb`."""
        return (colors - self.mean) / self.std


DEFAULT_RATIOS = {"masked-patch": 0.5, "mae": 0.75}
"""Fractions of patches hidden: section B.1.2 of the paper; section 4.1 of arXiv 2111.06377."""

GRAY = 0.5
"""The color of hidden patches in pictures."""


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Gather the rows of x (B, N, ...) at indices (B, K): (B, K, ...)."""
    return x.gather(1, _expand_indices(x, indices))


def scatter(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return x (B, N, ...) with the rows at indices (B, K) replaced by values (B, K, ...)."""
    return x.scatter(1, _expand_indices(x, indices), values.to(x.dtype))


def _expand_indices(x: Tensor, indices: Tensor) -> Tensor:
    """Expand the indices of rows, (B, K), to all values of a row: (B, K, ...)."""
    trailing = x.shape[2:]
    return indices.view(*indices.shape, *(1,) * len(trailing)).expand(-1, -1, *trailing)
