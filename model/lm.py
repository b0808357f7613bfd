"""The decoder language model."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.block import Block
from model.config import ModelConfig
from model.cost import LOSS_LOGITS
from model.initialize import initialize
from model.mixers.mixer import Angles, State
from model.mixers.table import rotary_widths
from model.norms import RMSNorm
from model.positions import rope_angles


@dataclass
class DecodingState:
    """What a model keeps of the tokens read: how many, and each layer's state."""

    tokens: int
    layers: list[State]


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm, head. Construct with `build`, which fills the parameters.

    recompute: set it to keep only each block's input for the backward pass and run the block again there.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(len(config.layers)))
        self.norm = RMSNorm(config.d_model, config.norm_eps, config.norm_gain)
        self.head = None if config.tied_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.recompute = False
        self._angles: Angles = {}

    def angles(self, length: int, device: torch.device) -> Angles:
        """RoPE's cosines and sines of the first positions, kept until a longer call needs more."""
        widths = rotary_widths(self.config)
        if any(len(cos) < length or cos.device != device for cos, _ in self._angles.values()) or not self._angles:
            self._angles = {width: rope_angles(length, width, self.config.rope_base, device) for width in widths}
        return {width: (cos[:length], sin[:length]) for width, (cos, sin) in self._angles.items()}

    def hidden(self, embedded_BTD: Tensor) -> Tensor:
        """Residual stream after the final norm, from input embeddings. [B, T, D] → [B, T, D]"""
        angles = self.angles(embedded_BTD.shape[1], embedded_BTD.device)
        x_BTD = embedded_BTD
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, angles, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, angles)
        return self.norm(x_BTD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of the next token."""
        return self.logits(self.hidden(self.embedding(tokens_BT)))

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head makes of `hidden` states, [..., D] → [..., V]; the embedding's own matrix where tied."""
        logits = F.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def _stack(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def empty_state(self, batch: int) -> DecodingState:
        """The state before the first token."""
        return DecodingState(0, [block.mixer.empty_state(batch) for block in self._stack()])

    def prefill(self, tokens_BT: Tensor) -> tuple[Tensor, DecodingState]:
        """Reads a prompt in parallel: logits [B, V] after its last token, and the state to step on from."""
        angles = self.angles(tokens_BT.shape[1], tokens_BT.device)
        x_BTD, states = self.embedding(tokens_BT), []
        for block in self._stack():
            x_BTD, state = block.prefill(x_BTD, angles)
            states.append(state)
        return self.logits(self.norm(x_BTD[:, -1])), DecodingState(tokens_BT.shape[1], states)

    def step(self, tokens_B: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Reads one token more of each sequence: logits [B, V] of the next, as `forward` gives, and the new state."""
        position = state.tokens
        # Twice what is needed, lest every step make the whole table again.
        every = self.angles(max(self.config.context, 1 << position.bit_length()), tokens_B.device)
        here = slice(position, position + 1)
        angles = {width: (cos[here], sin[here]) for width, (cos, sin) in every.items()}
        x_B1D, after = self.embedding(tokens_B[:, None]), []
        for block, layer_state in zip(self._stack(), state.layers, strict=True):
            x_B1D, new = block.step(x_B1D, angles, layer_state)
            after.append(new)
        return self.logits(self.norm(x_B1D[:, 0])), DecodingState(position + 1, after)

    def token_losses(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy of each target in nats, float32 [B, T]."""
        x_ND = self.hidden(self.embedding(tokens_BT)).flatten(0, 1)
        chunks = zip(self._chunks(x_ND), self._chunks(targets_BT.flatten()), strict=True)
        losses = [F.cross_entropy(self._wide_logits(x), target, reduction="none") for x, target in chunks]
        return torch.cat(losses).view_as(targets_BT)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy over all targets in nats, a float32 scalar."""
        return self.objective(tokens_BT, targets_BT)[1]

    def objective(self, tokens_BT: Tensor, targets_BT: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """(what training minimises, the mean cross-entropy alone), float32 scalars, in nats.

        z_loss: weight of the mean of (ln Σ e^logit)², which keeps logits from drifting (PaLM, arXiv 2204.02311).
        Float32 logits outweigh all else on long sequences: beyond LOSS_LOGITS of them the head runs in chunks of
        tokens whose logits are made again in the backward pass.
        """
        x_ND = self.hidden(self.embedding(tokens_BT)).flatten(0, 1)
        target_N = targets_BT.flatten()
        if target_N.numel() * self.config.vocab_size <= LOSS_LOGITS:
            return self._objective(x_ND, target_N, "mean", z_loss)
        minimised, cross_entropy = x_ND.new_zeros(2, dtype=torch.float32).unbind()
        for x, target in zip(self._chunks(x_ND), self._chunks(target_N), strict=True):
            both = checkpoint(self._objective, x, target, "sum", z_loss, use_reentrant=False)
            minimised, cross_entropy = minimised + both[0], cross_entropy + both[1]
        return minimised / target_N.numel(), cross_entropy / target_N.numel()

    def _chunks(self, per_token: Tensor) -> tuple[Tensor, ...]:
        return per_token.split(max(1, LOSS_LOGITS // self.config.vocab_size))

    def _wide_logits(self, x_ND: Tensor) -> Tensor:
        logits = self.logits(x_ND)
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def _objective(self, x_ND: Tensor, target_N: Tensor, reduction: str, z_loss: float) -> tuple[Tensor, Tensor]:
        logits_NV = self._wide_logits(x_ND)
        cross_entropy = F.cross_entropy(logits_NV, target_N, reduction=reduction)
        if not z_loss:
            return cross_entropy, cross_entropy
        squares_N = logits_NV.logsumexp(-1).square()
        squares = squares_N.mean() if reduction == "mean" else squares_N.sum()
        return cross_entropy + z_loss * squares, cross_entropy


def build(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> LanguageModel:
    """A model whose first weights depend on (config, seed) alone."""
    with torch.device("meta"):
        model = LanguageModel(config)
    model.to_empty(device=device)
    initialize(model, config, seed)
    return model
