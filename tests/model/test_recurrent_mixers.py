"""Recurrent mixers: worked numbers, and the chunked forms against the recurrences they stand for."""

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from model import kernels
from model.config import ModelConfig
from model.draws import inverse_softplus
from model.lm import LanguageModel, build
from model.mixers import chunks
from model.mixers.chunks import chunked_linear_attention
from model.mixers.convolution import CausalConvolution
from model.mixers.gated_deltanet import chunked_gated_delta_rule, l2_norm, reference_gated_delta_rule
from model.mixers.lightning import alibi_slopes, decay_rates, reference_linear_attention
from model.mixers.mamba2 import chunked_state_space, reference_state_space
from model.mixers.table import parse_pattern

torch.set_num_threads(1)
Rule = Callable[..., tuple[Tensor, Tensor]]
RECURRENT = ("gdn", "mamba2", "lightning")


def gated_delta(b: int, length: int, draw: Callable[..., Tensor]) -> tuple[Rule, Rule, list[Tensor]]:
    q, k, v = draw(b, length, 3, 5), l2_norm(draw(b, length, 3, 5)), draw(b, length, 3, 4)
    inputs = [q, k, v, -draw(b, length, 3).exp(), draw(b, length, 3).sigmoid(), draw(b, 3, 5, 4)]
    return reference_gated_delta_rule, chunked_gated_delta_rule, inputs


def state_space(b: int, length: int, draw: Callable[..., Tensor]) -> tuple[Rule, Rule, list[Tensor]]:
    x, dt, rate = draw(b, length, 3, 4), F.softplus(draw(b, length, 3)), -draw(3).exp()
    inputs = [x, dt, rate, draw(b, length, 6), draw(b, length, 6), draw(3), draw(b, 3, 6, 4)]
    return reference_state_space, chunked_state_space, inputs


def linear_attention(b: int, length: int, draw: Callable[..., Tensor]) -> tuple[Rule, Rule, list[Tensor]]:
    inputs = [draw(b, length, 3, 5), draw(b, length, 3, 5), draw(b, length, 3, 4), -draw(b, length, 3).exp()]

    def chunked(*inputs: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        *rest, state = inputs
        return chunked_linear_attention(*rest, chunk, state)

    return reference_linear_attention, chunked, [*inputs, draw(b, 3, 5, 4)]


CASES = [gated_delta, state_space, linear_attention]


def made(case, b: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Rule, Rule, list[Tensor]]:
    generator = torch.Generator().manual_seed(length)
    slow, fast, inputs = case(b, length, lambda *shape: torch.randn(*shape, dtype=dtype, generator=generator))
    return slow, fast, [x.detach().requires_grad_() for x in inputs]


def both(results: tuple[Tensor, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, final state and the gradients of both with respect to all inputs."""
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, inputs, upstream)]


@settings(max_examples=25, deadline=None)
@given(
    b=st.integers(1, 2),
    length=st.integers(1, 70),
    chunk=st.sampled_from([1, 2, 7, 16, 64]),
    tile=st.sampled_from([1, 2000, 2**16]),
)
@pytest.mark.parametrize("case", CASES)
def test_chunked_equals_the_recurrence(case, b, length, chunk, tile):
    slow, fast, inputs = made(case, b, length)
    with mock.patch.object(chunks, "TILE", tile):
        fast_results = both(fast(*inputs, chunk=chunk), inputs)
    for ours, theirs in zip(fast_results, both(slow(*inputs), inputs), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("length", [1, 65, 200])
@pytest.mark.parametrize("case", CASES)
def test_chunked_stays_near_the_recurrence_in_half_precision(case, length):
    slow, fast, inputs = made(case, 1, length, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [*inputs[:-1], inputs[-1].detach().float().requires_grad_()]  # states are never in half precision
    for ours, theirs in zip(both(fast(*inputs, chunk=64), inputs), both(slow(*exact), exact), strict=True):
        assert (ours.double() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("case", CASES)
def test_chunked_equals_the_recurrence_in_single_precision(case, length):
    slow, fast, inputs = made(case, 1, length, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for ours, theirs in zip(both(fast(*inputs, chunk=64), inputs), both(slow(*exact), exact), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() <= 1e-4 * max(1, theirs.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_strong_decays_neither_overflow_nor_lose_the_weak_ones_after_them(case):
    slow, fast, inputs = made(case, 1, 300, torch.float32)
    strong = torch.tensor([0.0, 1.0]).repeat_interleave(20).repeat(8)[:300, None]
    with torch.no_grad():
        if case is state_space:
            inputs[1].copy_(10 * strong + 1e-3)
            inputs[2].fill_(-16)
        else:
            inputs[3].copy_(-160 * strong - 0.016)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = list(zip(both(fast(*inputs, chunk=256), inputs), both(slow(*exact), exact), strict=True))
    assert all(ours.isfinite().all() for ours, _ in results)
    # A's gradient sums 300 tokens' gradients, of which strong decays leave nothing but rounding, times steps of 10.
    loose = results.pop(2 + 2) if case is state_space else None
    assert all((ours - theirs).abs().max() <= 1e-4 * max(1, theirs.abs().max()) for ours, theirs in results)
    assert loose is None or torch.allclose(loose[0].double(), loose[1], rtol=2e-2, atol=4e-2)


def test_keys_that_repeat_do_not_blow_up_the_inverse():
    slow, fast, inputs = made(gated_delta, 1, 128, torch.float32)
    with torch.no_grad():
        inputs[1].copy_(inputs[1][:, :1].expand(1, 128, 3, 5))
        inputs[3].zero_()
        inputs[4].fill_(1)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for ours, theirs in zip(both(fast(*inputs, chunk=64), inputs), both(slow(*exact), exact), strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * max(1, theirs.abs().max())


# --- worked numbers -----------------------------------------------------------------------------------------------


def column(*values: float) -> Tensor:
    """One head of width 1, [1, T, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None, None]


@pytest.mark.parametrize("rule", [reference_gated_delta_rule, chunked_gated_delta_rule])
def test_worked_gated_delta_rule(rule):
    q = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)[None, :, None]
    k = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)[None, :, None]
    decay, beta = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)
    out, state = rule(q, k, column(2, 1), decay.log()[None, :, None], beta[None, :, None])
    assert out.flatten().tolist() == pytest.approx([2, 1.28])
    assert state.flatten().tolist() == pytest.approx([1.12, 0.16])


@pytest.mark.parametrize("rule", [reference_state_space, chunked_state_space])
def test_worked_state_space(rule):
    one = torch.ones(1, dtype=torch.float64)
    dt = torch.tensor([0.5, 1.0], dtype=torch.float64)[None, :, None]
    out, _ = rule(column(1, 2), dt, -one, one.expand(1, 2, 1), one.expand(1, 2, 1), 0 * one)
    assert out.flatten().tolist() == pytest.approx([0.5, 2.183940], abs=5e-7)


@pytest.mark.parametrize("rule", [reference_linear_attention, lambda *inputs: chunked_linear_attention(*inputs, 2)])
def test_worked_linear_attention(rule):
    g = torch.full((1, 3, 1), math.log(0.5), dtype=torch.float64)
    out, _ = rule(column(1, 1, 2), column(1, 1, 1), column(2, 4, 0), g)
    assert out.flatten().tolist() == pytest.approx([2, 5, 5])


def test_slopes_are_those_of_alibi():
    assert alibi_slopes(8) == [2**-i for i in range(1, 9)]
    assert alibi_slopes(6) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    assert decay_rates(8, "alibi", 3, 4) == alibi_slopes(8)
    assert decay_rates(8, "layer-scaled", 0, 4) == pytest.approx([1.00001 * slope for slope in alibi_slopes(8)])
    assert decay_rates(8, "layer-scaled", 3, 4) == pytest.approx([1e-5 * slope for slope in alibi_slopes(8)])


def test_bias_of_a_step_is_its_inverse_softplus():
    assert inverse_softplus(torch.tensor(0.01)).item() == pytest.approx(-4.600166, abs=5e-7)
    assert F.softplus(inverse_softplus(torch.tensor([1e-3, 0.1, 1e-9]))).tolist() == pytest.approx([1e-3, 0.1, 1e-4])


# --- layers -------------------------------------------------------------------------------------------------------


def config(pattern: str, positions: str = "rope", depth: int = 2, **changes) -> ModelConfig:
    layers = parse_pattern(pattern, depth, positions, {"mamba2": {"head_dim": 16, "d_state": 16}})
    return replace(ModelConfig(23, 64, 32, 4, 2, 8, 48, layers), **changes)


def awake(config: ModelConfig, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """A model in which no parameter is zero or one, so that nothing is silent."""
    model = build(config, 0)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.unique().numel() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model.to(dtype)


def convolved(x_BTC: Tensor, conv: CausalConvolution) -> Tensor:
    padded = F.pad(x_BTC.mT, (conv.weight.shape[2] - 1, 0))
    return F.silu(F.conv1d(padded, conv.weight, conv.bias, groups=x_BTC.shape[2])).mT


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def plain_gated_deltanet(mixer, x: Tensor) -> Tensor:
    q, k, v = (
        convolved(x @ getattr(mixer, name).weight.T, getattr(mixer, f"{name}_conv")).unflatten(-1, (4, 8))
        for name in ("query", "key", "value")
    )
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    g = -mixer.A_log.exp() * F.softplus(x @ mixer.decay.weight.T + mixer.dt_bias)
    out, _ = reference_gated_delta_rule(q / math.sqrt(8), k, v, g, (x @ mixer.beta.weight.T).sigmoid())
    gate = F.silu(x @ mixer.gate.weight.T)
    return (rms(out, mixer.norm.gain).flatten(2) * gate) @ mixer.output.weight.T


def plain_mamba2(mixer, x: Tensor) -> Tensor:
    z, xbc, dt = (x @ mixer.input.weight.T).split([64, 64 + 32, 4], -1)
    inner, b, c = convolved(xbc, mixer.conv).split([64, 16, 16], -1)
    dt = F.softplus(dt + mixer.dt_bias)
    out, _ = reference_state_space(inner.unflatten(-1, (4, 16)), dt, -mixer.A_log.exp(), b, c, mixer.D)
    return rms(out.flatten(2) * F.silu(z), mixer.norm.gain) @ mixer.output.weight.T


def plain_lightning(mixer, x: Tensor) -> Tensor:
    q, k, v = ((x @ m.weight.T).unflatten(-1, (4, 8)) for m in (mixer.query, mixer.key, mixer.value))
    q, k = rms(q, mixer.query_norm.gain), rms(k, mixer.key_norm.gain)
    angles = torch.arange(x.shape[1])[:, None] * 1e4 ** (-torch.arange(4) / 4)
    turn = torch.polar(torch.ones(()).double(), angles.double())[:, None]
    q, k = (torch.complex(y[..., :4], y[..., 4:]) * turn for y in (q, k))
    q, k = (torch.cat([y.real, y.imag], -1) for y in (q, k))
    g = -torch.tensor([2**-2, 2**-4, 2**-6, 2**-8]).double().expand(*x.shape[:2], 4)
    out, _ = reference_linear_attention(q / math.sqrt(8), k, v, g)
    return (rms(out.flatten(2), mixer.norm.gain) * (x @ mixer.gate.weight.T).sigmoid()) @ mixer.output.weight.T


@pytest.mark.parametrize(
    ("word", "plain"), [("gdn", plain_gated_deltanet), ("mamba2", plain_mamba2), ("lightning", plain_lightning)]
)
def test_a_layer_is_what_its_definition_says(word, plain):
    model = awake(config(word))
    x = torch.randn(2, 75, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mixer = model.blocks[1].mixer
    tolerance = 1e-5 if word == "lightning" else 1e-10  # angles are float32
    assert torch.allclose(mixer(x, model.angles(75, x.device)), plain(mixer, x), atol=tolerance)


@pytest.mark.parametrize("word", RECURRENT)
def test_autocast_stays_near_single_precision(word):
    model = awake(config(word), torch.float32)
    mixer, x = model.blocks[1].mixer, torch.randn(2, 75, 32, generator=torch.Generator().manual_seed(1))
    angles = model.angles(75, x.device)
    exact = mixer(x, angles)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = mixer(x, angles)
    assert near.dtype == torch.bfloat16
    assert (near - exact).norm() <= 2e-2 * exact.norm()
    near.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@settings(max_examples=10, deadline=None)
@given(length=st.integers(2, 70), data=st.data())
@pytest.mark.parametrize("word", RECURRENT)
def test_the_past_never_reads_the_future(word, length, data):
    changed = data.draw(st.integers(0, length - 1))
    model = awake(config(word))
    tokens = torch.randint(0, 23, (1, length), generator=torch.Generator().manual_seed(length))
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 23
    moved = (model(other) - model(tokens)).abs().amax(-1)[0]
    assert (moved[:changed] < 1e-12).all()
    assert moved[changed] > 1e-9


def test_positions_turn_lightning_layers_only():
    for positions, rope in (("rope", True), ("nope", False), ("nope-full", True)):
        layers = parse_pattern("lightning gdn mamba2 full", 4, positions)
        assert [layer.rope for layer in layers] == [rope, False, False, positions == "rope"]


def test_layer_scaled_slopes_are_a_setting():
    layers = parse_pattern("lightning", 2, "rope", {"lightning": {"slopes": "layer-scaled"}})
    model = build(config("lightning", layers=layers), 0)
    assert model.blocks[1].mixer.rates == decay_rates(4, "layer-scaled", 1, 2)


def test_first_values_of_recurrent_layers():
    layers = parse_pattern("gdn mamba2", 2, "rope", {"gdn": {"heads": 4000, "key_dim": 1, "value_dim": 1}})
    layers = (layers[0], *parse_pattern("mamba2", 1, "rope", {"mamba2": {"head_dim": 1, "expand": 125}}))
    gdn, mamba2 = (block.mixer for block in build(config("full", layers=layers), 0).blocks)
    for mixer, low in ((gdn, 0), (mamba2, 1)):
        rates, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
        assert low <= rates.min() < low + 0.1
        assert 15.9 < rates.max() <= 16.001
        assert rates.mean().item() == pytest.approx((low + 16) / 2, rel=0.03)
        assert 0.999e-3 < dt.min() < 1.1e-3
        assert 0.09 < dt.max() <= 0.1001
        assert dt.log().mean().item() == pytest.approx(math.log(0.01), rel=0.02)
    assert (mamba2.D == 1).all()
    assert (mamba2.norm.gain == 1).all()
    assert not mamba2.conv.bias.any()
    assert not mamba2.output.weight.any()
    assert gdn.query_conv.weight.abs().max().item() == pytest.approx(0.5, rel=0.01)
    assert gdn.query_conv.weight.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize(
    ("mixers", "words"),
    [
        ({"gdn": {"head": 3}}, "gdn has no setting 'head'; choose from heads, key_dim, value_dim, conv_width"),
        ({"mamba2": {"d_state": 0}}, "mamba2 d_state: 0 is not positive"),
        ({"lightning": {"slopes": "steep"}}, "lightning slopes: 'steep' is no rule; choose alibi or layer-scaled"),
        ({"full": {"heads": 3}}, "'full' is no mixer with settings; choose from gdn, mamba2, lightning"),
    ],
)
def test_settings_that_mean_nothing_are_refused(mixers, words):
    with pytest.raises(ValueError, match=words):
        parse_pattern("gdn mamba2", 2, "rope", mixers)


@pytest.mark.parametrize("word", ["gdn-8", "mamba", "swa", "full-3"])
def test_words_that_mean_nothing_are_refused(word):
    with pytest.raises(ValueError, match=f"pattern: '{word}'"):
        parse_pattern(word, 1, "rope")


def test_convolution_gradients_written_by_hand():
    conv = CausalConvolution(3, 4, bias=True).double()
    torch.nn.init.normal_(conv.weight)
    torch.nn.init.normal_(conv.bias)
    for length in (1, 2, 9):
        x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
        assert torch.allclose(conv(x), convolved(x, conv), atol=1e-12)
        assert torch.autograd.gradcheck(lambda x, *_: conv(x), (x, conv.weight, conv.bias))


def test_flash_linear_attention_is_asked_for_the_same(monkeypatch):
    """In the library's place stand our own chunks, which forbid what they do not know: scale, layouts, shared keys."""
    asked = []

    def gla(q, k, v, g, *, scale, initial_state, output_final_state):
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.dtype == k.dtype == v.dtype
        asked.append((scale, output_final_state))
        return reference_linear_attention(q, k, v, g, initial_state)

    def delta(q, k, v, g, beta, *, scale, initial_state, output_final_state):
        asked.append((scale, output_final_state))
        return reference_gated_delta_rule(q, k, v, g, beta, initial_state)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 37, heads, 8, dtype=torch.float64, generator=generator) for heads in (1, 1, 4))
    g, beta = -torch.rand(2, 37, 4, generator=generator).double(), torch.rand(2, 37, 4, generator=generator).double()
    expected = chunked_linear_attention(q, k, v, g, 16)
    q4, k4 = (x.repeat_interleave(4, 2) for x in (q, k))
    expected_delta = chunked_gated_delta_rule(q4, k4, v, g, beta)
    monkeypatch.setattr(kernels, "chunk_simple_gla", gla)
    monkeypatch.setattr(kernels, "chunk_gated_delta_rule", delta)
    assert not kernels.fla_takes(k, v), "not on a CPU"
    monkeypatch.setattr(kernels, "fla_refusal", lambda setting: None)
    for got, want in (
        (chunked_linear_attention(q, k, v, g, 16), expected),
        (chunked_gated_delta_rule(q4, k4, v, g, beta), expected_delta),
    ):
        for ours, theirs in zip(got, want, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert asked == [(1.0, True)] * 2


@pytest.mark.parametrize(
    ("device", "dtype", "width", "said"),
    [
        ("cuda", torch.bfloat16, 64, None),
        ("cuda", torch.float32, 64, "bfloat16 or float16"),
        ("cpu", torch.bfloat16, 64, "on CUDA"),
        ("cuda", torch.bfloat16, 512, "512 wide"),
    ],
)
def test_flash_linear_attention_refuses_what_it_cannot(monkeypatch, device, dtype, width, said):
    monkeypatch.setattr(kernels, "chunk_gated_delta_rule", lambda *_, **__: None)
    reason = kernels.fla_refusal(kernels.Setting(device, dtype, width))
    assert reason is None if said is None else said in str(reason)
