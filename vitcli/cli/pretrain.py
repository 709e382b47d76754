"""`vit pretrain`."""

from __future__ import annotations

from vitcli.cli import options, training
from vitcli.cli import training_options as train

HELP_GROUPS = train.HELP_GROUPS


def pretrain(
    variant: train.Variant = None,
    overrides: train.Overrides = None,
    model: train.ContinueModel = None,
    data: train.Data = None,
    output: train.RunOutput = None,
    config: train.Config = None,
    resume: train.Resume = None,
    resolution: train.Resolution = None,
    patch_size: train.PatchSize = None,
    save_patch_size: train.SavePatchSize = None,
    posemb_method: train.PosembMethod = None,
    preprocess: train.PreprocessOption = None,
    classes: train.Classes = None,
    val_fraction: train.ValFraction = None,
    steps: train.Steps = None,
    epochs: train.Epochs = None,
    batch_size: train.BatchSize = None,
    accumulate: train.Accumulate = None,
    optimizer: train.Optimizer = None,
    lr: train.Lr = None,
    retrain: train.Retrain = None,
    weight_decay: train.WeightDecay = None,
    warmup: train.Warmup = None,
    schedule: train.Schedule = None,
    clip_norm: train.ClipNorm = None,
    loss: train.Loss = None,
    class_weights: train.ClassWeights = None,
    balanced_sampling: train.BalancedSampling = None,
    label_smoothing: train.LabelSmoothing = None,
    head_bias: train.HeadBias = None,
    dropout: train.Dropout = None,
    drop_path: train.DropPath = None,
    crop_area: train.CropArea = None,
    flip: train.Flip = None,
    randaugment: train.RandAugment = None,
    erasing: train.Erasing = None,
    mixup: train.Mixup = None,
    cutmix: train.Cutmix = None,
    ema: train.Ema = None,
    patience: train.Patience = None,
    seed: train.Seed = None,
    device: train.TrainDevice = None,
    precision: train.TrainPrecision = None,
    workers: train.Workers = None,
    eval_every: train.EvalEvery = None,
    save_every: train.SaveEvery = None,
    save_dtype: train.SaveDtype = None,
    tensorboard: train.TensorBoard = None,
    force: train.Force = False,
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Train a Vision Transformer from scratch on labelled images.

    The same loop as `vit finetune` with other defaults (AdamW, random weights). Everything goes
    into one folder, runs/NAME.
    """
    training.run_training("pretrain", locals())
