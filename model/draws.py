"""First values of parameters: each rule draws float32 values for a parameter's shape from a generator of its own."""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Draw = Callable[[Tensor, Generator], Tensor]


def constant(value: float) -> Draw:
    return lambda parameter, _: torch.full(parameter.shape, value)


def normal(deviation: float) -> Draw:
    return lambda parameter, generator: torch.randn(parameter.shape, generator=generator).mul_(deviation)


def matrix(parameter: Tensor, generator: Generator) -> Tensor:
    """Normal with variance 1 over the number of inputs."""
    return torch.randn(parameter.shape, generator=generator).mul_(1 / math.sqrt(parameter.shape[-1]))


def uniform(low: float, high: float) -> Draw:
    """Uniform on (low, high]: never `low` itself, whose logarithm may be asked for."""
    return lambda parameter, generator: high - (high - low) * torch.rand(parameter.shape, generator=generator)


def log_uniform_rate(low: float, high: float) -> Draw:
    """log A, A uniform on (low, high]: the decay rates of state-space layers."""
    draw = uniform(low, high)
    return lambda parameter, generator: draw(parameter, generator).log_()


def taps(parameter: Tensor, generator: Generator) -> Tensor:
    """Uniform within 1/sqrt(taps), as torch.nn.Conv1d starts a depthwise convolution, [C, 1, taps]."""
    bound = parameter.shape[-1] ** -0.5
    return uniform(-bound, bound)(parameter, generator)


def step_bias(parameter: Tensor, generator: Generator) -> Tensor:
    """Inverse softplus of dt, dt log-uniform in [1e-3, 1e-1]: what Mamba-2 and Gated DeltaNet start from."""
    low, high = math.log(1e-3), math.log(1e-1)
    return inverse_softplus(torch.rand(parameter.shape, generator=generator).mul_(high - low).add_(low).exp_())


def inverse_softplus(dt: Tensor) -> Tensor:
    """dt + ln(-expm1(-dt)), with dt at least 1e-4."""
    dt = dt.clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))
