"""How fast the mixers are on this CPU: `python -m experiments.bench_mixers`.

Forward and backward passes, one of each form in turn on one thread, in processor time, so that whatever else the
machine does falls on all. Window attention runs against the masked full product, the chunked recurrences against the
PyTorch paths of `transformers`; where that is not installed, they are skipped. Exits 1 where a ratio is below its bar.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from model.kernels import attend
from model.mixers.gated_deltanet import chunked_gated_delta_rule, l2_norm
from model.mixers.mamba2 import chunked_state_space

Form = Callable[..., Tensor]
WINDOW = 128
LONGER = 2.4  # how many times as long twice the tokens may take to count as linear


@dataclass(frozen=True)
class Case:
    """Two forms of one computation on the same inputs: how many times as long as ours theirs takes, at least."""

    name: str
    ours: Form
    theirs: Form
    inputs: list[Tensor]
    bar: float


def window_case(tokens: int = 4096) -> Case:
    """6 heads of 64."""
    q, k, v = (torch.randn(1, 6, tokens, 64) for _ in range(3))
    return Case(f"window attention, T={tokens}, w={WINDOW}: masked full product", windowed, masked, [q, k, v], 12)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, WINDOW, kernel="blocks")


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, WINDOW, kernel="masked")


def recurrent_cases(tokens: int = 2048) -> list[Case]:
    """Gated DeltaNet with 4 heads of 64, Mamba-2 with 8 heads of 64 and a state of 128; none without transformers."""
    try:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError as error:
        print(f"recurrent mixers against transformers: skipped, {error}")
        return []

    def delta(q: Tensor, *rest: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(q * 8, *rest)[0]  # it scales by 1/8 itself

    def scan(x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
        return mamba2_chunk_scan(x, dt, rate, b[:, :, None], c[:, :, None], chunk_size=256, D=skip)

    q, k, v = (torch.randn(1, tokens, 4, 64) for _ in range(3))
    gates = [-0.2 * torch.rand(1, tokens, 4), torch.rand(1, tokens, 4)]
    x, b, c = torch.randn(1, tokens, 8, 64), torch.randn(1, tokens, 128), torch.randn(1, tokens, 128)
    dt, rate = F.softplus(torch.randn(1, tokens, 8) - 4), -torch.linspace(1, 16, 8)
    ssm = [x, dt, rate, b, c, torch.ones(8)]
    heads = [q, l2_norm(k), v, *gates]
    return [
        Case(f"Gated DeltaNet, T={tokens}: transformers", first(chunked_gated_delta_rule), delta, heads, 1.5),
        Case(f"Mamba-2, T={tokens}: transformers", first(chunked_state_space), scan, ssm, 1.5),
    ]


def first(rule: Callable[..., Any]) -> Form:
    """The outputs of a rule without its final state."""
    return lambda *inputs: rule(*inputs)[0]


def spent(form: Form, inputs: list[Tensor], upstream: Tensor) -> tuple[float, Tensor]:
    """Processor seconds of a forward and backward pass, and the outputs."""
    began = time.process_time()
    out = form(*inputs)
    torch.autograd.grad(out, inputs, upstream)
    return time.process_time() - began, out.detach()


def compare(case: Case, rounds: int) -> bool:
    """Prints the medians and the median ratio of a round; whether it meets the bar."""
    inputs = [value.detach().requires_grad_() for value in case.inputs]
    upstream = torch.randn(case.ours(*inputs).shape)
    times = []
    for _ in range(rounds + 1):
        (ours, out), (theirs, other) = (spent(form, inputs, upstream) for form in (case.ours, case.theirs))
        times.append((ours, theirs))
    ratio = statistics.median(theirs / ours for ours, theirs in times[1:])
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*times[1:], strict=True))
    apart = (out - other).abs().max().item()
    print(f"{case.name} {theirs:.1f} ms, ours {ours:.1f} ms, ratio {ratio:.2f} (bar {case.bar:g}), {apart:.0e} apart")
    return ratio >= case.bar


def linear_in_length(rounds: int) -> bool:
    """Whether window attention over twice the tokens takes twice as long."""
    cases = [window_case(tokens) for tokens in (2048, 4096, 8192)]
    inputs = [[value.requires_grad_() for value in case.inputs] for case in cases]
    upstream = [torch.randn(values[0].shape) for values in inputs]
    times = [[spent(windowed, x, up)[0] for x, up in zip(inputs, upstream, strict=True)] for _ in range(rounds + 1)]
    growth = [statistics.median(row[i + 1] / row[i] for row in times[1:]) for i in (0, 1)]
    print(f"window attention, T=2048, 4096, 8192: each {growth[0]:.2f} and {growth[1]:.2f} times the one before")
    return max(growth) <= LONGER


def main(rounds: Annotated[int, typer.Option(help="passes of each form, in turn")] = 5) -> None:
    """Each form's median time, and how many times as long as ours the other takes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    met = [compare(case, rounds) for case in (window_case(), *recurrent_cases())]
    sys.exit(0 if all([*met, linear_in_length(rounds)]) else 1)


if __name__ == "__main__":
    typer.run(main)
