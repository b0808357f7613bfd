"""What a job costs beside its own work, a warm gang against Ray Train: `python -m experiments.bench_overhead`.

One function of half a second, in a process group of one worker, is run by the fleet as jobs of a study and by
`ray.train.torch.TorchTrainer` as runs, one after the other on one machine. Overhead is what passes from the moment job
and worker are there (the call of `fit()`) to the end, less the function's own seconds. Exits 1 below a ratio of 100.
"""

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import typer

from orchestrator.training.task import Outcome

BAR = 100


@dataclass(frozen=True)
class Function:
    """A job as the driver plans it, and the task that its gang gets."""

    id: str
    folder: Path
    kind: str = "train"
    after: tuple[str, ...] = ()
    workers: int = 1
    flops: float = 1.0
    tokens: int = 1

    @property
    def cell_id(self) -> str:
        return self.id

    @property
    def job_id(self) -> str:
        return self.id


def work() -> float:
    """Half a second of products on one thread; its own seconds."""
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    matrix = torch.ones(128, 128) / 128
    while time.perf_counter() - began < 0.5:
        matrix = matrix @ matrix
    return time.perf_counter() - began


def in_gang(task: Any, rank: int, should_stop: Callable[[], bool], progress: Callable[[int], None]) -> Outcome:
    """The function as a job of the fleet: in a process group of its own, as the training job has one."""
    from orchestrator.training import engine

    engine.start_process_group(rank, task.workers, int(os.environ["MASTER_PORT"]), os.environ["MASTER_ADDR"])
    try:
        seconds = work()
    finally:
        engine.end_process_group()
    return Outcome("finished", None, 1, seconds, seconds, 0.0)


def _task(job: Function) -> Any:
    return job


def fleet_overhead(folder: Path, jobs: int) -> float:
    """Mean seconds a warm job takes beside its work; the first job of the gang is not warm."""
    from orchestrator.driver import run
    from orchestrator.fleet import FleetOptions
    from orchestrator.ledger import Ledger
    from orchestrator.timing import timing

    with Ledger.open(folder / "ledger.db") as ledger:
        functions = [Function(f"job{i}", folder) for i in range(jobs + 1)]
        result = run(functions, _task, ledger, FleetOptions(cpus=1, job=in_gang))
        assert result.exit_code == 0, result.causes
        overhead = timing(ledger)["overhead_s_per_job"]
    assert overhead is not None
    return overhead


def trainer_overhead(folder: Path, runs: int) -> list[float]:
    """Seconds each TorchTrainer run takes beside its work."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop(config: dict[str, Any]) -> None:
        Path(config["out"]).write_text(str(work()))

    overheads = []
    # "local": without it Ray joins whatever cluster it finds on the machine.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for number in range(runs):
            out = folder / f"seconds-{number}"
            began = time.perf_counter()
            TorchTrainer(
                loop,
                train_loop_config={"out": str(out)},
                scaling_config=ScalingConfig(num_workers=1),
                run_config=RunConfig(name=f"run-{number}", storage_path=str(folder)),
            ).fit()
            overheads.append(time.perf_counter() - began - float(out.read_text()))
    finally:
        ray.shutdown()
    return overheads


def main(
    jobs: Annotated[int, typer.Option(help="warm jobs of the fleet")] = 20,
    runs: Annotated[int, typer.Option(help="TorchTrainer runs, the first of which is not counted")] = 3,
) -> None:
    """Overhead of one warm job against one run of Ray Train."""
    if importlib.util.find_spec("tensorboardX") is None:
        print("overhead: skipped, Ray Train is not installed; pip install -c constraints.txt 'ray[train]'")
        return
    with tempfile.TemporaryDirectory(prefix="gl") as folder:
        ours = fleet_overhead(Path(folder), jobs)
        theirs = trainer_overhead(Path(folder), runs)
    ratio = statistics.median(theirs[1:]) / ours
    print(f"warm gang    {1e3 * ours:.1f} ms a job over {jobs} jobs")
    print(f"TorchTrainer {', '.join(f'{seconds:.1f}' for seconds in theirs)} s a run, the first not counted")
    print(f"ratio        {ratio:.0f} (bar {BAR})")
    sys.exit(ratio < BAR)


if __name__ == "__main__":
    typer.run(main)
