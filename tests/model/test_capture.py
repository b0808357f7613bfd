"""Attention rows asked for, and limits set at evaluation."""

import math

import pytest
import torch

from model.capture import attention_rows
from model.config import ModelConfig
from model.limits import limited, scaled_queries, softmax_heads
from model.lm import LanguageModel, build
from model.local_attention import visible
from model.mixers.table import parse_pattern

torch.set_num_threads(1)


@pytest.fixture
def model() -> LanguageModel:
    layers = parse_pattern("swa-5 full", 4, "nope-full")
    config = ModelConfig(13, 16, 16, 4, 2, 8, 24, layers, qk_norm=1.5, key_shift=True)
    model = build(config, 0).double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if not parameter.any():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model


def tokens(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 13, (batch, length), generator=torch.Generator().manual_seed(2))


def whole_matrices(model: LanguageModel, tokens_BT: torch.Tensor) -> dict[int, torch.Tensor]:
    """Every layer's softmax over the whole T×T product, walking the blocks by hand."""
    x = model.embedding(tokens_BT)
    angles = model.angles(x.shape[1], x.device)
    position = torch.arange(x.shape[1])
    found = {}
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            query, key = block.mixer.queries_and_keys(block.mixer_norm(x), angles)
            scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(8)
            hidden = ~visible(position, position, block.mixer.window)
            found[index] = scores.masked_fill(hidden, -math.inf).softmax(-1)
            x = block(x, angles)
    return found


def test_rows_equal_an_explicit_softmax(model):
    expected = whole_matrices(model, tokens())
    rows = attention_rows(model, tokens(), torch.tensor([3, 15, 0]), [0, 1, 3])
    assert list(rows) == [0, 1, 3]
    for layer, row in rows.items():
        assert row.shape == (2, 4, 3, 16)
        assert torch.allclose(row, expected[layer][:, :, [3, 15, 0]], atol=1e-12)
        assert torch.allclose(row.sum(-1), torch.ones(2, 4, 3, dtype=torch.float64))


def test_each_document_may_ask_at_places_of_its_own(model):
    expected = whole_matrices(model, tokens())[2]
    rows = attention_rows(model, tokens(), torch.tensor([[3, 9], [15, 1]]))
    assert list(rows) == [0, 1, 2, 3]
    assert torch.allclose(rows[2], torch.stack([expected[0][:, [3, 9]], expected[1][:, [15, 1]]]), atol=1e-12)


def test_capture_leaves_no_hook_behind(model):
    with pytest.raises(ValueError, match="positions"):
        attention_rows(model, tokens(), torch.tensor([16]))
    with pytest.raises(ValueError, match="layers: 7"):
        attention_rows(model, tokens(), torch.tensor([1]), [7])
    attention_rows(model, tokens(), torch.tensor([1]))
    assert not any(block.mixer._forward_pre_hooks for block in model.blocks)


def test_limits_hold_within_their_context_only(model):
    free = model(tokens())
    with limited(model, {1: 3, 3: 3}):
        tight = model(tokens())
        rows = attention_rows(model, tokens(), torch.tensor([10]), [1])[1]
    assert (rows[..., 0, 8:11] > 0).all()
    assert (rows[..., :8] == 0).all()
    assert not torch.allclose(tight, free)
    assert torch.allclose(tight[:, :3], free[:, :3])
    assert torch.equal(model(tokens()), free)


def test_a_limit_never_widens_a_window(model):
    free = model(tokens())
    with limited(model, {0: 9, 2: 100}):
        assert torch.equal(model(tokens()), free)


def test_sinks_stay_in_sight(model):
    with limited(model, {1: 3}, sinks=2):
        row = attention_rows(model, tokens(), torch.tensor([10]), [1])[1][0, 0, 0]
    assert row.nonzero().flatten().tolist() == [0, 1, 8, 9, 10]


def test_limits_refuse_what_means_nothing(model):
    for windows, sinks, words in (({9: 3}, 0, "layers: 9"), ({1: 0}, 0, "window 0"), ({1: 3}, -1, "sinks: -1")):
        with pytest.raises(ValueError, match=words), limited(model, windows, sinks):
            pass


def test_query_scale_is_for_full_layers_beyond_the_trained_length(model):
    free = model(tokens())
    with scaled_queries(model, 16):
        assert torch.equal(model(tokens()), free)
    with scaled_queries(model, 32):
        assert softmax_heads(model)[1][0].mixer.query_scale == pytest.approx(math.log(32) / math.log(16))
        assert softmax_heads(model)[0][0].mixer.query_scale == 1
        assert not torch.allclose(model(tokens()), free)
    assert torch.equal(model(tokens()), free)
