"""The paper's grid on 64 devices in virtual time: how near the makespan comes to its bound, what the driver costs."""

import sys
import time
import tracemalloc
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from simulator import paper_grid, planned, simulate

from experiments import show, status
from orchestrator.ledger import Ledger
from orchestrator.plan import ledger_row
from orchestrator.scheduler import Gang, ReadyJob, ReadyJobs, decide
from orchestrator.submit import run_states


@pytest.mark.parametrize(("loss", "most"), [(0.0, 1.05), (0.05, 1.25)])
def test_the_paper_grid_runs_close_to_its_bound(tmp_path: Path, loss: float, most: float) -> None:
    """Seven arms, S1..S5, six budgets, three seeds as trunks and branches on eight nodes of eight."""
    made = planned(paper_grid(), tmp_path)
    assert len(made.cells) == 630 and {job.kind for job in made.jobs} == {"trunk", "train"}
    done = simulate(made.jobs, tmp_path, loss=loss)
    assert 1 <= done.ratio < most
    assert done.straddled == 0
    assert done.attempts == done.jobs if not loss else done.jobs * 1.02 < done.attempts < done.jobs * 1.1


def test_ten_thousand_cells_are_planned_in_seconds(tmp_path: Path) -> None:
    began = time.process_time()
    made = planned(paper_grid(seeds=48), tmp_path)
    assert len(made.cells) == 10_080 and len(made.jobs) == 20_160
    assert time.process_time() - began < 10


def test_a_plan_of_ten_thousand_cells_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    tracemalloc.start()
    made = planned(paper_grid(seeds=6), tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most / len(made.cells) * 10_000 < 2**30


def test_a_decision_costs_the_same_in_any_crowd() -> None:
    """Nothing goes through all that is ready: 20,000 jobs are decided on as fast as 200."""

    def seconds(n: int) -> float:
        ready = ReadyJobs(ReadyJob(f"job{i:05}", 1 << i % 4, float(i)) for i in range(n))
        gangs = [Gang(i, (f"node{i % 8}",), "busy") for i in range(60)]
        began = time.process_time()
        for _ in range(50):
            decide(ready, gangs, dict.fromkeys((f"node{i}" for i in range(8)), 8))
        return time.process_time() - began

    assert min(seconds(20_000) for _ in range(3)) < 3 * min(seconds(200) for _ in range(3))


@pytest.mark.slow
def test_a_finished_job_costs_the_driver_little_among_ten_thousand_cells(tmp_path: Path) -> None:
    made = planned(paper_grid(seeds=48), tmp_path)
    done = simulate(made.jobs, tmp_path)
    document = made.as_json()
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.add([], {cell.id: ledger_row(cell) for cell in made.cells})
        look = status.Look("paper", tmp_path, document["cells"])
        events = 0
        began = time.perf_counter()
        while time.perf_counter() - began < 20:  # what `gridlaw run` does at each event besides
            job = made.jobs[events]
            run_states(ledger, tmp_path, document, [job.id])
            show.event("finished", job.id, "", look())
            events += 1
        told = 2 * (time.perf_counter() - began) / events  # a start and an end
    assert done.own_s / done.jobs + told < 0.020
