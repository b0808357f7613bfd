"""Formulas of cost against built models and the worked numbers of the paper's sizes."""

from dataclasses import replace

import pytest
import torch

from model.config import ModelConfig
from model.cost import (
    bytes_per_parameter,
    forward_flops_per_token,
    layer_flops,
    layer_residual,
    matched,
    memory,
    parameters,
    training_flops,
)
from model.groups import matrices
from model.lm import LanguageModel
from model.mixers.attention import visible_tokens
from model.mixers.table import mixer_of, parse_pattern

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
    assert counts.mixers == count("query.weight", "key.weight", "value.weight", "output.weight")
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
    assert got.total == got.state + got.activations + got.logits
    assert got.logits < 16_384 * 32_000 * 8


def test_an_unknown_mixer_has_no_cost():
    layer = replace(paper("S1").layers[0], mixer="sieve")
    with pytest.raises(ValueError, match="sieve"):
        parameters(replace(paper("S1"), layers=(layer,)))


ARMS = ["full", "swa-128 full", "swa-512 full", "swa-2048 full", "lightning full", "mamba2 full", "gdn full"]


@pytest.mark.parametrize("pattern", ARMS)
@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_all_arms_are_those_of_the_built_model(size, pattern):
    plain = paper(size, pattern)
    for config in (plain, matched(plain), replace(plain, norm_gain=False, qk_norm=1.0, key_shift=True)):
        counts, model = parameters(config), built(config)
        assert counts.total == sum(p.numel() for p in model.parameters())
        assert counts.matrices == sum(p.numel() for _, p in matrices(model))
        assert counts.mlp == sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)


@pytest.mark.parametrize("pattern", ARMS)
def test_matched_layers_have_the_parameters_of_full_attention(pattern):
    for size, (_, depth, _, expected) in SIZES.items():
        config = paper(size, pattern)
        counts = parameters(matched(config))
        assert counts.non_embedding == pytest.approx(expected, rel=1e-3)
        assert [layer.d_ff is None for layer in matched(config).layers] == [
            layer.mixer in ("full", "swa") for layer in config.layers
        ]
        assert len(matched(config).layers) == depth


@pytest.mark.parametrize("pattern", ARMS)
@pytest.mark.parametrize("size", SIZES)
def test_matched_layers_differ_by_less_than_a_hundredth(size, pattern):
    plain = paper(size, pattern)
    config = matched(plain)

    def counted(config: ModelConfig, index: int) -> int:
        layer = built(config).blocks[index]
        return sum(
            p.numel() for name, p in layer.named_parameters() if not name.endswith(("mixer_norm.gain", "mlp_norm.gain"))
        )

    alternating, full = counted(config, 0), counted(paper(size, "full"), 0)
    assert layer_residual(config) == pytest.approx(alternating / full - 1)
    assert abs(layer_residual(config)) < 0.01
    if plain.layers[0].mixer in ("full", "swa"):
        assert layer_residual(config) == 0
    else:
        assert abs(layer_residual(plain)) > abs(layer_residual(config)) > 0


def test_a_mixer_too_large_to_match_is_refused():
    with pytest.raises(ValueError, match="match_parameters: no d_ff brings a mamba2 layer"):
        matched(replace(paper("S1", "mamba2 full"), d_ff=64))


def test_worked_flops_of_recurrent_layers():
    config = paper("S1", "gdn mamba2 lightning full swa-8")
    gdn, mamba2, lightning, *_ = (mixer_of(layer).flops(config, layer, 16_384) for layer in config.layers)
    assert gdn == pytest.approx(6 * (2 * 64 * 5 * 64 + 6 * 64 * 64 + 2 * 64**2 / 3) + 8 * 3 * 384)
    assert mamba2 == 2 * 256 * 128 + 12 * (2 * 256 * 64 + 4 * 128 * 64) + 8 * (768 + 256)
    assert lightning == 6 * (2 * 64 * 128 + 4 * 64 * 64)
    for layer in config.layers[:3]:
        matrices_of_layer = mixer_of(layer).parameters(config, layer)[0] + 3 * 384 * 960
        expected = 2 * matrices_of_layer + mixer_of(layer).flops(config, layer, 100)
        assert layer_flops(config, layer, 100) == layer_flops(config, layer, 16_384) == expected


def test_heads_that_do_not_fill_the_inner_width_are_refused():
    layers = parse_pattern("mamba2", 10, "rope", {"mamba2": {"head_dim": 100}})
    with pytest.raises(ValueError, match="mamba2 head_dim: 100 does not divide the inner width 768"):
        parameters(replace(paper("S1"), layers=layers))
