"""The Vision Transformer of arXiv 2010.11929 and, by configuration, its published variants.

    images (B, 3, H, W) [-> a hybrid's ResNet]
      -> patches embedded (B, P, D), position embeddings added, prefix tokens in front (B, N, D)
      -> depth x [ x + attention(norm(x)); x + mlp(norm(x)) ]
      -> norm, pooled (B, D), pre_logits -> features (B, F)
      -> head -> logits (B, num_classes)

Parameter names are timm's. Equations are those of section 3.1 of the paper.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcli.architectures import posemb
from vitcli.architectures.vit import RELATIVE, num_offsets
from vitcli.config import Activation, ModelConfig
from vitcli.errors import ConfigError
from vitcli.models.linear import Linear, QueryKeyValue
from vitcli.models.positions import Positions, Rope, apply_rope, build_rope, relative_position_index
from vitcli.models.resnet import Conv2d, DropPath, build_stem, init_layer


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v over (B, heads, N, d) (appendix A, equations 6 and 7):
    fused, except for training on short sequences in bf16 on a CPU, where the fused kernel's
    backward pass would take more than half of the step."""
    bias = None if bias is None else bias.to(q.dtype)
    short = k.shape[2] <= 128 and q.dtype is torch.bfloat16 and q.device.type == "cpu"
    if short and q.requires_grad:
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        return scores.softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, but computed in float32 under autocast, like its LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def build_norm(config: ModelConfig, width: int, enabled: bool = True) -> nn.Module:
    """Return a norm over tokens of that width, or an identity if not `enabled`."""
    norm_class = RMSNorm if config.norm == "rms" else nn.LayerNorm
    return norm_class(width, eps=config.norm_eps) if enabled else nn.Identity()


class Attention(nn.Module):
    """Multi-head self-attention (appendix A), with queries, keys and values in one matrix."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = QueryKeyValue(config.width, config.qkv_bias, config.key_bias)
        self.norm = build_norm(config, config.width, config.sub_norm == "both")
        if config.posemb == "relative":
            table = torch.empty(num_offsets(config.grid), config.num_heads)
            self.relative_position_bias_table = nn.Parameter(table)
        self.proj = Linear(config.width, config.width, bias=config.norm != "rms")
        self.proj_drop = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, num_outputs: int | None = None, positions: Positions | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the first `num_outputs` tokens."""
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, N, D / heads)
        bias = None
        if isinstance(positions, Rope):
            q, k = apply_rope(q, positions), apply_rope(k, positions)
        elif positions is not None:
            bias = self.relative_position_bias_table[positions[:num_outputs]].permute(2, 0, 1)
        x = attend(q[:, :, :num_outputs], k, v, bias)
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).flatten(2))))


class Mlp(nn.Module):
    """Two linear layers with a GELU between, or a SiLU gate (SwiGLU, gate first)."""

    def __init__(
        self, config: ModelConfig, dropout: float, swiglu: bool, sub_norm: bool = False
    ) -> None:
        super().__init__()
        self.activation, self.swiglu = config.activation, swiglu
        bias = config.norm != "rms"
        self.fc1 = Linear(config.width, config.mlp_dim, bias=bias)
        self.drop1 = nn.Dropout(dropout)
        hidden = config.mlp_dim // 2 if swiglu else config.mlp_dim
        self.norm = build_norm(config, hidden, sub_norm)
        self.fc2 = Linear(hidden, config.width, bias=bias)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        x = self.fc1(x)
        if self.swiglu:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = activate(x, self.activation)
        return self.drop2(self.fc2(self.norm(self.drop1(x))))


class LayerScale(nn.Module):
    """A learned factor per channel (CaiT, arXiv 2103.17239)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm encoder block (equations 2 and 3)."""

    def __init__(self, config: ModelConfig, dropout: float, drop_path: float) -> None:
        super().__init__()

        def build_scale() -> nn.Module:
            return LayerScale(config.width) if config.layer_scale else nn.Identity()

        self.norm1 = build_norm(config, config.width)
        self.attn = Attention(config, dropout)
        self.ls1 = build_scale()
        self.norm2 = build_norm(config, config.width)
        self.mlp = Mlp(config, dropout, config.swiglu, config.sub_norm != "none")
        self.ls2 = build_scale()
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        num_outputs: int | None = None,
        positions: Positions | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the first `num_outputs` tokens.

        Args:
            factors: `DropPath.factors` of both branches. They are drawn outside the block: if each
                had its own rate inside, torch.compile would compile every block separately, and
                look through all that it compiled on every call.
        """
        attended = self.ls1(self.attn(self.norm1(x), num_outputs, positions))
        x = x[:, :num_outputs] + (attended if factors is None else attended * factors[0])
        hidden = self.ls2(self.mlp(self.norm2(x)))
        return x + (hidden if factors is None else hidden * factors[1])


class AttentionPool(nn.Module):
    """One learned query attends to the patch tokens ("map": MAPHead of big_vision/models/vit.py,
    `AttentionPoolLatent` of timm)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config, dropout=0.0, swiglu=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, D)
        b, n, d = x.shape
        heads = (self.num_heads, d // self.num_heads)
        q = self.q(self.latent.expand(b, 1, d)).view(b, 1, *heads).transpose(1, 2)
        k, v = self.kv(x).view(b, n, 2, *heads).permute(2, 0, 3, 1, 4)
        pooled = attend(q, k, v).transpose(1, 2).reshape(b, 1, d)
        pooled = self.proj(pooled)
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]


class PatchEmbed(nn.Module):
    """Equation 1's E: one matrix for every patch, as a strided convolution; a hybrid takes its
    patches from its stem's feature map (section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kernel = config.patch_kernel
        self.backbone = build_stem(config.stem) if config.stem else nn.Identity()
        self.proj = Conv2d(
            config.patch_channels, config.width, kernel, kernel, bias=config.patch_bias
        )
        self.norm = build_norm(config, config.width, config.norm == "rms")

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, rows * columns, D)
        return self.norm(self.proj(self.backbone(images)).flatten(2).transpose(1, 2))


class ViT(nn.Module):
    """A Vision Transformer.

    Args:
        config: the architecture.
        dropout: after every linear layer but q, k, v, and after the position embeddings
            (Table 3); training only.
        drop_path: stochastic depth of the last block, rising linearly from 0; training only.

    Parameters have PyTorch's default initialization: load a checkpoint, or call `init_weights`.
    """

    computes_all_tokens = True
    """In evaluation mode, whether the last block also computes tokens that the head does not read,
    for code that inspects it."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0, drop_path: float = 0.0) -> None:
        super().__init__()
        self.config = config
        d = config.width

        def build_token(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(1, count, d)) if count else None

        self.patch_embed = PatchEmbed(config)
        self.cls_token = build_token(int(config.class_token))
        self.dist_token = build_token(int(config.distill_token))
        self.reg_token = build_token(config.num_registers)
        rows, columns = config.grid
        if config.posemb == "learn":
            self.pos_embed = build_token(config.posemb_prefix + rows * columns)
        elif config.posemb == "sincos2d":
            self.register_buffer("pos_embed", torch.empty(1, rows * columns, d))
        elif config.posemb == "learn2d":
            self.pos_embed_row = nn.Parameter(torch.empty(1, rows, d // 2))
            self.pos_embed_column = nn.Parameter(torch.empty(1, columns, d // 2))
        self.pos_drop = nn.Dropout(dropout)
        self.norm_pre = build_norm(config, d, config.pre_norm)
        rates = [drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.Sequential(*(Block(config, dropout, rate) for rate in rates))
        self.norm = build_norm(config, d, config.final_norm)
        self.attn_pool = AttentionPool(config) if config.pool == "map" else None
        self.fc_norm = build_norm(config, d, config.fc_norm)
        self.pre_logits: nn.Module = nn.Identity()
        if config.pre_logits:  # the hidden layer of the paper's pre-training head (section 3.1)
            layers = OrderedDict(fc=nn.Linear(d, config.pre_logits), act=nn.Tanh())
            self.pre_logits = nn.Sequential(layers)

        def build_head() -> nn.Module:
            return Head(config.feature_dim, config.num_classes)

        self.head = build_head() if config.num_classes else nn.Identity()
        self.head_dist = build_head() if config.num_classes and config.distill_token else None

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, 3, H, W); without a head, the features."""
        if self.head_dist is not None:
            class_logits, distill_logits = self.both_logits(images)
            return (class_logits + distill_logits) / 2
        return self.head(self.pool(self.encode(images, self._num_outputs())))

    def both_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the class token and of the distillation token, each (B, num_classes)."""
        assert self.head_dist is not None
        tokens = self.encode(images, self._num_outputs())
        return self.head(tokens[:, 0]), self.head_dist(tokens[:, 1])

    def features(self, images: Tensor) -> Tensor:
        """The input of the head, (B, feature_dim); with a distillation token, the mean of both."""
        return self.pool(self.encode(images, self._num_outputs()))

    def _num_outputs(self) -> int | None:
        """Number of leading tokens that the last block computes; None: all."""
        computes_all = self.computes_all_tokens and not self.training
        return None if computes_all else self.config.num_head_tokens

    def encode(self, images: Tensor, num_outputs: int | None = None) -> Tensor:
        """Return all tokens after the last block and the final norm, (B, N, D); or only the first
        `num_outputs`; the last block computes nothing for the others."""
        expected = (3, *self.config.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            shape = ", ".join(map(str, ("N", *expected)))
            raise ConfigError(f"the model expects a batch ({shape}), not {(*images.shape,)}")
        return self.encode_tokens(self.embed(images), num_outputs)

    def encode_tokens(
        self, tokens: Tensor, num_outputs: int | None = None, patches: Tensor | None = None
    ) -> Tensor:
        """Like `encode`, but for the tokens of `embed` or a subset of them.

        Args:
            patches: int64 (B, P'), the indices of these patches for each image; None: all.
        """
        x = self.norm_pre(self.pos_drop(tokens))
        positions: Positions | None = None
        if self.config.rope != "none":
            positions = build_rope(self.config, x.device)
            if patches is not None:
                cos, sin = (table[patches][:, None] for table in positions[:2])
                positions = Rope(cos, sin, positions.interleaved)
        elif self.config.posemb == "relative":
            positions = relative_position_index(self.config.grid, x.device)
        last = len(self.blocks) - 1
        for i, block in enumerate(cast(Iterable[Block], self.blocks)):
            factors = block.drop_path.factors(x, 2) if self.training else None
            x = block(x, num_outputs if i == last else None, positions, factors)
        return self.norm(x)

    def embed(self, images: Tensor) -> Tensor:
        """Equation 1: prefix tokens, patches and position embeddings, (B, N, D)."""
        return self.add_positions(self.patch_embed(images))

    def add_positions(self, x: Tensor) -> Tensor:
        """Add position embeddings to embedded patches (B, P, D), and prepend the prefix tokens."""
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        table = self.position_embeddings()
        if table is None:
            return torch.cat([*prefix, x], dim=1)
        prefix_counts = {"all": len(prefix), "class": int(self.cls_token is not None), "patches": 0}
        n = prefix_counts[self.config.posemb_tokens]
        x = torch.cat([*prefix[:n], x], dim=1) + table
        # Tokens without a position embedding go between: class token, registers, patches.
        return torch.cat([x[:, :n], *prefix[n:], x[:, n:]], dim=1) if prefix[n:] else x

    def position_embeddings(self) -> Tensor | None:
        """The table that `embed` adds, (1, posemb_prefix + rows * columns, D)."""
        if self.config.posemb in ("learn", "sincos2d"):
            return self.pos_embed
        if self.config.posemb != "learn2d":
            return None
        rows, columns = self.config.grid
        by_column = self.pos_embed_column.repeat(1, rows, 1)
        by_row = self.pos_embed_row.repeat_interleave(columns, dim=1)
        return torch.cat([by_column, by_row], dim=2)  # x first, then y (paper D.4)

    def pool(self, tokens: Tensor) -> Tensor:
        """Pool tokens (B, N, D) to features (B, feature_dim)."""
        if self.attn_pool is not None:
            x = self.attn_pool(tokens[:, self.config.num_prefix_tokens :])
        elif self.config.pool in ("gap", "token+gap"):
            x = tokens[:, self.config.num_prefix_tokens :].mean(dim=1)
            if self.config.pool == "token+gap":
                x = torch.cat([tokens[:, 0], x], dim=1)
        elif self.config.distill_token:
            x = (tokens[:, 0] + tokens[:, 1]) / 2
        else:
            x = tokens[:, 0]
        return self.pre_logits(self.fc_norm(x))

    @torch.no_grad()
    def init_weights(self, seed: int, head_bias: float = 0.0) -> None:
        """Initialize every parameter as vit_jax/models_vit.py does: Xavier-uniform linear layers
        with biases near 0, LeCun-normal patch embedding (its fan-in is one patch of pixels) and
        pre-logits, position embeddings N(0, 0.02), class token and head 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.startswith("head"):
                p.fill_(head_bias if name.endswith("bias") else 0.0)
            elif name.startswith("patch_embed.backbone"):
                init_layer(name, p, generator, zero_last=True)
            elif name.endswith("gamma"):
                p.fill_(1e-5)
            elif "norm" in name:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name in ("cls_token", "dist_token") or name.endswith(RELATIVE):
                p.zero_()
            elif name.startswith(("pos_embed", "reg_token")):
                p.normal_(0.0, 0.02, generator=generator)
            elif name in ("patch_embed.proj.weight", "pre_logits.fc.weight", "attn_pool.latent"):
                # Flax divides by the standard deviation of a normal distribution cut off at 2.
                std = 1.0 / math.sqrt(p[0].numel()) / 0.87962566
                nn.init.trunc_normal_(p, 0.0, std, -2 * std, 2 * std, generator=generator)
            elif name.endswith("bias"):
                p.normal_(0.0, 1e-6 if ".mlp.fc" in name else 0.0, generator=generator)
            elif ".qkv." in name or ".kv." in name:  # q, k and v are initialized separately
                for matrix in p.split(self.config.width):
                    nn.init.xavier_uniform_(matrix, generator=generator)
            else:
                nn.init.xavier_uniform_(p, generator=generator)
        if self.config.posemb == "sincos2d":
            table = posemb.sincos2d(self.config.grid, self.config.width)
            self.get_buffer("pos_embed").copy_(torch.from_numpy(table))


class Head(nn.Linear):
    """The linear head, computed in the dtype of its weights."""

    def forward(self, features: Tensor) -> Tensor:  # (B, F) -> (B, num_classes)
        return super().forward(features.to(self.weight.dtype))
