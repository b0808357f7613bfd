"""Formulas of cost against built models and the worked numbers of the paper's sizes."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from model.config import ModelConfig, parse_pattern
from model.cost import (
    bytes_per_parameter,
    forward_flops_per_token,
    layer_flops,
    memory,
    parameters,
    training_flops,
    visible_tokens,
)
from model.groups import matrices
from model.lm import LanguageModel

SIZES = {  # d_model, layers, query heads, N
    "S1": (384, 10, 6, 14_999_424),
    "S2": (512, 12, 8, 31_470_080),
    "S3": (640, 16, 10, 64_901_760),
    "S4": (768, 18, 12, 104_427_264),
    "S5": (1280, 30, 20, 476_852_480),
}


def paper(size: str, pattern: str = "swa-128 full") -> ModelConfig:
    d, depth, heads, _ = SIZES[size]
    return ModelConfig(32_000, 16_384, d, heads, 2, 64, d * 5 // 2, parse_pattern(pattern, depth, "rope"))


def quickstart(**changes) -> ModelConfig:
    layers = parse_pattern("swa-8 full", 4, "rope")
    config = ModelConfig(96, 256, 64, 4, 4, 16, 128, layers, mlp="relu2", norm_gain=False, qk_norm=1.5, key_shift=True)
    return replace(config, **changes)


def built(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


@pytest.mark.parametrize("size", SIZES)
def test_paper_sizes_have_the_paper_parameters(size):
    config, expected = paper(size), SIZES[size][3]
    counts = parameters(config)
    model = built(config)
    assert counts.non_embedding == expected
    assert sum(p.numel() for p in model.parameters()) == counts.total == expected + 2 * 32_000 * config.d_model
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith(("blocks", "norm"))) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"mlp": "swiglu"},
        {"norm_gain": True},
        {"n_kv_heads": 2},
        {"qk_norm": None},
        {"key_shift": False},
    ],
)
def test_formula_counts_each_component_of_the_built_model(changes):
    config = quickstart(**changes)
    counts, model = parameters(config), built(config)
    named = dict(model.named_parameters())

    def count(*words: str) -> int:
        return sum(p.numel() for name, p in named.items() if any(word in name for word in words))

    assert counts.total == sum(p.numel() for p in named.values())
    assert counts.embedding == count("embedding")
    assert counts.head == count("head.")
    assert counts.mlp == count("mlp.")
    assert counts.attention == count("query.weight", "key.weight", "value.weight", "output.weight")
    assert counts.gains == count("query_gain", "key_gain", "key_shift")
    assert counts.norms == count("norm.gain")
    assert counts.matrices == sum(p.numel() for _, p in matrices(model))


def test_the_quickstart_model_has_143_thousand_parameters():
    assert parameters(quickstart()).total == 143_408
    assert parameters(quickstart()).non_embedding == 131_120


@pytest.mark.parametrize(
    ("word", "expected"), [("full", 15.58), ("swa-128", 3.19), ("swa-512", 3.77), ("swa-2048", 5.95)]
)
def test_worked_flops_of_a_layer(word, expected):
    config = paper("S1", word)
    assert layer_flops(config, config.layers[0], 16_384) / 1e6 == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 9])
def test_visible_tokens_are_the_mean_of_the_mask(window):
    layer = replace(paper("S1", "full").layers[0], window=window)
    for length in (1, 4, 5, 8):
        seen = [min(t + 1, window or length) for t in range(length)]
        assert visible_tokens(layer, length) == pytest.approx(sum(seen) / length)


def test_model_flops_add_layers_and_head():
    config = paper("S1")
    layers = sum(layer_flops(config, layer, 16_384) for layer in config.layers)
    assert forward_flops_per_token(config) == layers + 2 * 384 * 32_000
    assert training_flops(config, 1000) == 3000 * forward_flops_per_token(config)
    assert training_flops(config, 1000, recompute=True) == 4000 * forward_flops_per_token(config)
    assert forward_flops_per_token(config, 1024) < forward_flops_per_token(config)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("adamw", [16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]), ("muon", [12, 4 + 8 / 4, 2 + 10 / 4, 12 / 4])],
)
def test_bytes_per_parameter_by_zero_stage(optimizer, expected):
    assert [bytes_per_parameter(optimizer, stage, 4) for stage in range(4)] == expected
    with pytest.raises(ValueError, match="zero_stage: 4"):
        bytes_per_parameter(optimizer, 4, 1)


def test_memory_adds_state_activations_and_logits():
    config = paper("S1")
    counts = parameters(config)
    got = memory(config, "muon", 1, precision="bfloat16")
    assert got.state == 12 * counts.matrices + 16 * (counts.total - counts.matrices)
    assert got.activations == (32 * 384 + 4 * 128 + 4 * 6) * 16_384 * 10
    assert memory(config, "muon", 1, precision="bfloat16", recompute=True).activations == 2 * 384 * 16_384 * 10
    assert memory(config, "muon", 1).activations == 2 * got.activations
    assert got.total == got.state + got.activations + got.logits + got.working
    assert got.working == 2 * 16_384 * 4 * (960 + 384) + 16 * counts.matrices
    assert got.logits < 16_384 * 32_000 * 8


def test_an_unknown_mixer_has_no_cost():
    layer = replace(paper("S1").layers[0], mixer="sieve")
    with pytest.raises(ValueError, match="sieve"):
        parameters(replace(paper("S1"), layers=(layer,)))


def test_planning_does_not_load_torch():
    code = "import sys, model.config, model.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
