"""The decoder language model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.block import Block
from model.config import ModelConfig
from model.initialize import initialize
from model.norms import RMSNorm
from model.positions import rope_angles


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm, head. Construct with `build`: the parameters here are unfilled memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config.d_model, config.norm_eps, config.norm_gain)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self._angles: tuple[Tensor, Tensor] | None = None

    def angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """RoPE cosines and sines of the first positions, float32 [T, K/2] each, kept until a longer call needs more."""
        if self._angles is None or len(self._angles[0]) < length or self._angles[0].device != device:
            self._angles = rope_angles(length, self.config.head_dim, self.config.rope_base, device)
        cosines, sines = self._angles
        return cosines[:length], sines[:length]

    def hidden(self, embedded_BTD: Tensor) -> Tensor:
        """Residual stream after the final norm, from input embeddings. [B, T, D] → [B, T, D]"""
        angles = self.angles(embedded_BTD.shape[1], embedded_BTD.device)
        x_BTD = embedded_BTD
        for block in self.blocks:
            x_BTD = block(x_BTD, angles)
        return self.norm(x_BTD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of the next token."""
        return self.head(self.hidden(self.embedding(tokens_BT)))

    def token_losses(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy of each target in nats, float32 [B, T]."""
        logits = self(tokens_BT).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(targets_BT)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy over all targets in nats, a float32 scalar."""
        return F.cross_entropy(self(tokens_BT).float().flatten(0, 1), targets_BT.flatten())


def build(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> LanguageModel:
    """A model whose first weights depend on (config, seed) alone."""
    with torch.device("meta"):
        model = LanguageModel(config)
    model.to_empty(device=device)
    initialize(model, config, seed)
    return model
