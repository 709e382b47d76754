"""`vit finetune`."""

from vitcli.cli.training import training_command

finetune = training_command(
    "finetune",
    """Fine-tune a pre-trained model on your own classes.

    The default recipe is the paper's: SGD, cosine decay and a new, zero-initialized head. Values
    with the default auto are chosen from the size of the dataset and the other options; the main
    ones are printed before the first step. Everything is written to one directory, runs/DATASET.

    \b
    Examples:
      vit finetune --data flowers
      vit finetune --data flowers --resolution 384 --lr 0.003,0.01,0.03 -o runs/flowers-384
      vit finetune --resume runs/flowers
    """,
)
