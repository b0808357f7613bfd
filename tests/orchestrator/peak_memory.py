"""The peak of resident memory over two real training steps: `python peak_memory.py NAME`; prints measured, predicted.

In a process of its own: what a process held before counts in its peak. NAME: of SETTINGS.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch

from model import cost
from model.config import ModelConfig
from model.lm import build
from model.mixers.table import parse_pattern
from orchestrator.recipe import Recipe
from orchestrator.training.engine import Engine, start_process_group


def decoder(vocabulary: int, context: int, width: int, layers: int) -> ModelConfig:
    heads = max(2, width // 64)
    pattern = parse_pattern("swa-16 full", layers, "rope")
    return ModelConfig(vocabulary, context, width, heads, heads // 2, width // heads, width * 5 // 2, pattern)


SETTINGS = {  # model, sequences at once, optimizer, precision
    "states": (decoder(8192, 64, 512, 8), 2, "muon", "float32"),
    "activations": (decoder(512, 512, 128, 6), 16, "adamw", "float32"),
    "bfloat16": (decoder(512, 512, 128, 6), 16, "adamw", "bfloat16"),
}


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def steps(config: ModelConfig, sequences: int, optimizer: Any, precision: Any) -> None:
    recipe = Recipe(learning_rate=0.01, optimizer=optimizer, precision=precision, batch_size=sequences)
    engine = Engine(build(config, 0), recipe)
    for seed in range(2):  # the optimizer's state is made by the first
        draw = np.random.default_rng(seed)
        engine.step(draw.integers(0, config.vocab_size, (sequences, config.context + 1)), 1.0)
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_process_group(rank=0, world=1, port=0)
    model, at_once, stepper, precision = SETTINGS[sys.argv[1]]
    steps(decoder(64, 64, 64, 2), 2, stepper, precision)  # what libraries take at first use is not the model's
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    steps(model, at_once, stepper, precision)
    print(resident("VmHWM") - before, cost.memory(model, stepper, at_once, precision=precision, cpu=True).total)
