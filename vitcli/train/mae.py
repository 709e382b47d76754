"""Masked autoencoding (MAE: He et al., arXiv 2111.06377).

Three quarters of an image's patches are hidden. The encoder sees only the visible ones, with their
position embeddings and the class token. A light decoder takes its output and a learned vector for
each hidden patch, and predicts the pixels of the hidden patches, normalized by each patch's own
mean and standard deviation. The encoder is stored as the model.

As in the authors' code (github.com/facebookresearch/mae, models_mae.py): int(P (1 - ratio)) patches
are visible, chosen by a uniform shuffle of each image's patches; the decoder has fixed sine-cosine
position embeddings (none for the class token); a patch's variance is unbiased and 1e-6 is added to
it; the loss is the mean over hidden patches and their pixels, in the model's normalized input.
Dense layers are initialized Xavier-uniform with zero biases, the learned vector normal with std
0.02.

Unlike the authors' code: the encoder's position embeddings are those of the model (learned, unless
`--set posemb=sincos2d --set posemb_tokens=patches`), and the decoder's are `posemb.sincos2d`, whose
frequencies differ slightly. Grids need not be square.
"""

import numpy as np
import torch
from torch import Tensor, nn

from vitcli.architectures import posemb
from vitcli.config import ModelConfig, Preprocess
from vitcli.data.source import Ints
from vitcli.errors import ConfigError
from vitcli.models.vit import Block
from vitcli.train.config import TrainConfig
from vitcli.train.masking import GRAY, Masking, gather, scatter

WIDTH, DEPTH, HEAD_WIDTH = 512, 8, 32
"""The paper's decoder: width, number of blocks, and width of each of its 16 heads."""


class MaskedAutoencoder(Masking):
    """The MAE objective. y: int64 (B, P), a permutation of the patches, the visible ones first."""

    def __init__(self, model: nn.Module, config: TrainConfig, preprocess: Preprocess) -> None:
        super().__init__(model, config, preprocess)
        if self.architecture.stem:
            raise ConfigError(
                "--objective mae requires a plain ViT: the ResNet of a hybrid sees all patches",
                hint="use --objective masked-patch",
            )
        if self.architecture.posemb == "relative":
            raise ConfigError(
                "--objective mae does not support posemb 'relative'",
                hint="use --objective masked-patch",
            )
        self.num_visible = max(1, int(self.num_patches * (1 - self.ratio)))
        self.decoder = Decoder(self.architecture, decoder_config(self.architecture, config))
        self.decoder.init_weights(config.seed)

    @property
    def macs(self) -> int:
        encoder, decoder = self.architecture, self.decoder
        prefix, weights = encoder.num_prefix_tokens, self.model.patch_embed.proj.weight.numel()
        num_tokens, num_hidden = prefix + self.num_visible, self.num_patches - self.num_visible
        macs = self.num_patches * weights + num_tokens * decoder.embed.weight.numel()
        macs += num_hidden * decoder.predict.weight.numel()
        for layer in (*encoder.blocks(num_tokens), *decoder.config.blocks(encoder.num_tokens)):
            macs += layer.macs
        return int(macs)

    @property
    def note(self) -> str:
        decoder = self.decoder.config
        return (
            f"objective: the encoder sees {self.num_visible} of {self.num_patches} patches; a "
            f"decoder of depth {decoder.depth} and width {decoder.width} predicts the others"
        )

    def draw_mask(self, rng: np.random.Generator) -> Ints:
        return rng.permutation(self.num_patches)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        predicted = self.predict(x, y)
        with torch.autocast(x.device.type, enabled=False):
            target, mean, std = self.target(x, y)
            losses = (predicted.float() - target).square().mean(dim=(1, 2))
        return losses, torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Predict the normalized pixels of the hidden patches, (B, P - visible, h w 3)."""
        prefix = self.architecture.num_prefix_tokens
        tokens = self.model.embed(x)
        visible = gather(tokens[:, prefix:], y[:, : self.num_visible])
        visible = torch.cat([tokens[:, :prefix], visible], dim=1)
        encoded = self.model.encode_tokens(visible, patches=y[:, : self.num_visible])
        predicted: Tensor = self.decoder(encoded, y, prefix)
        return predicted

    def target(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized pixels of the hidden patches, (B, P - visible, h w 3), and the mean
        and standard deviation that normalized them, (B, P - visible, 1) each."""
        pixels = gather(self.patchify(x.float()).flatten(2), y[:, self.num_visible :])
        mean = pixels.mean(dim=2, keepdim=True)
        std = (pixels.var(dim=2, keepdim=True) + 1e-6).sqrt()
        return (pixels - mean) / std, mean, std

    @torch.no_grad()
    def reconstruct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden patches are gray; predictions are denormalized with each patch's own mean and
        standard deviation."""
        patches, hidden = self.patchify(x.float()), y[:, self.num_visible :]
        _, mean, std = self.target(x, y)
        pixels = (self.predict(x, y).float() * std + mean).unflatten(2, patches.shape[2:])
        gray = self.patchify(self.from_rgb(torch.full_like(x.float(), GRAY)))
        masked = scatter(patches, hidden, gather(gray, hidden))
        return self.unpatchify(masked), self.unpatchify(scatter(patches, hidden, pixels))


class Decoder(nn.Module):
    """Transformer blocks over all tokens of an image, the prefix tokens first.

    Args:
        encoder: the architecture of the encoder.
        config: the configuration of the decoder's blocks: width, depth, heads, ...
    """

    def __init__(self, encoder: ModelConfig, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, (h, w) = config.width, encoder.patch_size
        self.embed = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        table = torch.from_numpy(posemb.sincos2d(encoder.grid, width))
        self.register_buffer("pos_embed", table, persistent=False)
        self.blocks = nn.Sequential(*(Block(config, 0.0, 0.0) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.predict = nn.Linear(width, h * w * 3)

    pos_embed: Tensor

    def forward(self, encoded: Tensor, order: Tensor, prefix: int) -> Tensor:
        """Predict the pixels of the hidden patches, in the order of `order` (B, P), from the tokens
        of the visible ones (B, prefix + visible, D)."""
        x = self.embed(encoded)
        visible = x.shape[1] - prefix
        hidden = self.mask_token.to(x.dtype).expand(len(x), order.shape[1] - visible, -1)
        patches = torch.cat([x[:, prefix:], hidden], dim=1)
        patches = gather(patches, order.argsort(dim=1)) + self.pos_embed  # in image order
        x = self.norm(self.blocks(torch.cat([x[:, :prefix], patches], dim=1)))
        predicted: Tensor = self.predict(gather(x[:, prefix:], order[:, visible:]))
        return predicted

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name == "mask_token":
                p.normal_(0.0, 0.02, generator=generator)
            elif "norm" in name:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                p.zero_()
            else:
                nn.init.xavier_uniform_(p, generator=generator)


def decoder_config(encoder: ModelConfig, config: TrainConfig) -> ModelConfig:
    """Return the decoder's configuration: for B and larger, the paper's 8 blocks of width 512, two
    thirds of B's depth and width. Smaller models keep this ratio: 8 of 256 for S, of 128 for Ti.

    Raises:
        ConfigError: the width is not a multiple of the head width.
    """
    scaled_width = max(HEAD_WIDTH, round(2 * encoder.width / 3 / HEAD_WIDTH) * HEAD_WIDTH)
    width = config.masking.decoder_width or min(WIDTH, scaled_width)
    if width % HEAD_WIDTH:
        raise ConfigError(f"--decoder-width must be a multiple of {HEAD_WIDTH}, not {width}")
    depth = config.masking.decoder_depth or min(DEPTH, -(-2 * encoder.depth // 3))
    return ModelConfig(
        width=width,
        depth=depth,
        num_heads=width // HEAD_WIDTH,
        mlp_dim=4 * width,
        patch_size=encoder.patch_size,
        image_size=encoder.image_size,
        posemb="none",
        qkv_bias=encoder.qkv_bias,
        activation=encoder.activation,
        norm_eps=encoder.norm_eps,
    )
