"""How fast the recurrent mixers are on this CPU: `python -m experiments.bench_mixers`.

Forward and backward passes of the fast forms against what they stand for, and against the PyTorch paths of
`transformers` where that is installed, run in turn on one thread so that whatever else the machine does falls on all.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from model.mixers.chunks import chunked_linear_attention
from model.mixers.gated_deltanet import chunked_gated_delta_rule, l2_norm, reference_gated_delta_rule
from model.mixers.lightning import reference_linear_attention
from model.mixers.mamba2 import chunked_state_space, reference_state_space

Rule = Callable[..., Any]
Case = tuple[str, dict[str, Rule], list[Tensor]]


def cases(tokens: int) -> list[Case]:
    """One sequence each: name, the forms by name, their inputs."""
    torch.manual_seed(0)
    q, v = torch.randn(1, tokens, 4, 64), torch.randn(1, tokens, 4, 64)
    k, beta = l2_norm(torch.randn(1, tokens, 4, 64)), torch.rand(1, tokens, 4)
    g = -0.2 * torch.rand(1, tokens, 4)
    x, b, c = torch.randn(1, tokens, 8, 64), torch.randn(1, tokens, 128), torch.randn(1, tokens, 128)
    dt, rate = F.softplus(torch.randn(1, tokens, 8) - 4), -torch.linspace(1, 16, 8)
    delta: dict[str, Rule] = {"chunked": chunked_gated_delta_rule, "reference": reference_gated_delta_rule}
    scan: dict[str, Rule] = {"chunked": chunked_state_space, "reference": reference_state_space}
    linear: dict[str, Rule] = {
        "chunked": lambda q, k, v, g: chunked_linear_attention(q, k, v, g, 64),
        "reference": reference_linear_attention,
    }
    try:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError as error:
        print(f"transformers: skipped, {error}")
    else:

        def whole_scan(x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> tuple[Tensor]:
            return (mamba2_chunk_scan(x, dt, rate, b[:, :, None], c[:, :, None], chunk_size=256, D=skip),)

        delta["transformers"] = lambda q, *rest: torch_chunk_gated_delta_rule(q * 8, *rest)  # it scales by 1/8 itself
        scan["transformers"] = whole_scan
    return [
        ("gated delta rule, 4 heads of 64", delta, [q, k, v, g, beta]),
        ("state space, 8 heads of 64, state 128", scan, [x, dt, rate, b, c, torch.ones(8)]),
        ("linear attention, 4 heads of 64", linear, [q, k, v, g]),
    ]


def main(
    tokens: Annotated[int, typer.Option(help="of one sequence")] = 2048,
    rounds: Annotated[int, typer.Option(help="passes of each, in turn")] = 9,
) -> None:
    """Median processor time of a forward and backward pass, and how many times as long as chunked."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for name, forms, values in cases(tokens):
        inputs = [value.detach().requires_grad_() for value in values]
        upstream = torch.randn(forms["chunked"](*inputs)[0].shape)
        spent: dict[str, list[float]] = {form: [] for form in forms}
        outputs = {}
        for _ in range(rounds + 1):
            for form, rule in forms.items():
                began = time.process_time()
                outputs[form] = rule(*inputs)[0]
                torch.autograd.grad(outputs[form], inputs, upstream)
                spent[form].append(time.process_time() - began)
        median = {form: statistics.median(seconds[1:]) for form, seconds in spent.items()}
        print(f"{name}, {tokens} tokens")
        for form, seconds in median.items():
            apart = (outputs[form] - outputs["chunked"]).abs().max().item()
            print(
                f"  {form:12} {1e3 * seconds:8.1f} ms, {seconds / median['chunked']:5.2f} times chunked, "
                f"outputs apart by {apart:.0e}"
            )


if __name__ == "__main__":
    typer.run(main)
