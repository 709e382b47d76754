"""`vit pretrain`."""

from __future__ import annotations

from vitcli.cli import options, training


def pretrain(
    variant: training.Variant = None,
    overrides: training.Overrides = None,
    model: training.ContinueModel = None,
    data: training.Data = None,
    output: training.RunOutput = None,
    config: training.Config = None,
    resume: training.Resume = None,
    resolution: training.Resolution = None,
    patch_size: training.PatchSize = None,
    save_patch_size: training.SavePatchSize = None,
    posemb_method: training.PosembMethod = None,
    preprocess: training.PreprocessOption = None,
    classes: training.Classes = None,
    val_fraction: training.ValFraction = None,
    steps: training.Steps = None,
    epochs: training.Epochs = None,
    batch_size: training.BatchSize = None,
    accumulate: training.Accumulate = None,
    optimizer: training.Optimizer = None,
    lr: training.Lr = None,
    weight_decay: training.WeightDecay = None,
    warmup: training.Warmup = None,
    schedule: training.Schedule = None,
    clip_norm: training.ClipNorm = None,
    loss: training.Loss = None,
    label_smoothing: training.LabelSmoothing = None,
    head_bias: training.HeadBias = None,
    dropout: training.Dropout = None,
    drop_path: training.DropPath = None,
    crop_area: training.CropArea = None,
    flip: training.Flip = None,
    randaugment: training.RandAugment = None,
    erasing: training.Erasing = None,
    mixup: training.Mixup = None,
    cutmix: training.Cutmix = None,
    seed: training.Seed = None,
    device: training.TrainDevice = None,
    precision: training.TrainPrecision = None,
    workers: training.Workers = None,
    eval_every: training.EvalEvery = None,
    save_every: training.SaveEvery = None,
    save_dtype: training.SaveDtype = None,
    force: training.Force = False,
    offline: options.Offline = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Train a Vision Transformer from scratch on labelled pictures.

    The same loop as `vit finetune` with other defaults (AdamW, random weights). Everything goes
    into one folder, runs/NAME.
    """
    training.run_training("pretrain", locals())
