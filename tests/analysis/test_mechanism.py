"""Mechanism measures: worked numbers, and a model built by hand whose one retrieval head is known."""

import math

import numpy as np
import pytest
import torch

from analysis.measures.ablation import HeadAblation
from analysis.measures.attention_entropy import AttentionEntropy, entropy, share
from analysis.measures.gradient_profile import GradientProfile, influence
from analysis.measures.probing import Probing, probe
from analysis.measures.qk_distance import qk_distances
from analysis.measures.recall import RecallByDistance
from analysis.measures.receptive_field import ReceptiveField, constrained
from analysis.measures.retrieval_heads import RetrievalHeads
from model.capture import last_states
from model.config import ModelConfig
from model.interventions import ablated, forgetful
from model.lm import LanguageModel, build
from model.mixers.table import parse_pattern
from orchestrator.data.recall import RecallLanguage

torch.set_num_threads(1)
DATA = RecallLanguage(context=128)
VOCABULARY = DATA.vocab_size


def awake(pattern: str, seed: int = 0, positions="rope", **changes) -> LanguageModel:
    layers = parse_pattern(pattern, 2, positions, {"mamba2": {"head_dim": 16, "d_state": 8}})
    model = build(ModelConfig(VOCABULARY, 128, 32, 4, 2, 8, 48, layers, **changes), seed)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.unique().numel() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model


@torch.no_grad()
def induction() -> LanguageModel:
    """Two layers of two heads, all silent but layer 1 head 1: it looks where the token before was the current one, by
    a key that is the previous token's, and says what stands there. Embeddings are one-hot."""
    d = VOCABULARY
    layers = parse_pattern("full", 2, "nope")
    model = build(ModelConfig(d, 128, d, 2, 2, d, 1, layers, norm_gain=False, key_shift=True), 0)
    one = torch.eye(d)
    for parameter in model.parameters():
        parameter.zero_()
    model.embedding.weight.copy_(one)
    model.head.weight.copy_(one)
    mixer = model.blocks[1].mixer
    mixer.query.weight[d:].copy_(one)
    mixer.key.weight[d:].copy_(one)
    mixer.value.weight[d:].copy_(one)
    mixer.output.weight[:, d:].copy_(one)
    mixer.key_shift.fill_(30.0)
    return model


def test_the_head_that_retrieves_is_found():
    model = induction()
    scores = {(row["layer"], row["head"]): row["score"] for row in RetrievalHeads(documents=8)(model, DATA).rows}
    assert scores.pop((1, 1)) == pytest.approx(1, abs=1e-3)
    assert max(scores.values()) < 0.1
    assert RecallByDistance(documents=8)(model, DATA).metrics["recall/accuracy/9-32"] == 1.0


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_recall_goes_with_the_retrieval_head_and_with_no_other(by):
    told = HeadAblation(top=1, documents=16, by=by)(induction(), DATA).metrics
    for bucket in ("9-32", "33-128"):
        assert told[f"ablation/random/recall/accuracy/{bucket}"] == 1.0
        assert told[f"ablation/top/recall/accuracy/{bucket}"] < 0.1


def test_ablated_heads_come_back():
    model, tokens = awake("full"), torch.from_numpy(DATA.held_out(2)[:, :-1])
    before = model(tokens)
    with ablated(model, {0: [1, 3]}):
        without = model(tokens)
        mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.output.weight[:, 8:16] = mixer.output.weight[:, 24:32] = 0
    assert torch.allclose(model(tokens), without, atol=1e-5)
    assert not torch.allclose(before, without, atol=1e-3)
    with pytest.raises(ValueError, match="layer 0 has no softmax head 9"), ablated(model, {0: [9]}):
        pass
    with pytest.raises(ValueError, match="layer 0 has no softmax head 0"), ablated(awake("gdn full"), {0: [0]}):
        pass


@pytest.mark.parametrize("pattern", ["gdn", "lightning", "mamba2", "gdn+lightning"])
@torch.no_grad()
def test_a_forgetful_layer_knows_its_last_tokens_only(pattern):
    """Tokens before the window change nothing at its end; within the first window nothing is forgotten."""
    config = ModelConfig(
        VOCABULARY, 128, 32, 4, 4, 8, 48, parse_pattern(pattern, 1, "rope", {"mamba2": {"head_dim": 16}})
    )
    model = build(config, 0).double()
    torch.nn.init.normal_(model.blocks[0].mlp.down.weight)
    for module in model.blocks.modules():
        if isinstance(module, torch.nn.Linear) and not module.weight.any():
            torch.nn.init.normal_(module.weight, std=0.3)
    tokens = torch.from_numpy(DATA.held_out(2)[:, :30])
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCABULARY
    free = model(tokens)
    with forgetful(model, 7):
        kept, moved = model(tokens), model(changed)
    assert torch.allclose(kept[:, :7], free[:, :7], atol=1e-6)
    differs = (kept - moved).abs().amax((0, 2)) > 1e-9
    assert differs.nonzero().flatten().tolist() == list(range(4, 11))
    assert torch.equal(model(tokens), free)
    with pytest.raises(ValueError, match="window: 0 is not positive"), forgetful(model, 0):
        pass


def test_constraints_take_what_a_kind_of_layer_carries():
    model = induction()
    told = ReceptiveField(windows=(16,), documents=8, edges=(8, 16))(model, DATA)
    assert told.metrics["constrained/full-16/recall/accuracy/1-8"] == 1.0
    assert told.metrics["constrained/full-16/recall/accuracy/beyond-16"] < 0.2
    assert not any("efficient" in name for name in told.metrics), "it has no other layers"
    hybrid = awake("swa-32 full")
    measured = ReceptiveField(windows=(4, 64), documents=4)
    metrics = measured(hybrid, DATA).metrics
    assert set(metrics) >= set(measured.capabilities(DATA))
    free = {"validation/loss": float("nan")} | RecallByDistance(documents=4)(hybrid, DATA).metrics
    for name, value in free.items():
        if "recall" in name:  # a window of 64 is wider than the layer's own
            assert metrics[f"constrained/efficient-64/{name}"] == pytest.approx(value, abs=1e-6)
    with constrained(hybrid, "full", 4):
        assert [block.mixer.window for block in hybrid.blocks] == [32, 4]
    assert [block.mixer.window for block in hybrid.blocks] == [32, None]


def test_entropy_of_a_row():
    row = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    assert entropy(row).item() == pytest.approx(1.039721, abs=1e-6)
    assert share(entropy(row)[None], torch.tensor([3])) == pytest.approx(0.946395, abs=1e-6)
    assert share(torch.zeros(1), torch.tensor([1])) is None
    assert share(torch.tensor([0.0, 0.7]), torch.tensor([1, 2])) == pytest.approx(0.7 / math.log(2))


def test_heads_that_look_at_all_alike_have_share_one():
    model = awake("swa-8 full")
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.query.weight.zero_()
    told = AttentionEntropy(documents=2)(model, DATA)
    assert all(row["share_of_seen"] == pytest.approx(1, abs=1e-5) for row in told.rows)
    windowed, whole = told.rows[0], told.rows[-1]
    assert windowed["entropy"] == pytest.approx(math.log(8), abs=1e-5)
    assert windowed["share_of_all"] < 0.5 and whole["share_of_all"] == pytest.approx(1, abs=1e-5)
    assert len(told.metrics) == 8


def test_distance_of_projections():
    one, other = awake("full"), awake("full")
    assert all(row["distance"] == row["relative"] == 0 for row in qk_distances(one, other))
    with torch.no_grad():
        for model, weight in (
            (one, torch.eye(8, 32)),
            (other, torch.diag(torch.tensor([1.0, *[0.0] * 7])) @ torch.eye(8, 32)),
        ):
            model.blocks[1].mixer.query.weight[8:16].copy_(weight)
            model.blocks[1].mixer.key.weight[8:16].copy_(torch.eye(8, 32))
    rows = {(row["layer"], row["head"]): row for row in qk_distances(one, other)}
    assert rows[1, 1]["distance"] == pytest.approx(math.sqrt(7)) == rows[1, 1]["relative"]
    assert [key for key, row in rows.items() if row["distance"]] == [(1, 1)]
    with torch.no_grad():  # keys of a group are those of both its heads
        one.blocks[0].mixer.key.weight[:8] *= 2
    told = {(r["layer"], r["head"]): r["relative"] for r in qk_distances(one, other)}
    assert told[0, 0] == told[0, 1] == pytest.approx(1) and told[0, 2] == 0
    with pytest.raises(ValueError, match="reference: is another decoder"):
        qk_distances(one, awake("swa-8"))


def test_influence_of_a_running_mean():
    """h_t is the mean of the inputs up to t and the head's column sums are (3, 4)."""
    head = torch.tensor([[1.0, 1.0], [2.0, 3.0]], dtype=torch.float64)

    def logits(inputs_BTD: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, 5, dtype=torch.float64)[:, None]
        return inputs_BTD.cumsum(1) / counts @ head.T

    told = influence(logits, torch.zeros(1, 4, 2, dtype=torch.float64), 2)[0]
    assert told.flip(0).tolist() == pytest.approx([0.625, 1.458333, 1.458333, 1.458333], abs=1e-6)


def test_influence_ends_with_the_window():
    told = GradientProfile(documents=2, last=1)(awake("swa-4"), DATA)
    by_distance = [row["influence"] for row in told.rows]
    assert [row["distance"] for row in told.rows] == list(range(128))
    assert min(by_distance[:7]) > 0 and max(by_distance[7:]) == 0
    assert told.metrics == {"influence/near": 1.0, "influence/far": 0.0}
    far = GradientProfile(documents=2, last=1)(awake("full"), DATA).metrics
    assert far["influence/far"] > 0 and sum(far.values()) == pytest.approx(1)


def test_states_of_the_last_token():
    model, tokens = awake("swa-8 full"), torch.from_numpy(DATA.held_out(2)[:, :-1])
    states = last_states(model, tokens)
    assert states.shape == (3, 2, 32)
    assert torch.equal(states[0], model.embedding(tokens[:, -1]))
    assert torch.allclose(model.logits(model.norm(states[-1])), model(tokens)[:, -1], atol=1e-5)


def test_a_probe_reads_what_is_there_and_nothing_else():
    draw = np.random.default_rng(0)
    values = draw.integers(8, size=400)
    told, shuffled = probe(np.eye(8)[values] + 0.1 * draw.normal(size=(400, 8)), values)
    assert told > 0.95 and shuffled < 0.35
    assert probe(draw.normal(size=(400, 8)), values)[0] < 0.35


def test_the_value_is_known_from_the_layer_that_retrieves_it_on():
    rows = Probing(documents=160)(induction(), DATA).rows
    told = {(row["layer"], row["features"]): row["accuracy"] for row in rows}
    assert told[2, "residual"] > 0.9 and told[2, "change"] > 0.9
    assert told[0, "residual"] < 0.35 and told[1, "residual"] < 0.35
    assert all(row["shuffled"] < 0.4 for row in rows)
