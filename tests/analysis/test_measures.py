"""Measures on models whose answers are known: one that copies, one that guesses, one that looks where it should."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from analysis.measures.chunks import pieces
from analysis.measures.recall import RecallByDistance, score_answers
from analysis.measures.retrieval_heads import RetrievalHeads, answer_mass
from analysis.measures.validation import ValidationLoss
from model.capture import attention_rows
from model.config import ModelConfig
from model.lm import LanguageModel, build
from model.mixers.table import parse_pattern
from orchestrator.data.recall import RecallLanguage
from orchestrator.data.text import TextCorpus
from orchestrator.errors import one_line
from orchestrator.measure import Measure

DATA = RecallLanguage(context=256, g_min=4)
BUCKETS = ("1-8", "9-32", "33-128", "beyond-128")


class Fake(nn.Module):
    """Logits [B, T, V] by rule: "copy" gives what followed the token when it last stood in the document."""

    def __init__(self, rule: str, vocab_size: int) -> None:
        super().__init__()
        self.rule, self.vocab_size = rule, vocab_size
        self.nothing = nn.Parameter(torch.zeros(1))

    def embedding(self, tokens_BT: Tensor) -> Tensor:
        return tokens_BT

    def logits(self, logits: Tensor) -> Tensor:
        return logits

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        logits = torch.zeros(*tokens_BT.shape, self.vocab_size)
        if self.rule == "guess a value":
            logits[..., 64:96] = torch.rand(*tokens_BT.shape, 32, generator=draw)
        if self.rule == "copy":
            for row, tokens in zip(logits, tokens_BT.tolist(), strict=True):
                last: dict[int, int] = {}
                for position, token in enumerate(tokens):
                    if token in last:
                        row[position, tokens[last[token] + 1]] = 20.0
                    last[token] = position
        return logits

    def token_losses(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.hidden(tokens_BT).mT, targets_BT, reduction="none")


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    """The laptop model: 143 k parameters."""
    layers = parse_pattern("swa-8 full", 4, "rope")
    config = ModelConfig(96, 256, 64, 4, 4, 16, 128, layers, mlp="relu2", norm_gain=False, qk_norm=1.5, key_shift=True)
    return build(config, 0).eval()


def test_a_copier_knows_every_fact() -> None:
    result = RecallByDistance(documents=40)(Fake("copy", 96), DATA)
    assert {name: result.metrics[f"recall/accuracy/{name}"] for name in BUCKETS} == dict.fromkeys(BUCKETS, 1.0)
    assert all(result.metrics[f"recall/loss/{name}"] < 1e-5 for name in BUCKETS)
    assert [row["answers"] for row in result.rows] == [row["right"] for row in result.rows]
    assert sum(row["answers"] for row in result.rows) == 40 * 12


def test_guessing_is_at_chance() -> None:
    result = RecallByDistance(documents=200)(Fake("guess a value", 96), DATA)
    right, answers = (sum(row[key] for row in result.rows) for key in ("right", "answers"))
    assert answers == 2400
    assert abs(right / answers - 1 / 32) < 4 * math.sqrt(1 / 32 * 31 / 32 / answers)


def test_equal_logits_cost_ln_of_the_vocabulary() -> None:
    fake = Fake("equal", 96)
    assert ValidationLoss(documents=40)(fake, DATA).metrics["validation/loss"] == pytest.approx(math.log(96))
    assert RecallByDistance(documents=40)(fake, DATA).metrics["recall/loss/1-8"] == pytest.approx(math.log(96))


def test_an_answer_of_two_tokens_is_right_only_as_a_whole() -> None:
    """Four answers of lengths 2, 2, 1, 1: both right, second wrong, right, wrong."""
    targets = torch.tensor([[1, 2, 3, 1, 2, 0], [0, 3, 0, 2, 0, 0]])
    predicted = torch.tensor([[1, 2, 0, 1, 3, 0], [0, 3, 0, 1, 0, 0]])
    logits = nn.functional.one_hot(predicted, 4).float() * 2
    document, answer = np.array([0, 0, 1, 1]), np.array([1, 4, 2, 4])
    right, loss = score_answers(nn.Identity(), logits, targets, document, answer, np.array([2, 2, 1, 1]))
    assert right.tolist() == [True, False, True, False]
    hit, miss = math.log(math.exp(2) + 3) - 2, math.log(math.exp(2) + 3)
    np.testing.assert_allclose(loss, [hit, (hit + miss) / 2, hit, miss], rtol=1e-6)


def test_buckets_follow_the_edges() -> None:
    measure = RecallByDistance(edges=(16, 64))
    assert measure.buckets == ("1-16", "17-64", "beyond-64")
    facts = DATA.facts(96)
    rows = measure(Fake("equal", 96), DATA).rows
    assert rows[0]["answers"] == (facts.distance <= 16).sum()
    assert rows[2]["answers"] == (facts.distance > 64).sum()


def test_what_can_be_asked_about_is_what_the_context_reaches() -> None:
    names = [f"recall/accuracy/{bucket}" for bucket in ("1-8", "9-32", "33-128", "beyond-128")]
    assert RecallByDistance().capabilities(RecallLanguage(context=256)) == tuple(names)
    assert RecallByDistance().capabilities(RecallLanguage(context=128)) == tuple(names[:3])
    assert ValidationLoss().capabilities(RecallLanguage()) == ()


def test_a_bucket_without_answers_has_no_metric() -> None:
    result = RecallByDistance(documents=4, edges=(2, 300))(Fake("equal", 96), DATA)
    assert set(result.metrics) == {"recall/accuracy/3-300", "recall/loss/3-300"}
    assert [row["answers"] for row in result.rows] == [0, 48, 0]


def test_validation_is_the_mean_over_all_tokens(tiny: LanguageModel) -> None:
    tokens = torch.from_numpy(DATA.held_out(40))
    with torch.inference_mode():
        expected = nn.functional.cross_entropy(tiny(tokens[:, :-1]).mT, tokens[:, 1:]).item()
    measured = ValidationLoss(documents=40)(tiny, DATA)
    assert measured.metrics == {"validation/loss": pytest.approx(expected, rel=1e-5)}
    assert expected > 3


def test_text_is_measured_in_bits_per_byte(tmp_path: Path) -> None:
    data = TextCorpus(context=512, cache=tmp_path)
    metrics = ValidationLoss(documents=4)(Fake("equal", 257), data).metrics
    assert metrics["validation/bits_per_byte"] == pytest.approx(math.log2(257))


def test_pieces_have_one_shape_and_miss_nothing(tiny: LanguageModel) -> None:
    tokens = np.arange(40 * 64).reshape(40, 64)
    parts = list(pieces(tiny, tokens))
    assert {tuple(piece.shape) for _, piece in parts} == {(32, 64)}
    np.testing.assert_array_equal(np.concatenate([piece[: len(rows)] for rows, piece in parts]), tokens)
    assert [len(rows) for rows, _ in pieces(tiny, tokens.reshape(1, -1))] == [1]  # longer than a piece should be


def test_attention_on_the_answer() -> None:
    """Worked: row [.1, .2, .3, .4], answer {1, 2}: 0.5."""
    rows = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    assert answer_mass(rows, np.array([1]), np.array([2])).item() == pytest.approx(0.5)


def test_retrieval_scores_equal_those_of_whole_attention(tiny: LanguageModel) -> None:
    """Against every fact's row, taken one by one; 12 documents make two pieces, the second padded."""
    result = RetrievalHeads(documents=12, beyond=64)(tiny, DATA)
    facts = DATA.facts(12)
    expected = {(layer, head): [] for layer in (1, 3) for head in range(4)}
    for document, answer, stated, distance in zip(
        facts.document, facts.answer, facts.stated, facts.distance, strict=True
    ):
        if distance > 64:
            tokens = torch.from_numpy(facts.tokens[document : document + 1, :-1])
            for layer, rows in attention_rows(tiny, tokens, torch.tensor([answer - 1]), (1, 3)).items():
                for head in range(4):
                    expected[layer, head].append(rows[0, head, 0, stated].item())
    assert [(row["layer"], row["head"]) for row in result.rows] == list(expected)
    for row in result.rows:
        assert row["score"] == pytest.approx(np.mean(expected[row["layer"], row["head"]]), rel=1e-4)
        assert result.metrics[f"retrieval/L{row['layer']}H{row['head']}"] == row["score"]


def test_a_model_without_full_layers_has_no_retrieval_heads() -> None:
    config = ModelConfig(96, 256, 32, 2, 2, 16, 32, parse_pattern("swa-8", 2, "rope"))
    assert RetrievalHeads(documents=2)(build(config, 0), DATA).metrics == {}


def test_an_evaluation_is_cheap(tiny: LanguageModel) -> None:
    measures = (ValidationLoss(), RecallByDistance(), RetrievalHeads())

    def evaluate() -> float:
        start = time.process_time()
        for measure in measures:
            measure(tiny, DATA)
        return time.process_time() - start

    evaluate()
    assert min(evaluate() for _ in range(2)) < 3  # under 1 s on an idle core


@pytest.mark.parametrize("measure", [ValidationLoss(), RecallByDistance(), RetrievalHeads()])
def test_measures_are_plain_and_leave_the_model_as_it_was(measure: Measure, tiny: LanguageModel) -> None:
    assert measure.name in ("validation", "recall", "retrieval")
    assert measure.identity()["documents"] == measure.documents  # type: ignore[attr-defined]
    small = measure.model_copy(update={"documents": 4})  # type: ignore[attr-defined]
    assert small.identity() != measure.identity()
    assert small(tiny, DATA) == small(tiny, DATA)
    assert all(parameter.grad is None for parameter in tiny.parameters())


@pytest.mark.parametrize(
    "measure", [ValidationLoss(documents=4), RecallByDistance(documents=4), RetrievalHeads(documents=4)]
)
def test_a_model_measured_before_its_first_step_can_train(measure: Measure) -> None:
    """What the first call keeps (RoPE angles) must not be barred from the backward pass."""
    model = build(ModelConfig(96, 256, 32, 2, 2, 16, 32, parse_pattern("full", 2, "rope")), 0)
    measure(model, DATA)
    tokens = torch.from_numpy(DATA.batch(0, 0, range(1)))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()


@pytest.mark.parametrize("edges", [(), (0, 8), (8, 8), (32, 8)])
def test_edges_are_refused_in_one_line(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError) as refused:
        RecallByDistance(edges=edges)
    assert one_line(refused.value).startswith(f"RecallByDistance.edges: {edges}")
