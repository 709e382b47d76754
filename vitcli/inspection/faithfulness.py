"""Faithfulness of attention maps, measured by deletion and insertion of patches."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitcli.config import Score
from vitcli.inference import CorePool
from vitcli.inspection.attention import Floats
from vitcli.models.vit import ViT
from vitcli.prediction import to_scores


class Faithfulness(NamedTuple):
    """Score of a class as patches are removed or revealed in a map's order (Petsiuk et al., arXiv
    1806.07421). A faithful map has a small deletion area and a large insertion area."""

    deletion: Floats
    """(steps + 1,) scores, most relevant patches removed first: replaced by the mean color."""
    insertion: Floats
    """(steps + 1,) scores, most relevant patches revealed first, over a blurred image."""

    def areas(self) -> dict[str, float]:
        """Return the areas under the curves by name."""
        return {k: float(np.trapezoid(c, dx=1 / (len(c) - 1))) for k, c in self._asdict().items()}


def faithfulness_of(
    model: ViT,
    image: Tensor,
    relevance: Floats,
    target: int,
    score: Score,
    cores: CorePool,
    steps: int = 20,
) -> Faithfulness:
    """Compute deletion and insertion curves of one map on one image.

    Args:
        image: (3, H, W), normalized; 0 is the mean color.
        relevance: (rows, columns).
        target: the class to score.
        score: the score function of the model's logits.
        cores: pool to run the model on.
        steps: number of steps in which patches are removed or revealed.
    """
    rows, columns = model.config.grid
    order = np.argsort(-relevance.reshape(-1), kind="stable")
    height, width = image.shape[1:]
    patch_size = model.config.patch_size
    kernel = 2 * max(patch_size) + 1
    blurred = nn.functional.avg_pool2d(
        nn.functional.pad(image[None], (kernel // 2,) * 4, mode="replicate"), kernel, stride=1
    )[0]
    deleted, inserted = [], []
    for step in range(steps + 1):
        selected = np.zeros(rows * columns, bool)
        selected[order[: round(len(order) * step / steps)]] = True
        mask = torch.from_numpy(selected.reshape(rows, columns)).to(image.device)
        pixels = mask.repeat_interleave(patch_size[0], 0).repeat_interleave(patch_size[1], 1)
        pixels = nn.functional.pad(pixels, (0, width - pixels.shape[1], 0, height - len(pixels)))
        deleted.append(torch.where(pixels, torch.zeros_like(image), image))
        inserted.append(torch.where(pixels, image, blurred))

    @torch.no_grad()
    def scores(images: list[Tensor]) -> Tensor:
        return to_scores(model(torch.stack(images)), score)[:, target].float().cpu()

    curves = cores.submit(scores, deleted + inserted)().numpy()
    return Faithfulness(curves[: steps + 1], curves[steps + 1 :])


def random_maps(grid: tuple[int, int], count: int, seed: int = 0) -> Iterator[Floats]:
    """Generate random maps, the baseline for faithfulness."""
    generator = np.random.default_rng(seed)
    return (generator.random(grid).astype(np.float32) for _ in range(count))
