"""A run of fake jobs, as a process of its own: `python fake_study.py FOLDER JOBS WORKERS SLOTS`.

Each job counts to its number of steps, one file write a step, goes on where it stopped, and says what its worker saw.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from orchestrator import lock  # noqa: E402
from orchestrator.driver import Event, RunResult, run  # noqa: E402
from orchestrator.fleet import FleetOptions  # noqa: E402
from orchestrator.ledger import Ledger  # noqa: E402
from orchestrator.training.task import Outcome  # noqa: E402

STEP_S = 0.02


@dataclass(frozen=True)
class FakeJob:
    id: str
    workers: int = 1
    flops: float = 1.0
    after: tuple[str, ...] = ()
    kind: str = "train"
    tokens: int = 100

    @property
    def cell_id(self) -> str:
        return self.id


@dataclass(frozen=True)
class FakeTask:
    job_id: str
    folder: Path
    workers: int
    steps: int
    behave: str = "count"
    trunk: None = None
    data: None = None


def count(task: Any, rank: int, should_stop: Callable[[], bool], progress: Callable[[int], None]) -> Any:
    """The fake training job."""
    task.folder.mkdir(parents=True, exist_ok=True)
    steps = task.folder / f"steps-{rank}"
    done = len(steps.read_text().split()) if steps.exists() else 0
    with open(task.folder / "seen.jsonl", "a") as seen:
        where = {"pid": os.getpid(), "rank": rank, "port": os.environ["MASTER_PORT"], "from": done, "at": time.time()}
        seen.write(json.dumps(where) + "\n")
    if task.behave == "bug":
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({task.job_id})")
    if task.behave == "diverge":
        return Outcome("diverged", "loss is nan at step 3", 3, 0.1, 0.1, 0.0)
    if task.behave == "die once" and done == 0:
        steps.write_text("0\n1\n2\n")
        os.kill(os.getpid(), 9)
    if task.behave == "hang once" and done == 0:
        steps.write_text("0\n1\n2\n")
        time.sleep(600)
    if task.behave == "port taken once" and len((task.folder / "seen.jsonl").read_text().splitlines()) <= task.workers:
        raise RuntimeError("The server socket has failed to listen: EADDRINUSE, address already in use")
    began = time.time()
    with open(steps, "a") as file:
        for step in range(done, task.steps):
            if should_stop():
                return Outcome("stopped", None, step, time.time() - began, time.time() - began, 0.0)
            time.sleep(STEP_S)
            file.write(f"{step}\n")
            file.flush()
            progress(step + 1)
    return Outcome("finished", None, task.steps, time.time() - began, time.time() - began, 0.0)


def run_fake(
    folder: Path,
    jobs: list[FakeJob],
    behave: dict[str, str] | None = None,
    steps: int = 10,
    slots: int = 2,
    events: list[Event] | None = None,
    hung_s: float = 1800.0,
    **options: Any,
) -> RunResult:
    """One driver session over fake jobs."""

    def task_of(job: FakeJob) -> Any:
        return FakeTask(job.id, folder / "jobs" / job.id, job.workers, steps, (behave or {}).get(job.id, "count"))

    fleet = FleetOptions(cpus=slots, job=count, **options)
    tell = events.append if events is not None else (lambda event: None)
    with lock.held(folder), Ledger.open(folder / "ledger.db") as ledger:
        return run(jobs, task_of, ledger, fleet, on_event=tell, study_folder=Path(__file__).parent, hung_s=hung_s)


def seen(folder: Path, job_id: str) -> list[SimpleNamespace]:
    """What each worker of a job noted at its start, in order."""
    lines = (folder / "jobs" / job_id / "seen.jsonl").read_text().splitlines()
    return [SimpleNamespace(**{k.replace("from", "since"): v for k, v in json.loads(line).items()}) for line in lines]


if __name__ == "__main__":
    study, n, workers, slots = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    fakes = [FakeJob(f"job{i}", workers, flops=100.0 - i) for i in range(n)]
    result = run_fake(study, fakes, steps=int(sys.argv[5]), slots=slots)
    print(json.dumps({"exit_code": result.exit_code, "counts": result.counts, "causes": result.causes}))
    sys.exit(result.exit_code)
