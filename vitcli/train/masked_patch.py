"""Masked patch prediction, the paper's self-supervised objective (sections 4.6 and B.1.2).

Half of an image's patch embeddings are corrupted, and the model predicts the colors of the
corrupted patches, and only of these, from their tokens after the last block:

    80%  the embedding is replaced by [mask], a learned vector
    10%  the embedding is replaced by that of another patch of the same image
    10%  the embedding is kept

The paper compares three targets, the first of which is the default:

    mean-3bit  the mean color of the patch in 3 bits per channel: one of 512 classes
    4x4-3bit   the patch downsized to 4 x 4 such colors: 16 predictions of 512 classes
    pixels     all pixels of the patch, with an L2 loss

The authors have not released code for it. Details that the paper leaves open are chosen as follows:

- The embedding of a patch is x_p E of equation 1, before its position embedding is added, as in
  BERT: otherwise [mask] tokens would be indistinguishable.
- The same number of patches is corrupted in every image, drawn uniformly, so that all images have
  equal weight. Which of the three applies to a corrupted patch is drawn independently, as in BERT.
- Colors are quantized as stored in the image file, in RGB from 0 to 255: level k of 8 is
  [255 k / 8, 255 (k + 1) / 8], the three highest bits of an 8-bit value. A mean on a boundary
  belongs to the level above. The class is 64 r + 8 g + b.
- Downsizing to 4 x 4 averages over areas, which overlap if a side is not divisible by 4 (torch's
  `adaptive_avg_pool2d`).
- The target pixels are those of the normalized input; L2 is the mean of the squared differences.
- The loss of a patch is the mean over its predictions, and that of an image the mean over its
  corrupted patches: initially log 512 = 6.24 for both targets with classes.
- The prediction is one linear layer on the token, initialized to zero like the paper's heads.
- A hybrid's patches are the cells of its feature map: embeddings of cells are corrupted, after the
  ResNet has seen the whole image, and the target of a cell is a square with sides of its stride.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcli.config import Preprocess
from vitcli.data.source import Ints
from vitcli.train.config import TrainConfig
from vitcli.train.masking import GRAY, Masking, gather, scatter

MASKED, REPLACED = 0.8, 0.1
"""Fractions of corrupted patches that get [mask], or another's embedding; the rest keep theirs."""

LEVELS = 8
"""Levels of each color channel: 3 bits."""
NUM_COLORS = LEVELS**3

SIDE = {"mean-3bit": 1, "4x4-3bit": 4}
"""Colors per side of a patch."""


class MaskedPatches(Masking):
    """The masked patch objective. y: int64 (B, K, 2), for each of the K corrupted patches its index
    and the index of the patch whose embedding it gets: its own, another's, or P for [mask]."""

    def __init__(self, model: nn.Module, config: TrainConfig, preprocess: Preprocess) -> None:
        super().__init__(model, config, preprocess)
        width, (h, w) = self.architecture.width, self.architecture.patch_size
        self.target = config.masking.target
        self.num_corrupted = min(max(1, round(self.ratio * self.num_patches)), self.num_patches)
        outputs = NUM_COLORS * SIDE[self.target] ** 2 if self.target in SIDE else h * w * 3
        generator = torch.Generator().manual_seed(config.seed)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        nn.init.normal_(self.mask_token, std=0.02, generator=generator)
        self.decoder = nn.Linear(width, outputs)
        nn.init.zeros_(self.decoder.weight)
        nn.init.zeros_(self.decoder.bias)

    @property
    def macs(self) -> int:
        return super().macs + self.num_corrupted * self.decoder.weight.numel()

    @property
    def note(self) -> str:
        return (
            f"objective: predict {self.target} of {self.num_corrupted} corrupted patches "
            f"out of {self.num_patches}"
        )

    def draw_mask(self, rng: np.random.Generator) -> Ints:
        indices = rng.permutation(self.num_patches)[: self.num_corrupted]
        offsets = rng.integers(1, self.num_patches, self.num_corrupted)
        others = (indices + offsets) % self.num_patches
        draws = rng.random(self.num_corrupted)
        sources = np.where(draws < MASKED + REPLACED, others, indices)
        sources = np.where(draws < MASKED, self.num_patches, sources)
        return np.stack([indices, sources], axis=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        indices = y[..., 0]
        predicted = self.predict(x, y)
        with torch.autocast(x.device.type, enabled=False):
            if self.target in SIDE:
                classes = gather(self.color_classes(x), indices)  # (B, K, areas)
                logits = predicted.float().unflatten(2, (-1, NUM_COLORS))
                losses = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), reduction="none")
                losses = losses.view(len(x), -1)
            else:
                pixels = gather(self.patchify(x), indices).flatten(2)
                losses = (predicted.float() - pixels).square().flatten(1)
            return losses.mean(dim=1), torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the decoder's outputs (B, K, outputs) for the corrupted patches."""
        indices, sources = y.unbind(2)
        patches = self.model.patch_embed(x)  # (B, P, D)
        mask = self.mask_token.to(patches.dtype).expand(len(x), -1, -1)
        patches = scatter(patches, indices, gather(torch.cat([patches, mask], dim=1), sources))
        tokens = self.model.encode_tokens(self.model.add_positions(patches))
        tokens = tokens[:, self.architecture.num_prefix_tokens :]
        predicted: Tensor = self.decoder(gather(tokens, indices))
        return predicted

    def color_classes(self, x: Tensor) -> Tensor:
        """Return the color classes of images (B, 3, H, W), one for each area of their patches:
        int64 (B, P, areas). Integer arithmetic avoids rounding a mean across a level boundary."""
        patches = self.patchify((self.to_rgb(x) * 255).round().to(torch.int64))  # (B, P, h, w, 3)
        side = SIDE[self.target]
        row_slices, column_slices = (_area_slices(size, side) for size in patches.shape[2:4])
        levels = []
        for rows in row_slices:
            for columns in column_slices:
                area = patches[:, :, rows, columns].flatten(2, 3)  # (B, P, n, 3)
                max_sum = 255 * area.shape[2]
                levels.append((LEVELS * area.sum(dim=2) // max_sum).clamp(max=LEVELS - 1))
        red, green, blue = torch.stack(levels, dim=2).unbind(3)
        classes: Tensor = (red * LEVELS + green) * LEVELS + blue
        return classes

    @torch.no_grad()
    def reconstruct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """[mask] is gray; predicted colors are the centers of their levels."""
        indices, sources = y.unbind(2)
        patches, predicted = self.patchify(self.to_rgb(x)), self.predict(x, y).float()
        gray = torch.full_like(patches[:, :1], GRAY)
        masked = scatter(patches, indices, gather(torch.cat([patches, gray], dim=1), sources))
        h, w = patches.shape[2:4]
        if self.target in SIDE:
            side = SIDE[self.target]
            classes = predicted.unflatten(2, (side, side, NUM_COLORS)).argmax(dim=4)
            levels = torch.stack(
                [classes // LEVELS**2, classes // LEVELS % LEVELS, classes % LEVELS]
            )
            areas = ((levels + 0.5) / LEVELS).permute(1, 2, 0, 3, 4)  # (B, K, 3, side, side)
            filled = F.interpolate(areas.flatten(0, 1), (h, w)).unflatten(0, areas.shape[:2])
            filled = filled.permute(0, 1, 3, 4, 2)
        else:
            pixels = predicted.unflatten(2, (h, w, 3))
            filled = (pixels * self.std.flatten() + self.mean.flatten()).clamp(0, 1)
        filled = scatter(patches, indices, filled)
        return self.from_rgb(self.unpatchify(masked)), self.from_rgb(self.unpatchify(filled))


def _area_slices(size: int, count: int) -> list[slice]:
    """Divide a side of `size` pixels into `count` areas, as `adaptive_avg_pool2d` does."""
    return [slice(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
