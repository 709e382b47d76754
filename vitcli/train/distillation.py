"""Knowledge distillation: the student learns the scores of a teacher (Hinton et al., arXiv
1503.02531) on the same augmented and mixed images (Beyer et al., arXiv 2106.05237)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.config import ClassLabel, Preprocess
from vitcli.data.classes import match_classes
from vitcli.errors import ConfigError
from vitcli.prediction import Predictor
from vitcli.train.config import TrainConfig
from vitcli.train.objectives import Classification, classification_losses
from vitcli.words import quote


class Teacher:
    """A frozen model that provides targets. Moving averages of the student share it.

    Args:
        predictor: the teacher's.
        classes: the student's; the teacher must have all of them.
        preprocess: the student's.

    Raises:
        ConfigError: the teacher is not a classifier, or has no class names.
        DataError: the teacher lacks a class.
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
                hint=f"write a copy with names: `vit convert {quote(name)} DST --classes FILE`",
            )
        rows = match_classes(classes, info.classes, config.data.path, "the teacher")
        self.inference, self.temperature = predictor.load(), config.temperature
        self.macs = info.model.macs()
        device = self.inference.device
        self.rows = torch.from_numpy(rows).to(device)
        mean, std, teacher_mean, teacher_std = (
            torch.tensor(values, device=device).view(3, 1, 1)
            for settings in (preprocess, info.preprocess)
            for values in (settings.mean, settings.std)
        )
        self.scale, self.shift = std / teacher_std, (mean - teacher_mean) / teacher_std

    def __deepcopy__(self, memo: object) -> Teacher:
        return self

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Return softmax scores (B, K) for the student's classes, at the temperature.

        Args:
            images: float32 (B, 3, H, W), normalized for the student; resized for the teacher.
        """
        size, dtype = self.inference.info.preprocess.size, self.inference.dtype
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        inputs = (images * self.scale + self.shift).to(dtype)
        batches = inputs.split(self.inference.batch_size)
        logits = torch.cat([self.inference.model(batch).float() for batch in batches])
        return (logits[:, self.rows] / self.temperature).softmax(dim=1)


class Distillation(Classification):
    """Learns a teacher's scores, instead of the labels or in addition to them. The head of a
    distillation token learns the scores, and that of the class token the labels (DeiT: arXiv
    2012.12877, section 4).

    Raises:
        ConfigError: the class token's head of such a model would not be trained.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, class_weights: Tensor | None, teacher: Teacher
    ) -> None:
        super().__init__(model, config, class_weights)
        self.teacher, self.target_macs = teacher, teacher.macs
        self.has_two_heads = getattr(model, "head_dist", None) is not None
        if self.has_two_heads and config.teacher_weight == 1:
            raise ConfigError(
                "--teacher-weight 1 does not train the class token's head of a model with a "
                "distillation token",
                hint="use --teacher-weight 0.5, as DeiT does",
            )

    def prepare(
        self, x: Tensor, labels: Tensor, step: int, first: int = 0, lead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return mixed images, and their soft labels and the teacher's scores as (B, 2, K)."""
        x, y = super().prepare(x, labels, step, first, lead)
        return x, torch.stack([y, self.teacher.scores(x)], dim=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        labels, scores = y.unbind(1)
        logits, distilled = self.model.both_logits(x) if self.has_two_heads else [self.model(x)] * 2
        weight = self.config.teacher_weight
        with torch.autocast(x.device.type, enabled=False):
            losses = classification_losses(logits, labels, self.config, self.class_weights)
            distill_losses = distillation_losses(distilled, scores, self.config.temperature)
        predictions = (logits + distilled).detach().argmax(dim=1)
        return (1 - weight) * losses + weight * distill_losses, predictions == labels.argmax(dim=1)


def distillation_losses(logits: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(scores || softmax(logits / T)), (B,), for logits (B, K) and teacher scores
    (B, K) at temperature T; T^2 preserves the gradient scale (Hinton et al., section 2)."""
    log_probs = (logits.float() / temperature).log_softmax(dim=1)
    return temperature**2 * F.kl_div(log_probs, scores, reduction="none").sum(dim=1)
