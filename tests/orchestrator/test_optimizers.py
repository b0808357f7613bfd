"""Each parameter is stepped by its own optimizer, by the step PyTorch would make, at every ZeRO stage."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.muon import original_muon
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gang import MODEL, Counting

from model.groups import matrices, others
from model.lm import LanguageModel, build
from orchestrator.errors import InputError
from orchestrator.recipe import Recipe, check_recipe
from orchestrator.training import optimizers
from orchestrator.training.engine import Engine, end_process_group, start_process_group
from orchestrator.training.optimizers import BatchedMuon, MuonAdamW, MuonWatch, parameter_groups, set_rates

RECIPE = Recipe(learning_rate=0.02, batch_size=4, weight_decay=0.1)


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    torch.set_num_threads(1)
    start_process_group(rank=0, world=1, port=0)
    yield
    end_process_group()


def trained() -> LanguageModel:
    """A model in which no matrix is zero, so that every gradient is well above rounding."""
    model = build(MODEL, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for _, matrix in matrices(model):
            matrix.copy_(torch.randn_like(matrix) / matrix.shape[1] ** 0.5)
    return model


def batch(step: int) -> np.ndarray:
    return Counting().batch(0, step, range(4))


def steps_of_pytorch(model: LanguageModel, steps: int, factor: float = 1.0) -> list[float]:
    muon = torch.optim.Muon(
        [matrix for _, matrix in matrices(model)], lr=0.02 * factor, momentum=0.95, weight_decay=0.1
    )
    adamw = torch.optim.AdamW(
        [parameter for _, parameter in others(model)], lr=5e-3 * factor, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(steps):
        tokens = torch.from_numpy(batch(step))
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_every_parameter_is_in_one_group() -> None:
    model = build(MODEL, 0)
    muon, rest = parameter_groups(model, RECIPE)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(names[id(p)] for p in muon["params"] + rest["params"]) == sorted(names.values())
    assert {names[id(p)].split(".")[-2] for p in muon["params"]} == {"query", "key", "value", "output", "up", "down"}
    assert (muon["use_muon"], muon["lr"], muon["weight_decay"]) == (True, 0.02, 0.1)
    assert (rest["use_muon"], rest["lr"], rest["weight_decay"]) == (False, 5e-3, 0.0)
    adamw = parameter_groups(model, RECIPE.model_copy(update={"optimizer": "adamw"}))
    assert [(group["use_muon"], group["lr"]) for group in adamw] == [(False, 0.02), (False, 0.02)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_step_is_pytorchs_step(stage: int) -> None:
    ours, theirs = trained(), trained()
    before = weights(ours)
    engine = Engine(ours, RECIPE, zero_stage=stage)
    loss = engine.step(batch(0), 0.5)
    engine.close()
    assert loss == pytest.approx(steps_of_pytorch(theirs, 1, 0.5)[0], abs=1e-6)
    wanted = weights(theirs)
    for name, matrix in matrices(ours):
        step, want = matrix.detach() - 0.999 * before[name], wanted[name] - 0.999 * before[name]
        # All iterate in bfloat16, in other orders of operations: up to some percent apart.
        assert (step - want).norm() / want.norm() < (0.02 if stage == 0 else 0.05), name
        values = torch.linalg.svdvals(step)
        assert values[0] / values[-2] < 2.0, name  # five iterations do not lift the very smallest
        rows, columns = matrix.shape
        assert values.mean().item() == pytest.approx(0.01 * max(1.0, rows / columns) ** 0.5, rel=0.25), name
    for name, parameter in others(ours):
        torch.testing.assert_close(parameter.detach(), wanted[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_muon_that_does_not_orthogonalise_stops_the_job(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """The faults of DeepSpeed releases: SGD in Muon's place, and an update scaled down like a gradient."""

    def plain(gradient: Tensor, *_: object, **__: object) -> Tensor:
        return gradient

    module = optimizers if stage == 0 else original_muon
    name = "orthogonalise" if stage == 0 else "muon_update"
    right = getattr(module, name)
    for wrong in (plain, lambda *args, **settings: right(*args, **settings) / 12.3):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            engine = Engine(build(MODEL, 0), RECIPE, zero_stage=stage)
            with pytest.raises(RuntimeError, match=r"Muon: the first update of blocks\.\d\.\S+ has spectral norm"):
                engine.step(batch(0), 1.0)
            engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_muon_is_watched_until_it_steps(stage: int) -> None:
    engine = Engine(build(MODEL, 0), RECIPE, zero_stage=stage)
    assert engine._watch is not None
    engine.step(batch(0), 0.1)
    assert engine._watch is None
    engine.close()


def test_a_matrix_that_does_not_move_is_watched_on() -> None:
    model = trained()
    watch = MuonWatch(model, RECIPE)
    with torch.no_grad():
        for _, matrix in matrices(model):
            matrix.mul_(1 - 0.5 * 0.02 * 0.1)  # weight decay alone
        assert not watch.is_convinced(0.5)
        for _, matrix in matrices(model):
            matrix.sub_(
                0.02
                * torch.nn.init.orthogonal_(torch.empty_like(matrix))
                * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
            )
            matrix.sub_(0.02 * 0.1 * matrix)
        assert watch.is_convinced(1.0)


def test_bfloat16_keeps_float32_weights() -> None:
    """A step far below bfloat16's spacing of a weight still moves it, and is not lost by rounding."""
    recipe = Recipe(optimizer="adamw", learning_rate=1e-6, batch_size=4, precision="bfloat16")
    for stage in (0, 1, 2):
        model = trained()
        before = weights(model)
        engine = Engine(model, recipe, zero_stage=stage)
        for step in range(3):
            engine.step(batch(step), 1.0)
        moments = _moments(engine.optimizer_state()) if stage == 0 else []
        engine.close()
        assert all(moment.dtype == torch.float32 for moment in moments)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32
            moved = (parameter.detach() - before[name]).abs()
            assert 1e-7 < moved.max() < 4e-6, name


@pytest.mark.parametrize("stack", [1, 700, 2**24])
def test_matrices_stepped_together_are_stepped_alone(monkeypatch: pytest.MonkeyPatch, stack: int) -> None:
    monkeypatch.setattr(optimizers, "STACK_ELEMENTS", stack)
    shapes = [(16, 16), (40, 16), (16, 16), (16, 40), (40, 16), (16, 16)]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in ours]
    before = [matrix.detach().clone() for matrix in ours]
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    together, alone = BatchedMuon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        together.step()
        alone.step()
    for a, b, start in zip(ours, theirs, before, strict=True):
        assert (a - b).norm() / (b - start).norm() < 0.01


def test_momentum_and_rates_follow_pytorch_over_steps() -> None:
    ours, theirs = trained(), trained()
    engine = Engine(ours, RECIPE)
    losses = [engine.step(batch(step), 1.0) for step in range(5)]
    engine.close()
    assert losses == pytest.approx(steps_of_pytorch(theirs, 5), abs=5e-4)  # bfloat16 rounding, carried on


def test_a_clip_that_would_clip_muons_update_is_refused() -> None:
    clipped = RECIPE.model_copy(update={"clip": 1.0})
    with pytest.raises(InputError, match=r"recipe\.clip: 1\.0 with Muon at ZeRO stage 1"):
        check_recipe(clipped, 1)
    with pytest.raises(InputError, match="zero_stage to 0"):
        Engine(build(MODEL, 0), clipped, zero_stage=2)
    check_recipe(clipped, 0)
    check_recipe(clipped.model_copy(update={"optimizer": "adamw"}), 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_clip_bounds_the_gradient(stage: int) -> None:
    """AdamW's first moment after one step is a tenth of the clipped gradient, whose norm is the clip."""
    recipe = Recipe(optimizer="adamw", learning_rate=1e-3, batch_size=4, clip=0.01)
    engine = Engine(trained(), recipe, zero_stage=stage)
    engine.step(batch(0), 1.0)
    moments = _moments(engine.optimizer_state())
    engine.close()
    norm = torch.stack([moment.norm() for moment in moments]).norm().item()
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-3)


def _moments(state: dict) -> list[Tensor]:
    parts = state.get("parts", [state])
    return [entry["exp_avg"] for part in parts for entry in part["state"].values()]


def test_a_gradient_of_other_strides_is_stepped_right() -> None:
    model, plain = trained(), trained()
    composite = MuonAdamW(parameter_groups(model, RECIPE))
    adamw = torch.optim.AdamW([plain.head.weight], lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    gradient = torch.randn(16, 32).T
    assert not gradient.is_contiguous()
    model.head.weight.grad = gradient
    plain.head.weight.grad = gradient.contiguous()
    composite.step()
    adamw.step()
    torch.testing.assert_close(model.head.weight, plain.head.weight)


def test_rates_reach_both_optimizers_after_loading() -> None:
    optimizer = MuonAdamW(parameter_groups(trained(), RECIPE))
    optimizer.load_state_dict(optimizer.state_dict())
    set_rates(optimizer, 0.5)
    assert sorted(group["lr"] for part in optimizer._parts for group in part.param_groups) == [2.5e-3, 0.01]
