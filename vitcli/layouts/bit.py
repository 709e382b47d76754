"""npz checkpoints of BiT (arXiv 1912.11370). Source: bit_pytorch/models.py."""

import re

from vitcli.checkpoints.tensor_file import Store
from vitcli.config import Architecture, BiTConfig
from vitcli.layouts import flax
from vitcli.layouts.layout import Match, find_prefix, tensors_under, unsupported_bit_fields
from vitcli.layouts.table import Row, add_prefix

_ANCHOR = "root_block/standardized_conv2d/kernel"
STRIP_NUMBERS = (r"(/standardized_conv2d)_\d+/", r"\1/")
"""Some files number their convolutions: a regex that finds the number, and its replacement."""

_TABLES = (
    """
stem.conv.weight         root_block/standardized_conv2d/kernel  conv
norm.*                   group_norm/*                      gamma
head.fc.*                head/conv2d/*                     conv
""",
    """
{ours}.norm{k}.*         {unit}/{letter}/group_norm/*      gamma
{ours}.conv{k}.weight    {unit}/{letter}/standardized_conv2d/kernel  conv
""",
    """
{ours}.downsample.conv.weight  {unit}/a/proj/standardized_conv2d/kernel  conv
""",
)


def find_bit(
    store: Store, anchor: str, tables: tuple[str, str, str], pool_padding: str
) -> Match | None:
    """Match a BiT ResNet by the name of its root convolution, `anchor`."""
    prefix = find_prefix([re.sub(*STRIP_NUMBERS, name) for name in store.tensors], anchor)
    if prefix is None:
        return None
    tensors = tensors_under(store, prefix, *STRIP_NUMBERS)
    flat = flax.is_flat(tensors, "norm-pre-head/scale")
    rows = flax.resnet_rows(tables, flax.count_units(tensors), "", "unit{:02}", flat)
    resnet = {"std_eps": 1e-10, "pool_padding": pool_padding}
    return Match(rows, tensors, flax.TRAINING, resnet=resnet, default=flax.SQUASHED)


class Bit(flax.NpzLayout):
    """Tensors have TensorFlow's names, under the prefix "resnet/"."""

    name = "bit-npz"

    def find(self, store: Store) -> Match | None:
        return find_bit(store, _ANCHOR, _TABLES, "zeros")

    def unsupported(self, model: Architecture) -> list[str]:
        if not isinstance(model, BiTConfig):
            return ["a Vision Transformer"]
        return unsupported_bit_fields(model, "zeros")

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        assert isinstance(model, BiTConfig)
        table = flax.resnet_rows(_TABLES, model.resnet.depths, "", "unit{:02}", flat=False)
        return add_prefix(table, "resnet/")
