"""The decoder: initialisation, losses, optimizer groups, positions."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from model import lm
from model.block import SquaredReLU, SwiGLU
from model.config import ModelConfig
from model.groups import grouped, matrices
from model.initialize import initialize
from model.lm import build
from model.mixers.table import parse_pattern
from model.norms import RMSNorm, rms_norm
from model.positions import ntk_base, query_scale, rope_angles, rotate

torch.set_num_threads(1)


def quickstart(pattern: str = "swa-8 full", positions="rope") -> ModelConfig:
    layers = parse_pattern(pattern, 4, positions)
    return ModelConfig(96, 256, 64, 4, 4, 16, 128, layers, mlp="relu2", norm_gain=False, qk_norm=1.5, key_shift=True)


def tokens(batch: int, length: int, vocab: int = 96) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(3))


def woken(model: lm.LanguageModel) -> lm.LanguageModel:
    """The model with every zero parameter filled, so that nothing is silent."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if not parameter.any():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model


def test_arms_of_one_seed_start_from_the_same_weights():
    one, other = build(quickstart(), 5), build(quickstart("full", "nope"), 5)
    again, moved = build(quickstart(), 5), build(quickstart(), 6)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
        assert torch.equal(parameter, again.get_parameter(name)), name
    assert not torch.equal(one.embedding.weight, moved.embedding.weight)


def test_first_values_follow_the_table():
    model = build(quickstart(), 0)
    block = model.blocks[0]
    assert model.embedding.weight.std().item() == pytest.approx(1, rel=0.05)
    assert model.head.weight.std().item() == pytest.approx(0.5 / 8, rel=0.05)
    for matrix in (block.mixer.query, block.mixer.key, block.mixer.value, block.mlp.up):
        assert matrix.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert not block.mixer.output.weight.any()
    assert not block.mlp.down.weight.any()
    assert (block.mixer.query_gain == 1.5).all()
    assert (block.mixer.key_gain == 1.5).all()
    assert (block.mixer.key_shift == 0).all()
    assert model.norm.gain is None


def test_a_parameter_without_a_rule_is_named():
    model = build(quickstart(), 0)
    model.blocks[0].decay = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"blocks\.0\.decay"):
        initialize(model, model.config, 0)


def test_tied_head_is_one_parameter():
    tied = build(replace(quickstart(), tied_embeddings=True), 0)
    assert tied.head is None
    assert torch.equal(tied(tokens(1, 5)), tied.hidden(tied.embedding(tokens(1, 5))) @ tied.embedding.weight.T)
    assert tied.embedding.weight.std().item() == pytest.approx(0.5 / 8, rel=0.05)
    grouped(tied)


def test_loss_at_the_start_is_near_uniform():
    model = build(quickstart(), 0)
    x = tokens(8, 257)
    assert model.loss(x[:, :-1], x[:, 1:]).item() == pytest.approx(4.56 + 0.5**2 / 2, abs=0.1)


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_losses_agree_in_chunks_and_recomputed(monkeypatch, mlp):
    model = woken(build(replace(quickstart(), mlp=mlp, norm_gain=True), 0)).double()
    x = tokens(2, 34)
    inputs, targets = x[:, :-1], x[:, 1:]
    plain = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(plain, list(model.parameters()))
    for limit, recompute in ((lm.LOSS_LOGITS, False), (96 * 7, False), (96 * 7, True)):
        monkeypatch.setattr(lm, "LOSS_LOGITS", limit)
        model.recompute = recompute
        loss = model.loss(inputs, targets)
        assert loss.item() == pytest.approx(plain.item(), abs=1e-12)
        assert model.token_losses(inputs, targets).mean().item() == pytest.approx(plain.item(), abs=1e-12)
        for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_z_loss_is_the_mean_square_of_the_log_partition(monkeypatch):
    model = woken(build(quickstart(), 0)).double()
    x = tokens(2, 34)
    inputs, targets = x[:, :-1], x[:, 1:]
    plain = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    expected = plain + 0.1 * model(inputs).exp().sum(-1).log().square().mean()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for limit in (lm.LOSS_LOGITS, 96 * 7):
        monkeypatch.setattr(lm, "LOSS_LOGITS", limit)
        minimised, cross_entropy = model.objective(inputs, targets, 0.1)
        assert minimised.item() == pytest.approx(expected.item(), abs=1e-12)
        assert cross_entropy.item() == pytest.approx(plain.item(), abs=1e-12)
        for ours, theirs in zip(torch.autograd.grad(minimised, list(model.parameters())), gradients, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("positions", ["rope", "nope", "nope-full"])
def test_the_future_is_never_read(positions):
    model = woken(build(quickstart("swa-8 full", positions), 0)).double()
    x = tokens(1, 40)
    changed = x.clone()
    changed[0, 25] = (changed[0, 25] + 1) % 96
    moved = (model(changed) - model(x)).abs().amax(-1)[0]
    assert (moved[:25] == 0).all()
    assert (moved[25:] > 1e-9).all()


def test_each_parameter_has_one_optimizer():
    model = build(quickstart(), 0)
    stepped, others = grouped(model)
    assert len(stepped) == 4 * 6
    assert {name.rpartition(".")[2] for name, _ in stepped} == {"weight"}
    assert {name.rpartition(".")[2] for name, _ in others} == {"weight", "query_gain", "key_gain", "key_shift"}
    assert [name for name, _ in others if name.endswith("weight")] == ["embedding.weight", "head.weight"]
    assert matrices(model) == stepped


def test_a_parameter_of_no_known_kind_is_named():
    model = build(quickstart(), 0)
    model.blocks[1].mixer.state = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"blocks\.1\.mixer\.state"):
        grouped(model)


def test_rope_turns_by_distance_only():
    cos, sin = rope_angles(12, 8, 1e4)
    assert cos.dtype == torch.float32
    assert torch.allclose(torch.atan2(sin[1], cos[1]), 1e4 ** (-torch.arange(0, 8, 2) / 8))
    query, key = torch.randn(2, 8, dtype=torch.float64)
    scores = rotate(query.expand(12, 8), cos, sin) @ rotate(key.expand(12, 8), cos, sin).T
    for distance in range(12):
        assert torch.allclose(scores.diagonal(distance), scores.diagonal(distance)[0], atol=1e-6)


def test_gradients_written_by_hand():
    torch.manual_seed(0)
    cos, sin = (x.double() for x in rope_angles(5, 6, 100.0))
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda x: rotate(x, cos, sin),
        lambda x: rms_norm(x, 1e-6),
        RMSNorm(6, 1e-6, gain=False),
    ):
        assert torch.autograd.gradcheck(function, (x,))
    gain = torch.randn(2, 1, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, 1e-6, gain), (x, gain))
    assert torch.autograd.gradcheck(SquaredReLU(6, 9).double(), (x,))
    assert torch.autograd.gradcheck(SwiGLU(6, 9).double(), (x,))


def test_norm_matches_torch_in_each_precision():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x = torch.randn(3, 64, dtype=dtype)
        assert rms_norm(x, 1e-6).dtype == dtype
        assert torch.allclose(rms_norm(x, 1e-6), F.rms_norm(x, (64,), None, 1e-6), atol=tolerance, rtol=tolerance)


def test_key_shift_brings_the_previous_key_after_the_norm_and_before_rope():
    model = build(quickstart("full"), 0).double()
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.key_shift.copy_(torch.tensor([0.0, 1.0, -0.5, 2.0]))
    x = torch.randn(1, 9, 64, dtype=torch.float64)
    angles = model.angles(9, x.device)
    cos, sin = angles[16]
    _, key = mixer.queries_and_keys(x, angles)
    plain = mixer.key(x).unflatten(-1, (4, 16)).transpose(1, 2)[0]
    normed = 1.5 * plain / (plain.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for head, shift in enumerate(mixer.key_shift.tolist()):
        mixed = normed[head, 4] + shift * normed[head, 3]
        assert torch.allclose(key[0, head, 4], rotate(mixed, cos[4], sin[4]), atol=1e-6)
    assert torch.allclose(key[0, 3, 0], normed[3, 0], atol=1e-6)


def test_worked_numbers_of_longer_contexts():
    assert ntk_base(1e4, 2, 64) == pytest.approx(20452.23, abs=0.005)
    assert query_scale(32768, 16384) == pytest.approx(1.071429, abs=5e-7)
    assert query_scale(100, 16384) == 1
