"""LongPPL, needles by depth and length, loss by position: worked numbers, and models whose answers are known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.measures.longppl import (
    LongPPL,
    inside,
    key_tokens,
    long_perplexity,
    over_documents,
    short_losses,
    spans_of,
    stretches,
    token_losses,
)
from analysis.measures.needles import Needles
from analysis.measures.validation import ValidationLoss, by_position
from model import export
from model.config import ModelConfig
from model.lm import LanguageModel, build
from model.mixers.table import parse_pattern
from orchestrator.data.recall import RecallLanguage
from orchestrator.data.text import TextCorpus
from orchestrator.errors import InputError

DATA = RecallLanguage(context=128)


class Knows(nn.Module):
    """Stands for a model: `rule` turns tokens [B, T] into the next tokens it is sure of, -1 where it has no idea."""

    def __init__(self, rule, vocab_size: int = DATA.vocab_size) -> None:
        super().__init__()
        self.rule, self.weight = rule, nn.Parameter(torch.zeros(1))
        self.embedding = lambda tokens: tokens
        self.vocab_size = vocab_size

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        sure_BT = self.rule(tokens_BT)
        one_hot = nn.functional.one_hot(sure_BT.clamp(min=0), self.vocab_size).float()
        return 30 * one_hot * (sure_BT >= 0)[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def token_losses(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits = self.hidden(tokens_BT)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(
            targets_BT
        )


def remembers(tokens_BT: Tensor, window: int | None = None) -> Tensor:
    """What followed the same token where it last stood within a window, -1 where it did not."""
    out = torch.full_like(tokens_BT, -1)
    for row, text in enumerate(tokens_BT.tolist()):
        last: dict[int, int] = {}
        for t, token in enumerate(text):
            if token in last and (window is None or t - last[token] < window):
                out[row, t] = text[last[token] + 1]
            last[token] = t
    return out


def test_stretches_of_the_published_lengths():
    assert stretches(6000) == [(0, 4096, 5120), (1024, 5120, 6000)]
    assert stretches(4096) == stretches(100) == []
    assert stretches(10, 4, 2) == [(0, 4, 6), (2, 6, 8), (4, 8, 10)]


def test_key_tokens_and_their_perplexity():
    long, short = np.array([0.3, 1.5, 2.5, 0.1]), np.array([3, 2.9, 6, 2.1001])
    keys = key_tokens(long, short)
    assert np.flatnonzero(keys).tolist() == [0, 3]
    assert long_perplexity(long, keys) == pytest.approx(1.221403, abs=1e-6)
    assert np.exp(long.mean()) == pytest.approx(3.004166, abs=1e-6)
    assert not key_tokens(np.array([0.0, 2.0]), np.array([2.0, 9.0])).any(), "both bounds are strict"
    assert long_perplexity(long, np.zeros(4, dtype=bool)) is None


def test_documents_are_weighed_by_their_key_tokens():
    assert over_documents([2.0, 4.0], [3, 1]) == pytest.approx(2.378414, abs=1e-6)
    assert over_documents([2.0, None], [3, 0]) == pytest.approx(2.0)
    assert over_documents([None], [0]) is None


def test_key_tokens_travel_between_tokenizers_as_characters():
    """ "the cat sat" as the|cat|sat and as th|e c|at| sat."""
    theirs = [(0, 3), (4, 7), (8, 11)]
    assert spans_of(np.array([False, True, False]), theirs) == [(4, 7)]
    assert spans_of(np.array([True, True, False]), [(0, 3), (3, 7), (7, 11)]) == [(0, 7)]
    assert inside([(4, 7)], [(0, 2), (2, 5), (5, 7), (7, 11)]).tolist() == [False, False, True, False]


def test_a_short_context_hides_what_stands_before_it():
    """Each token from 4 on is scored once, with 4 or 5 tokens before it, as a model that sees no more would."""
    tokens = np.random.default_rng(0).integers(0, 6, (2, 11))
    seen = token_losses(Knows(lambda t: remembers(t), 6), tokens)
    short = short_losses(Knows(lambda t: remembers(t), 6), tokens, 4, 2)
    assert np.isnan(short[:, :3]).all() and not np.isnan(short[:, 3:]).any()
    for start, first, end in stretches(11, 4, 2):
        alone = token_losses(Knows(lambda t: remembers(t), 6), tokens[:, start:end])
        assert np.allclose(short[:, first - 1 : end - 1], alone[:, first - start - 1 :])
    assert not np.allclose(short[:, 3:], seen[:, 3:])


def test_planted_answers_are_the_key_tokens():
    """One who remembers the whole text has LongPPL 1; one who sees 32 tokens, the vocabulary's size."""
    measure = LongPPL(documents=8, short=32, stride=8)
    far = measure(Knows(remembers), DATA).metrics
    assert far["longppl/longppl"] == pytest.approx(1.0, abs=1e-3)
    near = measure(Knows(lambda t: remembers(t, 32)), DATA).metrics
    assert near["longppl/longppl"] == pytest.approx(DATA.vocab_size, rel=1e-3)
    assert 0 < far["longppl/keys"] == near["longppl/keys"] < 0.1
    assert near["longppl/perplexity"] > 1


def awake(seed: int = 0, vocab_size: int = DATA.vocab_size) -> LanguageModel:
    return build(ModelConfig(vocab_size, 128, 16, 2, 2, 8, 32, parse_pattern("swa-8 full", 2, "rope")), seed)


def test_an_evaluator_finds_the_key_tokens(tmp_path: Path, monkeypatch):
    (tmp_path / "judge").mkdir()
    export.write(awake(), tmp_path / "judge")
    measure = LongPPL(documents=4, short=32, stride=8, evaluator=tmp_path / "judge")
    assert "longppl/longppl" not in measure(awake(1), DATA).metrics, "an untrained judge finds none"
    assert measure.identity()["evaluator"] and str(tmp_path) not in str(measure.identity())
    with pytest.raises(InputError, match="has 96 tokens and the data 97; give one trained on the same tokens"):
        measure(awake(1, 97), RecallLanguage(context=128, values=33))
    with pytest.raises(ValueError, match="holds no weights"):
        LongPPL(evaluator=tmp_path)
    monkeypatch.setattr(export, "read", lambda folder: judge)
    judge = Knows(remembers)
    judge.config = awake().config
    found = LongPPL(documents=5, short=32, stride=8, evaluator=tmp_path / "judge")(Knows(remembers), DATA).metrics
    assert found["longppl/longppl"] == pytest.approx(1.0, abs=1e-3) and found["longppl/keys"] > 0


def test_longppl_needs_room():
    with pytest.raises(InputError, match=r"LongPPL\.short: 128 leaves nothing of 128 tokens"):
        LongPPL(short=128)(awake(), DATA)


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_needles_lie_at_their_depth(depth, tmp_path: Path):
    for length in (50, 51):
        document, answer = DATA.needle(3, length, depth, 5)
        assert document.shape == (length,) and answer.shape == (1,)
        asked = np.flatnonzero(document == document[-1])
        assert len(asked) == 2 and document[asked[0] + 1] == answer
        assert asked[0] / (length - 4) == pytest.approx(depth, abs=0.06)
        assert (document >= DATA.fillers).sum() == 2 * 6 + 1
    (tmp_path / "a.txt").write_text("".join(f"Line {i}, which says little.\n" for i in range(9000)))
    text = TextCorpus(context=256, folders=(tmp_path,), cache=tmp_path / "cache")
    document, answer = text.needle(3, 240, depth, 2)
    said = text.text(document)
    stem = said.rpartition("\n")[2]
    assert document.shape == (240,) and said.count(stem) == 2
    assert said[said.index(stem) + len(stem) :].startswith(text.text(answer))
    assert said.count("magic number") == 4
    assert (said.index(stem) > 100) == (depth == 1.0)
    with pytest.raises(InputError, match="others: 9 sentences do not fit 240 tokens"):
        text.needle(0, 240, 0.5, 9)


def test_who_remembers_finds_every_needle_and_a_window_only_near_ones():
    measure = Needles(documents=6, others=2)
    told = measure(Knows(remembers), DATA)
    assert told.metrics == {f"needle/accuracy/{length}": 1.0 for length in (32, 64, 127)}
    assert set(measure.capabilities(DATA)) == set(told.metrics)
    near = measure(Knows(lambda t: remembers(t, 40)), DATA).rows
    assert {(r["length"], r["depth"]) for r in near if r["accuracy"] == 1} == {
        *((32, depth) for depth in measure.depths), (64, 0.5), (64, 0.75), (64, 1.0), (127, 0.75), (127, 1.0),
    }  # fmt: skip
    chance = np.mean([r["accuracy"] for r in Needles(documents=64)(awake(), DATA).rows])
    assert chance < 0.1


def test_needles_need_data_that_can_place_them():
    with pytest.raises(InputError, match="Needles: str puts no facts"):
        Needles()(awake(), "text")
    with pytest.raises(ValueError, match="are no depths"):
        Needles(depths=(0.5, 1.5))
    with pytest.raises(InputError, match="others: 20 facts do not fit 32 tokens"):
        DATA.needle(0, 32, 0.5, 20)


def test_loss_by_position():
    rows = by_position(np.array([7.0, 5, 3, 1, 1, 1, 1, 0, 2]))
    assert [(row["from"], row["to"], row["loss"]) for row in rows] == [
        (1, 1, 7.0),
        (2, 3, 4.0),
        (4, 7, 1.0),
        (8, 9, 1.0),
    ]
    told = ValidationLoss(documents=8)(awake(), DATA)
    weights = [row["to"] - row["from"] + 1 for row in told.rows]
    assert np.average([row["loss"] for row in told.rows], weights=weights) == pytest.approx(
        told.metrics["validation/loss"]
    )
