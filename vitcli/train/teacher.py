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
            raise ConfigError("the teacher has no classes", where=name)
        if not info.classes:
            raise ConfigError(
                "the teacher has no class names",
                where=name,
                hint=f"write a copy with names: `vit convert {name} DST --classes FILE`",
            )
        rows = match_classes(classes, info.classes, config.data.path, "the teacher")
        self.inference = predictor.load()
        self.rows = torch.from_numpy(rows).to(self.inference.device)
        self.student, self.temperature = preprocess, config.temperature
        self.macs = info.model.macs()

    def __deepcopy__(self, memo: object) -> Teacher:
        return self

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Softmax scores (B, K) of the student's classes, at the temperature.

        Args:
            images: float32 (B, 3, H, W), normalized for the student; resized to the teacher's size.
        """
        own, student = self.inference.info.preprocess, self.student

        def channels(values: tuple[float, ...]) -> Tensor:
            return images.new_tensor(values).view(3, 1, 1)

        colours = images * channels(student.std) + channels(student.mean)
        if images.shape[2:] != own.size:
            colours = F.interpolate(colours, own.size, mode="bilinear", antialias=True)
        given = ((colours - channels(own.mean)) / channels(own.std)).to(self.inference.dtype)
        parts = given.split(self.inference.batch_size)
        logits = torch.cat([self.inference.model(part).float() for part in parts])
        return (logits[:, self.rows] / self.temperature).softmax(dim=1)
