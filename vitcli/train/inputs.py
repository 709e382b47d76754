"""Inputs of the training loop: images, or features if these cannot change.

With a frozen backbone and no augmentation, an image's features are the same in every epoch. They
are computed once, from images preprocessed as for evaluation, and the head is trained on them: the
same function of the weights at a fraction of the cost.
"""

import time
from collections.abc import Callable, Generator

import numpy as np
import torch
from torch import Tensor

from vitcli.config import AugmentConfig
from vitcli.data.decoder import Batch
from vitcli.data.loader import no_replacement_error, train_batches
from vitcli.data.order import batch_orders
from vitcli.data.source import Source
from vitcli.data.stream import Stream
from vitcli.data.transforms import EvalTransform, TrainTransform, to_float
from vitcli.devices import free_memory, to_device
from vitcli.errors import NOT_FINITE, CheckpointError, ImageError
from vitcli.inference import Inference, Output, run_source
from vitcli.metrics import Evaluation, MetricAccumulator
from vitcli.prediction import Predictor
from vitcli.train.events import Advance, Note, OnEvent
from vitcli.train.initial import build_empty
from vitcli.train.masking import Masking
from vitcli.train.objectives import Objective
from vitcli.train.parallel import unshard
from vitcli.train.run import Run

CachedFeatures = dict[tuple[str, str], tuple[Source, Tensor, list[ImageError]]]
"""Cached features: (split, fingerprint of its images) to (the images used, their features (N, D),
errors of unreadable images). The runs of a sweep start from one model, so they share the cache."""

FEATURE_BATCH_SIZE = 8192
"""Batch size for evaluation on features."""

MASKED_BATCH_SIZE = 64
"""Batch size for evaluation of masked images."""


def track_progress(what: str, total: int, on_event: OnEvent) -> Callable[[int], None]:
    """Return a callback that takes the size of each batch and, after a second, reports progress."""
    done, started = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if time.monotonic() - started > 1.0:
            on_event(Advance(what, done, total))

    return advance


def has_fixed_features(run: Run) -> bool:
    """Whether `Features` can replace `Images`: features are fixed and fit into memory on all ranks,
    nothing is streamed or sharded, and there is no teacher, which needs the images."""
    if isinstance(run.splits.train, Stream) or run.config.teacher:
        return False
    needed_bytes = 4 * _num_images(run) * run.info.model.feature_dim
    too_large = needed_bytes >= free_memory(run.device) / 4
    return _are_features_fixed(run) and not run.config.shard and not run.ranks.all_max(too_large)[0]


def _num_images(run: Run) -> int:
    return len(run.splits.train) + len(run.splits.val or ())


def _are_features_fixed(run: Run) -> bool:
    """Whether an image's features are the same at every step."""
    augment = run.config.augment
    no_augment = AugmentConfig(crop_area=(1.0, 1.0), crop_ratio=augment.crop_ratio, flip=False)
    return augment == no_augment and run.is_backbone_frozen  # a frozen backbone has no dropout


class Images:
    """Images, decoded and augmented for every step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lead = run.objective.lead if run.ranks.world_size > 1 else 0
        """Number of images loaded that precede this rank's part of each batch."""

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per batch."""
        return self.run.micro_batches

    def batches(self, first: int, last: int) -> Generator[tuple[Tensor, Tensor]]:
        """Yield (inputs (B, ...), labels int64 (B,)) of steps first + 1 to last, on the device."""
        run, config = self.run, self.run.config
        transform: EvalTransform | TrainTransform = EvalTransform(run.preprocess)
        # If features are fixed, use the same pixels as `Features`: free memory affects only speed.
        if not _are_features_fixed(run):
            # Crops may be upsampled, where a box filter would turn pixels into squares.
            filter = run.preprocess.interpolation
            filter = "bicubic" if filter == "box" else filter
            transform = TrainTransform(run.info.model.image_size, filter, config.augment)
        for pixels, labels, _ in train_batches(
            run.splits.train,
            transform,
            batch_size=run.batch_size,
            seed=config.seed,
            start_step=first,
            steps=last,
            workers=run.workers,
            balanced=config.balanced_sampling,
            on_unreadable=run.skip,
            part=run.part,
            lead=self.lead,
            pin=run.device.type == "cuda",
        ):
            images = to_float(to_device(pixels, run.device), run.preprocess)
            yield images, to_device(labels, run.device)

    def evaluate(self, objective: Objective) -> dict[str, float]:
        """Return the metrics of a model or its average on the validation split: top1, loss, ..."""
        run, val = self.run, self.run.splits.val
        assert val is not None
        if not isinstance(objective, Masking):
            evaluation = evaluate_split(run, val, "validation", run.inference(objective.model))
            return {**evaluation.metrics(), "loss": evaluation.loss}
        metrics, masked = MetricAccumulator(0), MaskedInference(run, objective)
        progress = track_progress("validation", len(val), run.on_event)
        for _, _, losses in run_source(val, masked, "losses", run.workers, progress, run.skip):
            metrics.add_losses(losses)
        return {"loss": metrics.result().loss}


def evaluate_split(run: Run, split: Source, title: str, model: Predictor | Inference) -> Evaluation:
    """Evaluate a classifier on a split of a run's dataset.

    Raises:
        DataError: no image can be read.
    """
    metrics = MetricAccumulator(len(split.classes), model.info.score)
    progress = track_progress(title, len(split), run.on_event)
    for _, indices, logits in run_source(split, model, "logits", run.workers, progress, run.skip):
        metrics.add(logits, split.labels[indices])
    return metrics.result()


class MaskedInference(Inference):
    """An objective that hides patches, in evaluation mode: a copy that is neither sharded nor
    compiled. The mask of an image depends only on its index."""

    def __init__(self, run: Run, objective: Masking) -> None:
        self.run, self.info, self.device = run, run.info, run.device
        self.batch_size = MASKED_BATCH_SIZE
        with torch.random.fork_rng([]):  # new layers draw initial weights, which are replaced
            model = build_empty(run.info.model, run.config)
            self.objective = type(objective)(model, run.config, run.preprocess)
        state = {name: unshard(tensor) for name, tensor in objective.state_dict().items()}
        self.objective.load_state_dict(state, assign=True)
        self.objective.to(run.device).eval()

    def compute(self, output: Output, batch: Batch) -> Tensor:
        """Compute the losses (n,) of images, or their reconstructions: the original, masked and
        reconstructed images, in RGB, (n, 3, H, W, 3). float32, on the CPU."""
        if not batch:
            return torch.empty(0)
        indices, pixels = zip(*batch, strict=True)
        stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        with torch.inference_mode(), self.run.autocast():
            x = to_float(to_device(stacked, self.device), self.run.preprocess)
            y = self.objective.validation_masks(x, indices)
            if output == "reconstructions":
                images = torch.stack([x, *self.objective.reconstruct(x, y)], dim=1)
                return self.objective.to_rgb(images).permute(0, 1, 3, 4, 2).cpu()
            losses: Tensor = self.objective(x, y)[0]
        return losses.cpu()


class Features:
    """Features (N, D), float32, on the device, if they are fixed and fit into memory. Those missing
    from `cache` are computed and added to it."""

    micro_batches = 1
    lead = 0

    def __init__(self, run: Run, cache: CachedFeatures) -> None:
        count = _num_images(run)
        run.on_event(
            Note(f"computing the features of {count:,} images once, because the backbone is frozen")
        )
        self.run, self.advance = run, track_progress("features", count, run.on_event)

        def get_features(split: str, source: Source) -> tuple[Source, Tensor]:
            key = split, source.fingerprint()
            if key not in cache:
                cache[key] = self._compute(split, source)
            source, values, errors = cache[key]
            for error in errors:
                run.skip(error)
            return source, values

        self.train = get_features("train", run.splits.images)
        self.val = get_features("val", run.splits.val) if run.splits.val is not None else None

    def batches(self, first: int, last: int) -> Generator[tuple[Tensor, Tensor]]:
        config, device, (source, features) = self.run.config, self.run.device, self.train
        labels = torch.from_numpy(source.labels)
        for indices, _ in batch_orders(
            source, self.run.batch_size, config.seed, first, last, config.balanced_sampling
        ):
            rows = torch.from_numpy(indices[self.run.part])
            yield features[to_device(rows, device)], to_device(labels[rows], device)

    def evaluate(self, objective: Objective) -> dict[str, float]:
        assert self.val is not None
        source, features = self.val
        metrics = MetricAccumulator(len(source.classes), self.run.info.score)
        with torch.inference_mode():
            for start in range(0, len(features), FEATURE_BATCH_SIZE):
                rows = slice(start, start + FEATURE_BATCH_SIZE)
                logits = objective.model.head(features[rows])  # in float32, as in `Inference`
                metrics.add(logits.float().cpu(), source.labels[rows])
        evaluation = metrics.result()
        return {**evaluation.metrics(), "loss": evaluation.loss}

    def _compute(self, split: str, source: Source) -> tuple[Source, Tensor, list[ImageError]]:
        """Return the images used of a split, their features, and the errors of unreadable images.
        As in `Images`, an unreadable training image is replaced by the next one of its class; one
        of the validation split is left out.

        Raises:
            CheckpointError: a feature is not finite.
            DataError: no image is readable.
            ImageError: no training image of a class is readable.
        """
        run, errors = self.run, list[ImageError]()
        reporting = run.workers, self.advance, errors.append
        batches = run_source(source, run.inference(run.model), "features", *reporting)
        _, indices, outputs = zip(*batches, strict=True)
        read_indices, features = np.concatenate(indices), torch.cat(outputs).to(run.device)
        if not features.isfinite().all():
            raise CheckpointError(
                "the model's features are not finite", where=run.config.model, hint=NOT_FINITE
            )
        if not errors:
            return source, features, errors
        if split != "train":
            return source.select(read_indices), features, errors
        row_of = {image: i for i, image in enumerate(read_indices.tolist())}
        rows = list[int]()
        for image in range(len(source)):
            row = next((row_of[i] for i in source.same_class(image) if i in row_of), None)
            if row is None:
                raise no_replacement_error(
                    next(e for e in errors if e.where == source.where(image))
                )
            rows.append(row)
        return source, features[to_device(torch.tensor(rows), run.device)], errors


Inputs = Images | Features
"""The training and validation splits, as inputs of a model."""
