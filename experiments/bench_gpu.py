"""Tokens a second and MFU of the seven arms on one NVIDIA GPU: `python -m experiments.bench_gpu`.

A whole training step at the paper's length (16,384 tokens, bfloat16, Muon) of each arm at sizes S1 and S4. MFU: FLOPs
of `model.cost`, by its one convention, over what the GPU's data sheet gives for dense bfloat16; where the GPU is not in
the table, over the rate of its own largest matrix product, which is lower.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import typer

from model import cost
from model.config import ModelConfig
from model.kernels import chosen
from model.lm import build
from model.mixers.table import parse_pattern
from orchestrator.recipe import Recipe
from orchestrator.study import PAPER_SIZES
from orchestrator.training.engine import Engine, end_process_group, start_process_group

ARMS = ("full", "swa-128", "swa-512", "swa-2048", "lightning", "mamba2", "gdn")
CONTEXT = 16384
VOCABULARY = 65536
# Dense bfloat16 FLOP/s of data sheets, by a part of the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "RTX 4090": 165e12}


def model_of(arm: str, size: str, context: int = CONTEXT) -> ModelConfig:
    """An arm of the paper at equal parameters: its efficient mixer and full attention in turn."""
    shape = PAPER_SIZES[size]
    layers = parse_pattern(arm if arm == "full" else f"{arm} full", shape.n_layers, "rope")
    fields = shape.model_dump(exclude={"name", "n_layers"})
    return cost.matched(ModelConfig(vocab_size=VOCABULARY, context=context, layers=layers, **fields))


def peak_of(device: torch.device) -> tuple[float, str]:
    """(FLOP/s, where the figure is from)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((rate for part, rate in PEAKS.items() if part in name), None)
    if known:
        return known, "data sheet"
    side = 8192 if device.type == "cuda" else 256
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return 2 * side**3 / min(_seconds(lambda: matrix @ matrix, device) for _ in range(5)), "own matrix product"


def measure(config: ModelConfig, device: torch.device, sequences: int, steps: int, recompute: bool) -> dict[str, Any]:
    """Tokens and FLOPs a second of whole training steps, the median after two to warm up; peak memory on a GPU."""
    recipe = Recipe(learning_rate=1e-3, batch_size=sequences, precision="bfloat16")
    engine = Engine(build(config, 0, device), recipe, recompute=recompute, device=device)
    draw = np.random.default_rng(0)
    batch = draw.integers(config.vocab_size, size=(sequences, config.context + 1))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = [_seconds(lambda: engine.step(batch, 1.0), device) for _ in range(steps + 2)][2:]
    engine.close()
    tokens = sequences * config.context
    kernels = chosen(config, device.type, torch.bfloat16)
    return {
        "tokens_per_second": tokens / statistics.median(times),
        # Work that recomputing repeats does not count as useful.
        "flops_per_second": cost.training_flops(config, tokens) / statistics.median(times),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "kernels": {word: name for word, (name, _) in kernels.items()},
    }


def _seconds(work: Any, device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def rows(
    device: torch.device, sizes: list[str], sequences: int, steps: int, recompute: bool, context: int = CONTEXT
) -> Iterator[dict[str, Any]]:
    """One row an arm and size."""
    peak, source = peak_of(device)
    for size in sizes:
        for arm in ARMS:
            told = measure(model_of(arm, size, context), device, sequences, steps, recompute)
            yield {"size": size, "arm": arm, **told, "mfu": told["flops_per_second"] / peak, "peak_from": source}


def main(
    size: Annotated[list[str], typer.Option(help="sizes of the paper")] = ["S1", "S4"],  # noqa: B006
    sequences: Annotated[int, typer.Option(help="sequences a step")] = 1,
    steps: Annotated[int, typer.Option(help="steps timed")] = 10,
    recompute: Annotated[bool, typer.Option(help="run layers again in the backward pass")] = False,
) -> None:
    """Tokens a second and MFU of the seven arms on one GPU; one JSON object a line."""
    if not torch.cuda.is_available():
        print("bench_gpu: no NVIDIA GPU here; run it on a machine that has one", file=sys.stderr)
        sys.exit(2)
    start_process_group(rank=0, world=1, port=0)
    for row in rows(torch.device("cuda"), size, sequences, steps, recompute):
        print(json.dumps(row), flush=True)
    end_process_group()


if __name__ == "__main__":
    typer.run(main)
