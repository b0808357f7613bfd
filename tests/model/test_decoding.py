"""Reading one token at a time gives what reading in parallel gives."""

import itertools

import pytest
import torch

from model.config import ModelConfig
from model.cost import decoding_state
from model.limits import limited
from model.lm import DecodingState, LanguageModel, build
from model.mixers.table import parse_pattern

torch.set_num_threads(1)
LENGTH = 41


def awake(pattern: str, positions: str = "rope", qk_norm: float | None = None, key_shift: bool = False):
    layers = parse_pattern(pattern, 2, positions, {"mamba2": {"head_dim": 16, "d_state": 16}})
    model = build(ModelConfig(23, 32, 32, 4, 2, 8, 48, layers, qk_norm=qk_norm, key_shift=key_shift), 0)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.unique().numel() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model.double()


def tokens() -> torch.Tensor:
    return torch.randint(0, 23, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def stepped(model: LanguageModel, state: DecodingState, tokens_BT: torch.Tensor) -> torch.Tensor:
    logits = []
    for token_B in tokens_BT.unbind(1):
        now, state = model.step(token_B, state)
        logits.append(now)
    return torch.stack(logits, 1)


@pytest.mark.parametrize("positions", ["rope", "nope"])
@pytest.mark.parametrize("pattern", ["full", "swa-5 full", "gdn full", "mamba2 full", "lightning full"])
def test_steps_equal_the_parallel_pass(pattern, positions):
    model = awake(pattern, positions)
    expected = model(tokens())
    assert torch.allclose(stepped(model, model.empty_state(2), tokens()), expected, atol=1e-10)
    for prompt in (1, 2, 17):
        logits, state = model.prefill(tokens()[:, :prompt])
        assert torch.allclose(logits, expected[:, prompt - 1], atol=1e-10)
        assert torch.allclose(stepped(model, state, tokens()[:, prompt:]), expected[:, prompt:], atol=1e-10)


@pytest.mark.parametrize(("qk_norm", "key_shift"), itertools.product([None, 1.5], [False, True]))
def test_steps_carry_norms_and_shifts(qk_norm, key_shift):
    model = awake("swa-5 full", "nope-full", qk_norm, key_shift)
    assert torch.allclose(stepped(model, model.empty_state(2), tokens()), model(tokens()), atol=1e-10)
    _, state = model.prefill(tokens()[:, :9])
    assert torch.allclose(stepped(model, state, tokens()[:, 9:]), model(tokens())[:, 9:], atol=1e-10)


def test_steps_keep_the_sinks_of_limited_layers():
    model = awake("swa-5 full")
    with limited(model, {1: 3}, sinks=2):
        assert torch.allclose(stepped(model, model.empty_state(2), tokens()), model(tokens()), atol=1e-10)


@pytest.mark.parametrize("key_shift", [False, True])
@pytest.mark.parametrize("pattern", ["full", "swa-5 full", "gdn full", "mamba2 full", "lightning full"])
def test_the_state_is_as_large_as_the_formula_says(pattern, key_shift):
    model = awake(pattern, key_shift=key_shift)

    def numbers(state: DecodingState) -> int:
        return sum(kept[0].numel() for layer in state.layers for kept in layer.values())

    state = model.empty_state(2)
    for length, token_B in enumerate(tokens().unbind(1)):
        assert numbers(state) == decoding_state(model.config, length)
        assert numbers(state) == numbers(model.prefill(tokens()[:, :length])[1]) if length else True
        _, state = model.step(token_B, state)
    if pattern == "swa-5 full":
        assert state.layers[0]["key"].shape == (2, 2, 5, 8)
        assert state.layers[1]["key"].shape == (2, 2, LENGTH, 8)
