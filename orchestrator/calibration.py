"""A few real training steps of each model of a plan, timed. Imports torch and DeepSpeed; planning alone does not."""

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch

from model import cost, kernels
from model.config import ModelConfig
from model.lm import LanguageModel, build
from orchestrator import identity, throughput
from orchestrator.cells import Cell
from orchestrator.errors import InputError
from orchestrator.study import Study
from orchestrator.throughput import Speed

WARM_UP = 2
STEPS_S = 2.0  # of timed steps a model
MOST_STEPS = 50
# A step above this takes minutes: half a minute a step on a core of a CPU, or on a GPU.
MOST_FLOPS = {"cpu": 6e11, "cuda": 1e16}


def distinct(study: Study, cells: Iterable[Cell]) -> list[Cell]:
    """One cell of each setting that has a speed of its own, in order."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(throughput.key(study, cell), cell)
    return list(first.values())


def too_large(study: Study, cell: Cell, device: str) -> bool:
    """Whether one step of a worker would take too long to time here."""
    tokens = cell.tokens_per_step // study.machine.workers_of(cell.size)
    return cost.training_flops(cell.model, tokens, study.machine.recompute) > MOST_FLOPS[torch.device(device).type]


def measure(study: Study, cell: Cell, device: str, name: str) -> Speed:
    """The speed of one worker on a cell's training, warm-up left out, and the seconds of each measure.

    device: "cpu" or "cuda"; name: what the table calls it. Raises InputError where a step or a measure fails.
    """
    from orchestrator.training.engine import Engine

    machine, data = study.machine, study.data[cell.data]
    share = study.recipe.batch_size // machine.workers_of(cell.size)
    recipe = study.recipe.model_copy(update={"batch_size": share})
    with _alone(machine.threads):
        try:
            model = build(cell.model, cell.seed, device)
            engine = Engine(
                model,
                recipe,
                zero_stage=machine.zero_stage,
                micro_batch=machine.micro_batch,
                recompute=machine.recompute,
                device=device,
            )
            steps: list[float] = []
            while len(steps) < WARM_UP + MOST_STEPS and (len(steps) <= WARM_UP or sum(steps[WARM_UP:]) < STEPS_S):
                began = time.perf_counter()
                engine.agree(engine.step(data.batch(cell.seed, len(steps), engine.rows), 1.0), False, False)
                steps.append(time.perf_counter() - began)
            engine.close()
            seconds = _time_measures(study, model, data)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            raise InputError(f"--calibrate: {cell.arm} {cell.size}: {type(error).__name__}: {reason}") from error
    timed = steps[WARM_UP:]
    return Speed(
        key=throughput.key(study, cell),
        params=cell.params,
        device=name,
        threads=machine.threads,
        tokens_per_second=share * data.context / statistics.median(timed),
        steps=len(timed),
        measure_seconds=seconds,
        kernels=_kernels(cell.model, recipe.precision, device),
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _time_measures(study: Study, model: LanguageModel, data: Any) -> dict[str, float]:
    """The second call of each: the first also draws the held-out text."""
    model.eval()
    seconds = {}
    with torch.no_grad():
        for one in study.measures:
            one(model, data)
            began = time.perf_counter()
            one(model, data)
            seconds[identity.of_measure(one)] = time.perf_counter() - began
    return seconds


@contextmanager
def _alone(threads: int) -> Iterator[None]:
    """This process as a gang of one, with a worker's settings."""
    from orchestrator.training.engine import end_process_group, start_process_group

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    start_process_group(rank=0, world=1, port=0)
    try:
        yield
    finally:
        end_process_group()
        torch.set_num_threads(before)


def _kernels(config: ModelConfig, precision: str, device: str) -> list[str]:
    """The kernels that a training step of a decoder uses, each once."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return list(dict.fromkeys(name for name, _ in kernels.chosen(config, torch.device(device).type, dtype).values()))
