"""A few real training steps of each model of a plan, timed. Imports torch and DeepSpeed; planning alone does not."""

import gc
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
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

STEPS_S = 4.0  # of timed steps a model
MOST_STEPS = 100
CALLS_S = 1.0  # of a measure
MOST_CALLS = 10
# A step above this takes minutes: half a minute a step on a core of a CPU, or on a GPU.
MOST_FLOPS = {"cpu": 6e11, "cuda": 1e16}


class _Fault(Exception):
    """What went wrong in another process, in one line."""


@dataclass(frozen=True)
class _Timed:
    """Seconds of one process: from the job to its first step, each step, each measure by identity, a checkpoint."""

    start: float
    steps: list[float]
    measures: dict[str, float]
    commit: float


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


def measure(study: Study, cell: Cell, device: str, name: str, root: Path, beside: int = 1) -> Speed:
    """The speed of one worker on a cell's training, and the seconds of each measure and of a checkpoint under `root`.

    device: "cpu" or "cuda"; name: what the table calls it. beside: workers that a run keeps at work at once; on a CPU,
    whose memory and caches they share, as many are timed together. Raises InputError where a step, a measure or a
    checkpoint fails.
    """
    beside = beside if device == "cpu" else 1
    what = f"--calibrate: {cell.arm} {cell.size}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".calibration-", dir=root) as folder:
            if beside == 1:
                timed = [_time(study, cell, device, Path(folder), lambda: None)]
            else:
                timed = _together(beside, lambda number, wait: _time(study, cell, device, Path(folder, number), wait))
    except _Fault as fault:
        raise InputError(f"{what}: {fault}") from None
    except Exception as error:
        raise InputError(f"{what}: {_reason(error)}") from error
    steps = [seconds for one in timed for seconds in one.steps]
    share = study.recipe.batch_size // study.machine.workers_of(cell.size)
    return Speed(
        key=throughput.key(study, cell),
        params=cell.params,
        device=name,
        threads=study.machine.threads,
        tokens_per_second=share * study.data[cell.data].context / statistics.fmean(steps),
        steps=len(steps),
        measure_seconds={key: statistics.fmean(one.measures[key] for one in timed) for key in timed[0].measures},
        kernels=_kernels(cell.model, study.recipe.precision, device),
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        start_seconds=statistics.fmean(one.start for one in timed),
        commit_seconds=statistics.fmean(one.commit for one in timed),
        beside=beside,
    )


def _together(count: int, work: Callable[[str, Callable[[], Any]], _Timed]) -> list[_Timed]:
    """`work`(number, wait) in as many processes, each of which goes on from wait() when all have come to it.

    Forked, so that a study's own classes need no pickling. Raises _Fault with what failed.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)

    def serve(number: int, end: Any) -> None:
        gc.freeze()  # what there was before the fork may hold threads, which are not here: it is never destroyed
        gc.enable()
        try:
            end.send(work(str(number), barrier.wait))
        except threading.BrokenBarrierError:  # another one has failed, and says how
            end.send(None)
        except Exception as error:
            barrier.abort()
            end.send(_reason(error))

    answers, processes = [], []
    collects = gc.isenabled()
    gc.disable()  # until `serve` has begun
    try:
        for number in range(count):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=serve, args=(number, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            answers.append(ours)
    finally:
        if collects:
            gc.enable()
    told: list[Any] = []
    for answer, process in zip(answers, processes, strict=True):
        try:
            told.append(answer.recv())
        except EOFError:
            barrier.abort()
            process.join()
            told.append(f"a process ended with exit code {process.exitcode}; give fewer --cpus if memory ran out")
    for process in processes:
        process.join()
    for one in told:
        if isinstance(one, str):
            raise _Fault(one)
    return told


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _time(study: Study, cell: Cell, device: str, folder: Path, wait: Callable[[], Any]) -> _Timed:
    """What a warm worker takes for the parts of a job. wait: called where all workers should have come this far."""
    from orchestrator.training import checkpoint
    from orchestrator.training.engine import Engine

    machine, data = study.machine, study.data[cell.data]
    share = study.recipe.batch_size // machine.workers_of(cell.size)
    make = partial(
        Engine,
        recipe=study.recipe.model_copy(update={"batch_size": share}),
        zero_stage=machine.zero_stage,
        micro_batch=machine.micro_batch,
        recompute=machine.recompute,
        device=device,
    )

    def step(engine: Engine, number: int) -> float:
        began = time.perf_counter()
        engine.agree(engine.step(data.batch(cell.seed, number, engine.rows), 1.0), False, False)
        return time.perf_counter() - began

    with _alone(machine.threads):
        cold = make(build(cell.model, cell.seed, device))  # what a process does once is no job's
        step(cold, 0)
        cold.close()
        del cold
        began = time.perf_counter()
        model = build(cell.model, cell.seed, device)
        engine = make(model)
        built = time.perf_counter() - began
        first = step(engine, 0)
        wait()
        steps: list[float] = []
        while not steps or (len(steps) < MOST_STEPS and sum(steps) < STEPS_S):
            steps.append(step(engine, len(steps) + 1))
        wait()
        measures = _time_measures(study, model, data)
        for number in range(2):  # the first also makes the folders
            wait()
            began = time.perf_counter()
            state = engine.optimizer_state()
            checkpoint.commit(
                folder, number, model, state, rank=0, workers=1, zero_stage=machine.zero_stage, keep=()
            )  # fmt: skip
            committed = time.perf_counter() - began
        engine.close()
    return _Timed(built + max(0.0, first - statistics.fmean(steps)), steps, measures, committed)


def _time_measures(study: Study, model: LanguageModel, data: Any) -> dict[str, float]:
    """The mean call of each but for the first, which also draws the held-out text."""
    model.eval()
    seconds = {}
    with torch.no_grad():
        for one in study.measures:
            one(model, data)
            began, calls = time.perf_counter(), 0
            while calls == 0 or (calls < MOST_CALLS and time.perf_counter() - began < CALLS_S):
                one(model, data)
                calls += 1
            seconds[identity.of_measure(one)] = (time.perf_counter() - began) / calls
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
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def _kernels(config: ModelConfig, precision: str, device: str) -> list[str]:
    """The kernels that a training step of a decoder uses, each once."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return list(dict.fromkeys(name for name, _ in kernels.chosen(config, torch.device(device).type, dtype).values()))
