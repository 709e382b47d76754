"""`vit finetune`."""

from vitcli.cli.training import training_command

finetune = training_command(
    "finetune",
    """Fine-tune a pre-trained model on your own classes.

    The default recipe is that of the ViT paper (Dosovitskiy et al., 2021): SGD, cosine decay and a
    new, zero-initialized head. Options that default to auto are set from the size of the dataset
    and the other options; the main ones are printed before the first step. Everything is written
    to one directory, by default runs/DATASET.

    \b
    Examples:
      vit finetune --data flowers
      vit finetune --data flowers --resolution 384 --lr 0.003,0.01,0.03 -o runs/flowers-384
      vit finetune --resume runs/flowers
    """,
)
