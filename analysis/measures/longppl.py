"""LongPPL: perplexity on the tokens that only a long context predicts (arXiv 2410.23771; PKU-ML/LongPPL)."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from analysis.measures.chunks import facts, held_out, pieces
from model import export
from model.lm import LanguageModel
from orchestrator.data.stream import Data
from orchestrator.errors import InputError
from orchestrator.measure import Measurement

GAP, MOST = 2.0, 2.0  # nats: what the long context must save, and what may be left
Span = tuple[int, int]  # of characters, the end excluded


class LongPPL(BaseModel):
    """longppl/longppl, and for comparison longppl/perplexity of all tokens and longppl/keys, the share of key tokens.

    Key tokens are the answers of planted facts stated more than `short` tokens back, or where an evaluator is given
    what it finds on held-out documents: a folder of `gridlaw export` over the same tokens. short: tokens of a short
    context; stride: tokens scored with one, at most. Both as published where the context has room, else a quarter and
    a sixteenth of it. Without a key token there is no LongPPL.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    documents: int = Field(default=32, gt=0)
    short: int | None = Field(default=None, gt=0)
    stride: int | None = Field(default=None, gt=0)
    evaluator: Path | None = None

    @field_validator("evaluator", mode="before")
    @classmethod
    def _resolve(cls, evaluator: Any) -> Any:
        return Path(evaluator).expanduser().resolve() if isinstance(evaluator, str | Path) else evaluator

    @field_validator("evaluator")
    @classmethod
    def _holds_weights(cls, evaluator: Path | None) -> Path | None:
        if evaluator is not None:
            export.digest(evaluator)
        return evaluator

    @property
    def name(self) -> str:
        return "longppl"

    def identity(self) -> dict[str, Any]:
        fields = self.model_dump(mode="json", exclude={"evaluator"})
        weights = None if self.evaluator is None else export.digest(self.evaluator)
        return {**fields, "evaluator": weights}

    def capabilities(self, data: Data) -> tuple[str, ...]:
        return ()

    @torch.no_grad()
    def __call__(self, model: LanguageModel, data: Data) -> Measurement:
        short, stride = self._lengths(data.context)
        if self.evaluator is None:
            asked = facts(data, self.documents)
            tokens = asked.tokens
            far = np.flatnonzero(asked.distance > short)
            keys = _marked(tokens.shape, asked.document[far], asked.answer[far], asked.length[far])
        else:
            tokens = held_out(data, self.documents)
            keys = _found(self.evaluator, data, self.documents, short, stride)
        losses = token_losses(model, tokens)
        each = [long_perplexity(loss, key) for loss, key in zip(losses, keys[:, 1:], strict=True)]
        value = over_documents(each, keys[:, 1:].sum(1).tolist())
        metrics = {"longppl/perplexity": float(np.exp(losses.mean())), "longppl/keys": float(keys[:, 1:].mean())}
        return Measurement(metrics if value is None else {**metrics, "longppl/longppl": value})

    def _lengths(self, context: int) -> tuple[int, int]:
        room = context > 4096
        short = self.short or (4096 if room else max(1, context // 4))
        if short >= context:
            raise InputError(f"LongPPL.short: {short} leaves nothing of {context} tokens to score; give fewer")
        return short, self.stride or (1024 if room else max(1, context // 16))


def stretches(length: int, short: int = 4096, stride: int = 1024) -> list[tuple[int, int, int]]:
    """(first token of the short context, first token scored, one past the last): every token from `short` on once."""
    starts = range(0, length - short, stride)
    return [(start, start + short, min(start + short + stride, length)) for start in starts]


def key_tokens(long_losses: np.ndarray, short_losses: np.ndarray) -> np.ndarray:
    """Which tokens are key, bool: the long context saves more than 2 nats, strictly, and leaves fewer than 2."""
    return (short_losses - long_losses > GAP) & (long_losses < MOST)


def long_perplexity(losses: np.ndarray, keys: np.ndarray) -> float | None:
    """exp of the mean loss in nats of the key tokens; None where there is none."""
    return float(np.exp(losses[keys].mean())) if keys.any() else None


def over_documents(values: Sequence[float | None], keys: Sequence[int]) -> float | None:
    """exp(Σ n ln L / Σ n) of documents with n key tokens each; None where no document has any."""
    told = [(np.log(value), n) for value, n in zip(values, keys, strict=True) if value is not None and n]
    return float(np.exp(sum(n * log for log, n in told) / sum(n for _, n in told))) if told else None


def spans_of(keys: np.ndarray, offsets: Sequence[Span]) -> list[Span]:
    """The text of key tokens, as characters; offsets: of each token. Neighbours become one span."""
    spans: list[Span] = []
    for key, (start, end) in zip(keys, offsets, strict=True):
        if key and spans and spans[-1][1] >= start:
            spans[-1] = spans[-1][0], end
        elif key:
            spans.append((start, end))
    return spans


def inside(spans: Sequence[Span], offsets: Sequence[Span]) -> np.ndarray:
    """Which tokens of another tokenizer lie fully inside a span, bool."""
    return np.array([any(a <= start and end <= b for a, b in spans) for start, end in offsets], dtype=bool)


@torch.no_grad()
def token_losses(model: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """Loss of each token but the first, from all before it: [documents, T], nats, float32 at least."""
    losses = np.empty((len(tokens), tokens.shape[1] - 1))
    for rows, piece in pieces(model, tokens):
        losses[rows.start : rows.stop] = model.token_losses(piece[:, :-1], piece[:, 1:])[: len(rows)].cpu().numpy()
    return losses


def short_losses(model: LanguageModel, tokens: np.ndarray, short: int, stride: int) -> np.ndarray:
    """As `token_losses`, each token from `short` to `short + stride` tokens before it alone; NaN before `short`."""
    losses = np.full((len(tokens), tokens.shape[1] - 1), np.nan)
    for start, first, end in stretches(tokens.shape[1], short, stride):
        losses[:, first - 1 : end - 1] = token_losses(model, tokens[:, start:end])[:, first - start - 1 :]
    return losses


def _marked(shape: tuple[int, ...], document: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    marked = np.zeros(shape, dtype=bool)
    for row, start, count in zip(document, first, length, strict=True):
        marked[row, start : start + count] = True
    return marked


@cache
def _found(evaluator: Path, data: Data, documents: int, short: int, stride: int) -> np.ndarray:
    """Key tokens of held-out documents by an evaluator, bool [documents, T+1]: once a process, whatever is measured."""
    judge, tokens = export.read(evaluator), held_out(data, documents)
    if judge.config.vocab_size != data.vocab_size:
        raise InputError(
            f"LongPPL.evaluator: {evaluator} has {judge.config.vocab_size} tokens and the data {data.vocab_size}; "
            f"give one trained on the same tokens"
        )
    keys = key_tokens(token_losses(judge, tokens), short_losses(judge, tokens, short, stride))
    return np.pad(keys, ((0, 0), (1, 0)))
