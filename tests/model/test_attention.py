"""Windows, kernels and the reference they must equal."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from model import kernels
from model.config import Layer, ModelConfig
from model.kernels import KERNELS, Setting, attend, block_mask, choose
from model.lm import build
from model.local_attention import visible
from model.mixers.attention import reference_attention

torch.set_num_threads(1)


def draw(length: int, heads: int = 4, groups: int = 2, width: int = 4, batch: int = 2, dtype=torch.float64):
    """Queries, keys, values laid out as a projection leaves them: [B, T, H, K] seen as [B, H, T, K]."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(batch, length, n, width, dtype=dtype, generator=generator).transpose(1, 2).requires_grad_()
        for n in (heads, groups, groups)
    ]


def two_layers(window: int | None) -> ModelConfig:
    layer = Layer("full") if window is None else Layer("swa", window)
    return ModelConfig(11, 16, 16, 4, 2, 4, 32, (layer, layer))


def awake(config: ModelConfig):
    """A float64 model whose output matrices are not zero, so that tokens reach each other."""
    model = build(config, 0).double()
    for block in model.blocks:
        for matrix in (block.mixer.output.weight, block.mlp.down.weight):
            torch.nn.init.normal_(matrix, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


def test_window_counts_the_current_token():
    position = torch.arange(5)
    mask = visible(position, position, 3)
    assert mask[4].nonzero().flatten().tolist() == [2, 3, 4]
    assert mask.sum() == 12


@pytest.mark.parametrize("kernel", ["blocks", "masked"])
def test_row_of_a_window_of_three_averages_three_values(kernel):
    query = torch.zeros(1, 1, 5, 2)
    value = torch.arange(5.0)[None, None, :, None].expand(1, 1, 5, 2)
    out = attend(query, query, value, 3, kernel=kernel)
    assert out[0, 0, :, 0].tolist() == pytest.approx([0.0, 0.5, 1.0, 2.0, 3.0])


def test_reach_of_two_layers_of_three():
    model = awake(two_layers(3))
    embedded = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.hidden(embedded)[0, 8].sum(), embedded)
    by_distance = gradient[0].norm(dim=-1).flip(0)
    assert (by_distance[:5] > 1e-6).all()
    assert (by_distance[5:] == 0).all()


def test_window_of_the_whole_sequence_is_full_attention():
    tokens = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(0))
    full = awake(two_layers(None))
    for window in (13, 14, 100):
        windowed = awake(two_layers(window))
        assert torch.equal(windowed(tokens), full(tokens))
    assert not torch.allclose(awake(two_layers(12))(tokens), full(tokens))


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 97),
    window=st.integers(1, 110),
    ratio=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    sinks=st.sampled_from([0, 0, 1, 3, 40]),
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_fast_equals_reference_with_gradients(dtype, tolerance, length, window, ratio, sinks):
    inputs = draw(length, *ratio, dtype=dtype)
    upstream = torch.randn(inputs[0].shape, dtype=dtype, generator=torch.Generator().manual_seed(7))
    fast, slow = attend(*inputs, window, sinks), reference_attention(*inputs, window, sinks)
    assert torch.allclose(fast, slow, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(
        torch.autograd.grad(fast, inputs, upstream), torch.autograd.grad(slow, inputs, upstream), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance)


def test_recomputed_probabilities_give_the_same_gradients():
    inputs = draw(700, 2, 1, 4, 1)
    for window in (512, 513):  # the widest window whose probabilities are kept, the narrowest that recomputes them
        fast, slow = attend(*inputs, window), reference_attention(*inputs, window)
        for ours, theirs in zip(
            torch.autograd.grad(fast.square().sum(), inputs),
            torch.autograd.grad(slow.square().sum(), inputs),
            strict=True,
        ):
            assert torch.allclose(ours, theirs, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, 80), window=st.one_of(st.none(), st.integers(1, 90)), data=st.data())
def test_output_depends_on_visible_tokens_only(length, window, data):
    changed = data.draw(st.integers(0, length - 1))
    query, key, value = (x.detach() for x in draw(length))
    before = attend(query, key, value, window)
    key, value = key.clone(), value.clone()
    key[:, :, changed] += 1
    value[:, :, changed] += 1
    moved = (attend(query, key, value, window) - before).abs().amax((0, 1, 3)) > 1e-9
    expected = visible(torch.arange(length), torch.tensor([changed]), window)[:, 0]
    assert torch.equal(moved, expected)


@pytest.mark.parametrize("window", [None, 6])
def test_sinks_stay_visible(window):
    inputs = draw(40)
    assert torch.allclose(attend(*inputs, window, 2), reference_attention(*inputs, window, 2), atol=1e-10)


def test_half_precision_scores_are_taken_in_float32():
    inputs = [x.detach().bfloat16() for x in draw(70)]
    exact = reference_attention(*(x.double() for x in inputs), 9)
    assert torch.allclose(attend(*inputs, 9).double(), exact, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(*(x.float() for x in inputs), 9).sub(exact).abs().max() < 1e-5


def test_a_kernel_refuses_what_it_cannot_honour():
    inputs = draw(20)
    with pytest.raises(ValueError, match="causal refuses, it has no window"):
        attend(*inputs, 5, kernel="causal")
    with pytest.raises(ValueError, match="blocks refuses, it needs a window"):
        attend(*inputs, None, kernel="blocks")
    with pytest.raises(ValueError, match="flash-attn refuses"):
        attend(*inputs, 5, kernel="flash-attn")
    with pytest.raises(ValueError, match="'fast' is not known"):
        attend(*inputs, 5, kernel="fast")


def test_windows_never_fall_to_the_full_product():
    assert KERNELS["blocks"].refusal(Setting("cpu", torch.float32, 4, 39)) is None
    assert list(KERNELS)[-1] == "masked"


CUDA = Setting("cuda", torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("changes", "installed", "kernel"),
    [
        ({}, True, "flash-attn"),
        ({"window": 128}, True, "flash-attn"),
        ({"window": 128, "sinks": 4}, True, "flex"),
        ({"width": 512}, True, "causal"),
        ({"dtype": torch.float32, "window": 128}, True, "flex"),
        ({}, False, "causal"),
        ({"window": 128}, False, "flex"),
        ({"window": 128, "width": 8}, False, "blocks"),
        ({"window": 128, "dtype": torch.float64}, False, "blocks"),
        ({"window": 128, "width": 8, "sinks": 4}, False, "blocks"),
        ({"device": "cpu"}, True, "causal"),
        ({"device": "cpu", "window": 128}, True, "blocks"),
        ({"device": "cpu", "window": 128, "sinks": 1}, True, "blocks"),
    ],
)
def test_the_first_kernel_that_can_is_taken(monkeypatch, changes, installed, kernel):
    monkeypatch.setattr(kernels, "flash_attn_func", (lambda *_, **__: None) if installed else None)
    name, refused = choose(replace(CUDA, **changes))
    assert name == kernel
    assert list(refused) == list(KERNELS)[: list(KERNELS).index(kernel)]
    assert all(refused.values())


def test_flash_attention_is_asked_for_the_same_window(monkeypatch):
    """Its window_size counts tokens before the current one: 2 for a window of 3."""
    asked = []

    def library(query, key, value, **settings):
        asked.append(settings)
        return query

    monkeypatch.setattr(kernels, "flash_attn_func", library)
    query, key, value = draw(7)
    for window in (3, None):
        assert torch.equal(KERNELS["flash-attn"].compute(query, key, value, window, 0), query)
    assert asked == [{"causal": True, "window_size": (2, 0)}, {"causal": True, "window_size": (-1, -1)}]


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (6, 0), (6, 2), (1, 0)])
@torch.no_grad()
def test_flex_attention_sees_what_it_should(window, sinks):
    """Its mask, run without its compiled kernel, which needs a GPU."""
    query, key, value = (x.detach() for x in draw(150, dtype=torch.float32))
    mask = block_mask(150, window, sinks, query.device)
    out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    assert torch.allclose(out, reference_attention(query, key, value, window, sinks), atol=1e-5)


def best_seconds(forms) -> list[float]:
    """Thread seconds of forward and backward of each form, the best of five taken in turn."""
    taken = []
    for _ in range(5):
        row = []
        for function, inputs in forms:
            start = time.thread_time()
            torch.autograd.grad(function(*inputs).sum(), inputs)
            row.append(time.thread_time() - start)
        taken.append(row)
    return [min(column) for column in zip(*taken, strict=True)]


@pytest.mark.slow
def test_work_grows_with_the_window_not_the_square_of_the_sequence():
    longer, shorter = (draw(t, 6, 6, 64, 1, dtype=torch.float32) for t in (4096, 2048))
    narrow = partial(attend, window=128, kernel="blocks")
    whole, blocks, wider, half = best_seconds(
        [
            (partial(reference_attention, window=128), longer),
            (narrow, longer),
            (partial(attend, window=512, kernel="blocks"), longer),
            (narrow, shorter),
        ]
    )
    assert whole > 10 * blocks
    assert wider > 1.5 * blocks
    assert blocks < 3 * half
