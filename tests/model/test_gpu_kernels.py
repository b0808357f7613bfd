"""On an NVIDIA GPU: each kernel that can run there equals the reference, and whole models equal themselves on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from model.config import ModelConfig
from model.kernels import KERNELS, Setting, attend, fla_gated_delta_rule, fla_linear_attention, fla_takes
from model.lm import build
from model.mixers.attention import reference_attention
from model.mixers.gated_deltanet import reference_gated_delta_rule
from model.mixers.table import MIXERS, parse_pattern

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# bfloat16 keeps 8 bits: outputs of unit variance are within some 1e-2, gradients that sum over tokens a little more.
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 4e-2}


def inputs(length: int, heads: int, groups: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, n, width) for n in (heads, groups, groups)]
    drawn = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in drawn]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("length", "window", "sinks"), [(257, None, 0), (257, 31, 0), (257, 31, 4), (1024, 128, 0)])
def test_a_kernel_equals_the_reference_with_gradients(
    kernel: str, dtype: torch.dtype, length: int, window: int | None, sinks: int
) -> None:
    reason = KERNELS[kernel].refusal(Setting("cuda", dtype, 64, window, sinks))
    if reason:
        pytest.skip(f"{kernel}: {reason}")
    ours = inputs(length, 6, 2, 64, dtype)
    wide = [x.detach().double().requires_grad_() for x in ours]
    fast, slow = attend(*ours, window, sinks, kernel), reference_attention(*wide, window, sinks)
    upstream = torch.randn(fast.shape, generator=torch.Generator().manual_seed(1)).to("cuda")
    pairs = [(fast, slow)]
    pairs += zip(
        torch.autograd.grad(fast, ours, upstream.to(dtype)),
        torch.autograd.grad(slow, wide, upstream.double()),
        strict=True,
    )
    for mine, theirs in pairs:
        assert (mine.double() - theirs).norm() / theirs.norm() < TOLERANCES[dtype]


@pytest.mark.parametrize("word", [f"{name}-16" if mixer.windowed else name for name, mixer in MIXERS.items()])
def test_a_model_gives_on_the_gpu_what_it_gives_on_the_cpu(word: str) -> None:
    layers = parse_pattern(f"{word} full", 2, "rope", {"mamba2": {"head_dim": 16, "d_state": 16}})
    model = build(ModelConfig(97, 128, 64, 4, 2, 16, 96, layers), 0)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    tokens = torch.randint(0, 97, (2, 128), generator=torch.Generator().manual_seed(0))
    on_cpu = model.loss(tokens, tokens)
    on_cpu.backward()
    there = build(replace(model.config), 0, "cuda")
    there.load_state_dict(model.state_dict())
    on_gpu = there.loss(tokens.cuda(), tokens.cuda())
    on_gpu.backward()
    assert on_gpu.item() == pytest.approx(on_cpu.item(), abs=1e-3)
    for (name, ours), theirs in zip(there.named_parameters(), model.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad.cpu() - theirs.grad).norm() <= 1e-2 * theirs.grad.norm() + 1e-6, name


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_flash_linear_attention_equals_the_recurrences(heads: tuple[int, int]) -> None:
    pytest.importorskip("fla", reason="needs pip install 'gridlaw[cuda]'")
    many, few = heads
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 201, n, 64, generator=generator) for n in (few, few, many)]
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (drawn[0], F.normalize(drawn[1], dim=-1), drawn[2]))
    g = -torch.rand(2, 201, many, generator=generator).cuda()
    beta = torch.rand(2, 201, many, generator=generator).cuda()
    assert fla_takes(k, v)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    pairs = [(fla_linear_attention(*leaves[:4], None), slow_linear_attention(*wide[:4], many // few))]
    if few == many:
        pairs.append((fla_gated_delta_rule(*leaves, None), reference_gated_delta_rule(*wide)))
    for (out, state), (slow_out, slow_state) in pairs:
        ours = torch.autograd.grad(out.float().square().sum(), leaves, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(slow_out.square().sum(), wide, retain_graph=True, allow_unused=True)
        compared = [(out, slow_out), (state, slow_state), *zip(ours, theirs, strict=True)]
        for mine, slow in compared:
            if slow is not None:
                assert (mine.double() - slow).norm() / slow.norm() < TOLERANCES[torch.bfloat16]


def slow_linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule token by token: S ← e^g S + k vᵀ, o = Sᵀ q."""
    q, k = q.repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(outputs, 1), state
