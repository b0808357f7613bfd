"""Layers in a word: heads that several mixers share, partial RoPE, sinks, and what is done to logits."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from model import cost
from model.capture import attention_rows
from model.config import Layer, ModelConfig
from model.groups import grouped
from model.kernels import chosen
from model.limits import limited, softmax_heads
from model.lm import LanguageModel, build
from model.mixers.attention import reference_attention, visible_tokens
from model.mixers.table import config_from, parse_pattern

torch.set_num_threads(1)
SETTINGS = {"mamba2": {"head_dim": 16, "d_state": 8}}
SHARED = ["swa-5+full", "gdn:3+full", "lightning+mamba2", "swa-3+swa-9", "full+gdn:2+lightning"]


def awake(pattern: str, heads: int = 4, positions="rope", sinks: int = 0, **changes) -> LanguageModel:
    layers = parse_pattern(pattern, 2, positions, SETTINGS, sinks)
    model = build(ModelConfig(23, 32, 32, heads, heads, 8, 48, layers, **changes), 0).double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.unique().numel() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model


def tokens(length: int = 41) -> Tensor:
    return torch.randint(0, 23, (2, length), generator=torch.Generator().manual_seed(4))


def test_a_word_says_which_heads_a_mixer_has():
    shared, plain = parse_pattern("swa-8:3+full gdn", 4, "nope-full", None, 2)[:2]
    assert shared == Layer(
        "heads", rope=False, parts=(Layer("swa", 8, True, sinks=2, weight=3), Layer("full", None, False))
    )
    assert (shared.word, plain.word) == ("swa-8:3+full", "gdn")
    assert plain.sinks == 0
    model = awake("swa-8:3+full")
    assert [part.heads for part in model.blocks[0].mixer.parts] == [3, 1]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("swa-8:3", "weighs a layer of one mixer"),
        ("swa-8:0+full", "'swa-8:0' in 'swa-8:0.full' has no weight"),
        ("swa-8:x+full", "write swa-8:3"),
        ("swa-8++full", "'' is no known mixer"),
        ("heads", "'heads' is no known mixer"),
        ("swa-8:4+full", "1 of 5 parts|4 of 5 parts"),
        (
            "gdn+lightning+full",
            "'gdn.lightning.full' gives gdn 1 of 3 parts of gdn's heads 4, which are no whole heads",
        ),
    ],
)
def test_words_that_name_no_layer_are_refused(pattern, said):
    with pytest.raises(ValueError, match=said):
        cost.parameters(ModelConfig(23, 32, 32, 4, 4, 8, 48, parse_pattern(pattern, 2, "rope")))


def test_two_halves_of_full_attention_are_full_attention():
    """Heads in parts with an output projection each are heads in one layer with the projection of all."""
    whole, halves = awake("full", qk_norm=1.5, key_shift=True), awake("full+full", qk_norm=1.5, key_shift=True)
    with torch.no_grad():
        for plain, shared in zip(whole.blocks, halves.blocks, strict=True):
            for name, parameter in plain.mixer.named_parameters():
                axis = 1 if name == "output.weight" else 0
                for part, half in zip(shared.mixer.parts, parameter.chunk(2, axis), strict=True):
                    part.get_parameter(name).copy_(half)
        for name, parameter in halves.named_parameters():
            if ".parts." not in name:
                parameter.copy_(whole.get_parameter(name))
    assert torch.allclose(whole(tokens()), halves(tokens()), atol=1e-12)
    rows, expected = (
        attention_rows(halves, tokens(), torch.tensor([3, 40])),
        attention_rows(whole, tokens(), torch.tensor([3, 40])),
    )
    assert all(torch.allclose(rows[layer], expected[layer], atol=1e-12) for layer in (0, 1))


@pytest.mark.parametrize("pattern", SHARED)
def test_parts_add_up(pattern):
    """Outputs, parameters, FLOPs and states are sums; each matrix inside is one that Muon may step."""
    model = awake(pattern)
    mixer, x = model.blocks[0].mixer, torch.randn(2, 19, 32, dtype=torch.float64)
    angles = model.angles(19, x.device)
    assert torch.allclose(mixer(x, angles), sum(part(x, angles) for part in mixer.parts), atol=1e-12)
    assert cost.parameters(model.config).total == sum(p.numel() for p in model.parameters())
    inside, _ = grouped(model)
    assert cost.parameters(model.config).matrices == sum(p.numel() for _, p in inside)
    state = model.prefill(tokens())[1]
    numbers = sum(kept[0].numel() for layer in state.layers for kept in layer.values())
    assert numbers == cost.decoding_state(model.config, 41)
    heads = {layer: [part.heads for part in parts] for layer, parts in softmax_heads(model).items()}
    assert heads in ({}, {0: heads.get(0), 1: heads.get(0)})
    halved = replace(model.config, layers=tuple(Layer("full") for _ in range(2)))
    if pattern == "swa-5+full":
        assert heads[0] == [range(2), range(2, 4)]
        alone = parse_pattern("swa-5 full", 2, "rope")
        flops = [cost.layer_flops(halved, layer, 32) for layer in alone]
        assert cost.layer_flops(model.config, model.config.layers[0], 32) == pytest.approx(sum(flops) / 2)


@pytest.mark.parametrize("pattern", SHARED)
def test_shared_layers_read_a_token_at_a_time(pattern):
    model = awake(pattern, sinks=2, sink_logit=True)
    expected = model(tokens())
    _, state = model.prefill(tokens()[:, :17])
    for position in range(17, 41):
        now, state = model.step(tokens()[:, position], state)
        assert torch.allclose(now, expected[:, position], atol=1e-9)


@pytest.mark.parametrize("pattern", ["swa-5+full", "gdn:3+full"])
def test_limits_reach_the_softmax_heads_of_a_shared_layer(pattern):
    model = awake(pattern)
    free = model(tokens())
    with limited(model, {0: 2, 1: 2}):
        assert [part.mixer.window for part in softmax_heads(model)[0]] == [2] * len(softmax_heads(model)[0])
        assert not torch.allclose(model(tokens()), free)
    assert torch.equal(model(tokens()), free)


def test_a_shared_layer_names_the_kernel_of_each_part():
    kernels = chosen(awake("swa-5+full gdn:3+full").config, "cpu", torch.float32)
    assert {word: kernel for word, (kernel, _) in kernels.items()} == {
        "swa-5": "blocks", "full": "causal", "gdn": "chunks",
    }  # fmt: skip


def test_a_decoder_reads_back_from_its_document():
    config = awake("swa-5:3+full gdn+lightning", positions={"full": 0.25, "swa": "nope"}, sinks=2).config
    assert config_from(asdict(config)) == config


def test_positions_by_mixer():
    layers = parse_pattern("swa-4 full gdn lightning", 4, {"full": "nope", "swa": 0.5})
    assert [layer.rope for layer in layers] == [0.5, False, False, True]
    for positions, said in (
        ({"gdn": "rope"}, "'gdn' is no mixer with positions; choose from full, swa, lightning"),
        ({"full": 1.5}, "full turns 1.5 of each head; give a share between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_pattern("full", 1, positions)
    with pytest.raises(ValueError, match=r"head_dim: 8 of which 0.4 turn makes RoPE turn 3 numbers"):
        awake("full", positions={"full": 0.4})


def test_partial_rope_turns_the_first_numbers_of_a_head():
    """int(p·d) of them, at frequencies of that width, in pairs half of it apart; as complex numbers here."""
    model = awake("full", positions={"full": 0.5})
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    angles = model.angles(9, x.device)
    assert list(angles) == [4]
    mixer = model.blocks[0].mixer
    query, _ = mixer.queries_and_keys(x, angles)
    plain = mixer.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
    turn = torch.polar(torch.ones(()), torch.arange(9.0)[:, None] * 1e4 ** (-torch.tensor([0, 2]) / 4))
    turned = torch.complex(plain[..., :2], plain[..., 2:4]) * turn
    expected = torch.cat([turned.real, turned.imag, plain[..., 4:]], -1)
    assert torch.allclose(query, expected, atol=1e-6)
    assert not torch.allclose(query, plain, atol=1e-2)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (6, 0), (6, 1), (6, 5), (40, 7), (33, 50)])
def test_learned_sinks_take_their_share(window, sinks):
    """A layer's own attention against a softmax with one score more, with gradients."""
    layer = Layer("full") if window is None else Layer("swa", window, sinks=sinks)
    model = build(ModelConfig(23, 70, 32, 4, 2, 8, 48, (layer,), qk_norm=1.5, sink_logit=True), 0).double()
    mixer, x = model.blocks[0].mixer, torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        mixer.sink_logit.copy_(torch.tensor([-1.0, 0.0, 2.0, 5.0]))
        torch.nn.init.normal_(mixer.output.weight)
    angles = model.angles(70, x.device)
    query, key = mixer.queries_and_keys(x, angles)
    value = mixer.value(x).unflatten(-1, (2, 8)).transpose(1, 2)
    slow = mixer.output(
        reference_attention(query, key, value, window, sinks, mixer.sink_logit).transpose(1, 2).flatten(2)
    )
    fast = mixer(x, angles)
    assert torch.allclose(fast, slow, atol=1e-10)
    wanted = [x, mixer.sink_logit, mixer.query.weight, mixer.value.weight]
    upstream = torch.randn_like(slow)
    for ours, theirs in zip(
        torch.autograd.grad(fast, wanted, upstream), torch.autograd.grad(slow, wanted, upstream), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-9)
    rows = attention_rows(model, tokens(70), torch.arange(70))[0]
    taken = 1 - rows.sum(-1)
    assert (taken > 0).all() and taken[:, 3].mean() > taken[:, 0].mean()


def test_a_sink_score_of_minus_infinity_changes_nothing():
    model = awake("swa-5 full", sink_logit=True)
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.sink_logit.fill_(-1e9)
    plain = awake("swa-5 full")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "sink" not in k})
    assert torch.allclose(model(tokens()), plain(tokens()), atol=1e-10)


@pytest.mark.parametrize(("length", "window", "sinks"), [(9, 3, 2), (9, 3, 20), (9, 9, 4), (9, 12, 4), (9, 1, 8)])
def test_sinks_are_counted(length, window, sinks):
    seen = [min(t + 1, window) + min(sinks, max(0, t + 1 - window)) for t in range(length)]
    assert visible_tokens(Layer("swa", window, sinks=sinks), length) == pytest.approx(sum(seen) / length)
    config = ModelConfig(23, 32, 32, 4, 4, 8, 48, (Layer("swa", window, sinks=sinks),))
    state = build(config, 0).prefill(tokens(length))[1]
    assert sum(kept[0].numel() for kept in state.layers[0].values()) == cost.decoding_state(config, length)


def test_logits_are_scaled_and_capped():
    plain = awake("full")
    hidden = torch.randn(3, 32, dtype=torch.float64)
    logits = plain.logits(hidden)
    for changes, expected in (
        ({"logit_scale": 0.25}, logits / 4),
        ({"logit_softcap": 3.0}, 3 * torch.tanh(logits / 3)),
        ({"logit_scale": 2.0, "logit_softcap": 3.0}, 3 * torch.tanh(2 * logits / 3)),
    ):
        model = LanguageModel(replace(plain.config, **changes)).double()
        model.load_state_dict(plain.state_dict())
        assert torch.allclose(model.logits(hidden), expected, atol=1e-12)
        loss = model.loss(tokens()[:, :-1], tokens()[:, 1:])
        reached = model(tokens()[:, :-1])
        assert loss.item() == pytest.approx(
            torch.nn.functional.cross_entropy(reached.flatten(0, 1), tokens()[:, 1:].flatten()).item()
        )
