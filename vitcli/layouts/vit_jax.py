"""npz checkpoints of vit_jax: the ViTs and hybrids of the paper's authors, and of AugReg."""

from vitcli.checkpoints.tensor_file import Store
from vitcli.config import Architecture, ModelConfig
from vitcli.layouts import flax
from vitcli.layouts.layout import Match, unsupported_fields
from vitcli.layouts.table import Row


class VitJax(flax.NpzLayout):
    """Submodules have the numbering of flax before Linen; files with Linen's are read too."""

    name = "vit-npz"

    def find(self, store: Store) -> Match | None:
        return flax.find_vit(store, vit_jax=True)

    def unsupported(self, model: Architecture) -> list[str]:
        if not isinstance(model, ModelConfig):
            return ["a BiT ResNet"]
        stem: list[str] = []
        if model.stem:
            stem = unsupported_fields(
                model.stem, pool_padding=None, std_eps=None, std_eps_in=None, norm_eps=None
            )
        return stem + unsupported_fields(
            model,
            class_token=None,
            pool=("token",) if model.class_token else ("gap",),
            pre_logits=None,
            stem=None,
            activation=("gelu", "gelu_tanh"),
            norm_eps=None,
        )

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        assert isinstance(model, ModelConfig)
        stem = flax.stem_rows(model.stem.depths) if model.stem else ()
        return flax.vit_rows(flax.PRE_LINEN, flax.POSEMB_NAMES[0], None) + stem
