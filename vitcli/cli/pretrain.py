"""`vit pretrain`."""

from vitcli.cli.training import training_command

pretrain = training_command(
    "pretrain",
    """Pre-train a model, with or without labels.

    Uses the training loop of `vit finetune` with different defaults: random initial weights and
    AdamW. Options that default to auto are set from the size of the dataset and the other options;
    the main ones are printed before the first step. Everything is written to one directory, by
    default runs/DATASET.

    \b
    Examples:
      vit pretrain --data imagenet --variant S/16 --epochs 90
      vit pretrain --data 'shards/train-{0000..0099}.tar' --variant Ti/16 --set depth=6
      vit pretrain --data photos --objective mae --variant S/16 --epochs 400
    """,
)
