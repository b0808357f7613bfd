"""How much the training job costs over a plain PyTorch loop: `python -m experiments.bench_training`.

Two models with the same weights train on the same batches in one process on one thread, one step each in turn,
so that whatever else the machine does falls on both. One goes through the job's own step, batches, learning rates and
divergence checks included; the other is the shortest loop that computes the same. Exits 1 below a ratio of 0.97.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import typer
from torch.profiler import ProfilerActivity, profile, record_function

from model.config import ModelConfig
from model.groups import matrices, others
from model.lm import build
from model.mixers.table import parse_pattern
from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.training.engine import Engine, end_process_group, start_process_group

BAR = 0.97
WARM_UP = 10
MODEL = ModelConfig(
    vocab_size=96,
    context=256,
    d_model=64,
    n_heads=4,
    n_kv_heads=4,
    head_dim=16,
    d_ff=128,
    layers=parse_pattern("swa-8 full", 4, "rope"),
    mlp="relu2",
    norm_gain=False,
    qk_norm=1.5,
    key_shift=True,
)
RECIPE = Recipe(learning_rate=0.02, adam_learning_rate=5e-3, batch_size=8)
DATA = RecallLanguage(context=256, g_min=4)
Step = Callable[[int, int], float]


def job_step() -> tuple[Step, Engine]:
    """One step as the job takes it."""
    engine = Engine(build(MODEL, 0), RECIPE)

    def step(number: int, steps: int) -> float:
        batch = DATA.batch(0, number, engine.rows)
        loss, sound, _, _ = engine.agree(engine.step(batch, RECIPE.rate(number, steps)), False, False)
        assert sound
        return loss

    return step, engine


def plain_step() -> Step:
    """One step with nothing around it: no engine, no micro-batches, no checks."""
    model = build(MODEL, 0)
    muon = torch.optim.Muon([parameter for _, parameter in matrices(model)], momentum=RECIPE.momentum, weight_decay=0.0)
    adamw = torch.optim.AdamW(
        [parameter for _, parameter in others(model)], betas=RECIPE.betas, eps=RECIPE.eps, weight_decay=0.0, fused=True
    )

    def step(number: int, steps: int) -> float:
        factor = RECIPE.rate(number, steps)
        muon.param_groups[0]["lr"] = factor * RECIPE.learning_rate
        adamw.param_groups[0]["lr"] = factor * RECIPE.adam_learning_rate
        batch = torch.from_numpy(DATA.batch(0, number, range(RECIPE.batch_size)))
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def shares(engine: Engine, first: int, steps: int) -> dict[str, float]:
    """Share of the job's step by what the time goes to, from the profiler's own times of operators; sums to 1.

    Data is timed around its call. Muon's products run in bfloat16 inside its step and count as Muon, not as matmul.
    """
    groups = {"data": "data", "optimizer": "Muon and AdamW"}
    times = dict.fromkeys(("data", "Muon and AdamW", "attention", "matmul", "other"), 0.0)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for number in range(first, first + steps):
            with record_function("data"):
                batch = DATA.batch(0, number, engine.rows)
            engine.agree(engine.step(batch, 1.0), False, False)
    for event in recorded.events():
        inside, chain = event, []
        while inside is not None:
            chain.append(inside.name)
            inside = inside.cpu_parent
        group = "other"
        if "data" in chain:
            group = groups["data"]
        elif any(name.startswith("Optimizer.step") for name in chain):
            group = groups["optimizer"]
        elif any("attention" in name.lower() for name in chain):
            group = "attention"
        elif event.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            group = "matmul"
        times[group] += event.self_cpu_time_total
    total = sum(times.values())
    return {name: spent / total for name, spent in times.items()}


def main(steps: Annotated[int, typer.Option(help="steps of each, alternating")] = 200) -> None:
    """The job's training step against a plain PyTorch loop, in tokens a second."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    start_process_group(rank=0, world=1, port=0)
    through_engine, engine = job_step()
    runs: dict[str, Step] = {"job": through_engine, "plain": plain_step()}
    total = WARM_UP + steps
    losses: dict[str, list[float]] = {name: [] for name in runs}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(total):
        for name in runs if number % 2 else reversed(runs):
            wall_began, processor_began = time.perf_counter(), time.process_time()
            losses[name].append(runs[name](number, total))
            wall[name].append(time.perf_counter() - wall_began)
            processor[name].append(time.process_time() - processor_began)
    tokens = RECIPE.batch_size * DATA.context
    for name in runs:
        seconds = statistics.median(wall[name][WARM_UP:])
        print(f"{name:6} {tokens / seconds:7.0f} tokens/s, {1e3 * seconds:.1f} ms a step")
    ratios = {
        clock: statistics.median(spent["plain"][WARM_UP:]) / statistics.median(spent["job"][WARM_UP:])
        for clock, spent in (("wall", wall), ("processor", processor))
    }
    print(f"ratio  {ratios['wall']:.3f} by wall clock, {ratios['processor']:.3f} by processor time (bar {BAR})")
    apart = max(abs(a - b) for a, b in zip(losses["job"], losses["plain"], strict=True))
    print(f"losses apart by at most {apart:.1e}; last {losses['job'][-1]:.4f}")
    for name, share in shares(engine, total, min(steps, 20)).items():
        print(f"{name:15} {share:6.1%}")
    engine.close()
    end_process_group()
    # Processor time leaves out what other processes took; neither loop ever waits.
    sys.exit(ratios["processor"] < BAR)


if __name__ == "__main__":
    typer.run(main)
