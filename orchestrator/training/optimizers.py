"""Which optimizer steps which parameter, at which rate."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from model.cost import STACK_ELEMENTS
from model.groups import matrices, others
from model.lm import LanguageModel
from orchestrator.recipe import Recipe

Group = dict[str, Any]


def parameter_groups(model: LanguageModel, recipe: Recipe) -> list[Group]:
    """Two groups, matrices inside layers and the rest, each with `use_muon` and its peak rate in `peak` and `lr`.

    Weight decay acts on the matrices inside layers alone: not on embeddings, head, gains or key shifts. Raises
    AssertionError unless every parameter is in exactly one group and Muon's are all two-dimensional.
    """
    inside = [parameter for _, parameter in matrices(model)]
    rest = [parameter for _, parameter in others(model)]
    placed = [id(parameter) for parameter in inside + rest]
    assert len(set(placed)) == len(placed), "a parameter is in two groups"
    assert set(placed) == {id(parameter) for parameter in model.parameters()}, "a parameter is in no group"
    muon = recipe.optimizer == "muon"
    assert not muon or all(parameter.ndim == 2 for parameter in inside), "Muon steps matrices alone"
    rest_peak = recipe.adam_learning_rate if muon else recipe.learning_rate
    groups: list[Group] = [
        {"params": inside, "use_muon": muon, "peak": recipe.learning_rate, "weight_decay": recipe.weight_decay},
        {"params": rest, "use_muon": False, "peak": rest_peak, "weight_decay": 0.0},
    ]
    for group in groups:
        group["lr"] = group["peak"]
        group |= {"momentum": recipe.momentum} if group["use_muon"] else {"betas": recipe.betas, "eps": recipe.eps}
    return groups


def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Sets every group's learning rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["peak"]


class BatchedMuon(Muon):
    """torch.optim.Muon with matrices of one shape orthogonalised together, the same to bfloat16 rounding.

    Small matrices one at a time spend most of Muon's step around the products; together they take a third of the time.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                together = max(1, STACK_ELEMENTS // shape.numel())
                for start in range(0, len(parameters), together):
                    self._step_alike(parameters[start : start + together], group)

    def _step_alike(self, parameters: list[Tensor], group: Group) -> None:
        rows, columns = parameters[0].shape
        rate, momentum = group["lr"], group["momentum"]
        updates = []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(state["momentum_buffer"], momentum))
        steps_NRC = orthogonalise(torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"])
        for parameter, step_RC in zip(parameters, steps_NRC.unbind(), strict=True):
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(step_RC, alpha=-rate * math.sqrt(max(1, rows / columns)))


def orthogonalise(x_NRC: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float) -> Tensor:
    """Newton-Schulz iteration on N matrices of R rows and C columns, in bfloat16: singular values to about 1.

    As in Keller Jordan's Muon and torch.optim.Muon: on shapes of use mostly bit for bit.
    """
    a, b, c = coefficients
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC.bfloat16()
    x = x.mT if tall else x
    # One by one: a batched norm adds in another order, and its last bit can differ from torch.optim.Muon's.
    norms_N = torch.stack([matrix.norm() for matrix in x.unbind()])
    x = x / norms_N.clamp(min=eps)[:, None, None]
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MuonWatch:
    """Whether Muon's first update really was orthogonalised, whoever made it.

    DeepSpeed releases have run plain SGD in Muon's place, or scaled its update down, without a word. Watched is one
    matrix: the smallest of those that are all zero, which alone have gradients in the first step, or of all.
    """

    def __init__(self, model: LanguageModel, recipe: Recipe) -> None:
        named = matrices(model)
        silent = [(name, matrix) for name, matrix in named if not matrix.any()]
        self._name, self._matrix = min(silent or named, key=lambda item: item[1].numel())
        self._before = self._matrix.detach().clone()
        self._rate, self._decay = recipe.learning_rate, recipe.weight_decay

    @torch.no_grad()
    def is_convinced(self, factor: float) -> bool:
        """Called after a step at `factor` of the peak rates: False where it did not move the matrix.

        Raises RuntimeError where it moved by anything but rate times a matrix of spectral norm about 1.
        """
        rate = factor * self._rate
        update = self._before * (1 - rate * self._decay) - self._matrix
        rows, columns = update.shape
        norm = torch.linalg.matrix_norm(update.float(), 2).item() / (rate * math.sqrt(max(1, rows / columns)))
        if norm == 0:
            self._before.copy_(self._matrix)
            return False
        # Five iterations bring singular values to between 0.7 and 1.2.
        if not 0.5 < norm < 1.5:
            raise RuntimeError(
                f"Muon: the first update of {self._name} has spectral norm {norm:.3g} where an orthogonalised one has "
                f"about 1; use the DeepSpeed of constraints.txt or zero_stage 0"
            )
        return True


class MuonAdamW(Optimizer):
    """Muon on the matrices and AdamW on the rest, as the one optimizer DeepSpeed takes."""

    def __init__(self, groups: list[Group]) -> None:
        muon = [group for group in groups if group["use_muon"]]
        adamw = [group for group in groups if not group["use_muon"]]
        self._parts: list[Optimizer] = [AdamW(adamw, fused=True)]
        if muon:
            self._parts.append(BatchedMuon(muon))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self._parts[0].param_groups:
            for parameter in group["params"]:
                # The fused CPU kernel walks the gradient as if it were contiguous, whatever its strides.
                if parameter.grad is not None and not parameter.grad.is_contiguous():
                    parameter.grad = parameter.grad.contiguous()
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # Loading replaces a part's groups by new dicts; rates set here must reach the parts.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
