"""A teacher: a model whose scores a run learns (knowledge distillation: Hinton et al., arXiv
1503.02531). It sees the same augmented and mixed images as its student (Beyer et al., arXiv
2106.05237)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitcli.config import ClassLabel, Preprocess
from vitcli.data.classes import match_classes
from vitcli.errors import ConfigError
from vitcli.prediction import Predictor
from vitcli.train_config import TrainConfig


class Teacher:
    """A model that is not trained. Averages of its student share it.

    Args:
        predictor: of the model.
        classes: the student's; the teacher must know them all.
        preprocess: the student's.

    Raises:
        ConfigError: the model does not classify, or does not name its classes.
        DataError: it does not know a class.
    """

    def __init__(
        self,
        predictor: Predictor,
        classes: tuple[ClassLabel, ...],
        preprocess: Preprocess,
        config: TrainConfig,
    ) -> None:
        info, name = predictor.info, predictor.name
        if not info.model.num_classes or info.score == "none":
            hint = "choose a model that has the classes of the dataset"
            raise ConfigError("the teacher predicts no classes", where=name, hint=hint)
        if not info.classes:
            raise ConfigError(
                "the teacher has no class names",
                where=name,
                hint=f"write a copy with names: `vit convert {name} DST --classes FILE`",
            )
        rows = match_classes(classes, info.classes, config.data.path, "the teacher")
        self.inference, self.temperature = predictor.load(), config.temperature
        self.macs = info.model.macs()
        device = self.inference.device
        self.rows = torch.from_numpy(rows).to(device)
        mean, std, own_mean, own_std = (
            torch.tensor(values, device=device).view(3, 1, 1)
            for how in (preprocess, info.preprocess)
            for values in (how.mean, how.std)
        )
        self.scale, self.shift = std / own_std, (mean - own_mean) / own_std

    def __deepcopy__(self, memo: object) -> Teacher:
        return self

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Softmax scores (B, K) of the student's classes, at the temperature.

        Args:
            images: float32 (B, 3, H, W), normalized for the student; resized to the teacher's size.
        """
        size, dtype = self.inference.info.preprocess.size, self.inference.dtype
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        given = (images * self.scale + self.shift).to(dtype)
        parts = given.split(self.inference.batch_size)
        logits = torch.cat([self.inference.model(part).float() for part in parts])
        return (logits[:, self.rows] / self.temperature).softmax(dim=1)
