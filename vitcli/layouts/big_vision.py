"""npz checkpoints of big_vision: ViTs, SigLIP's image tower, and BiT ResNets (`bit_paper`)."""

from typing import Any

from vitcli.checkpoints.tensor_file import Store
from vitcli.config import Architecture, BiTConfig, ModelConfig
from vitcli.errors import CheckpointError
from vitcli.layouts import flax
from vitcli.layouts.bit import find_bit
from vitcli.layouts.layout import Match, find_prefix, unsupported_bit_fields, unsupported_fields
from vitcli.layouts.table import Row

_ANCHOR = "root_block/conv_root/kernel"
_TABLES = (
    """
stem.conv.weight         root_block/conv_root/kernel       conv
norm.*                   norm-pre-head/*                   channels
head.fc.*                head/*                            pointwise
""",
    flax.HYBRID_TABLES[1],
    """
{ours}.downsample.conv.weight  {unit}/conv_proj/kernel     conv
""",
)


class BigVision(flax.NpzLayout):
    """Submodules have Linen's numbering; the max-pool of a BiT ResNet pads with -inf."""

    name = "big_vision"

    def find(self, store: Store) -> Match | None:
        match = find_bit(store, _ANCHOR, _TABLES, "-inf") or flax.find_vit(store, vit_jax=False)
        if match is None and find_prefix(store.tensors, "gn_root/scale", "head/kernel") is not None:
            raise CheckpointError(
                "post-activation ResNets of big_vision are not supported", where=store.path
            )
        return match

    def unsupported(self, model: Architecture) -> list[str]:
        if isinstance(model, BiTConfig):
            return unsupported_bit_fields(model, "-inf")
        return unsupported_fields(
            model,
            class_token=None,
            pool=("token",) if model.class_token else ("gap", "map"),
            posemb=("learn", "sincos2d"),
            posemb_tokens=("patches",),
            pre_logits=None,
            activation=("gelu", "gelu_tanh"),
            norm_eps=None,
        )

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        if isinstance(model, BiTConfig):
            return flax.resnet_rows(_TABLES, model.resnet.depths, "", "unit{:02}", flat=False)
        return flax.vit_rows(flax.LINEN, flax.POSEMB_NAMES[1], "MAPHead_0/")

    def computed(self, model: Architecture) -> dict[str, Any]:
        if not isinstance(model, ModelConfig) or model.posemb != "sincos2d":
            return {}
        from vitcli.architectures.posemb import sincos2d

        return {"pos_embed": sincos2d(model.grid, model.width)}
