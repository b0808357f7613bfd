"""The paper's grid on 64 devices, and ten thousand cells: the real planner, ledger, scheduler and driver loop."""

import resource
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulator import simulate
from test_study import Noise

from orchestrator import plan
from orchestrator.recipe import Recipe
from orchestrator.study import PAPER_SIZES, Arm, Evaluations, Machine, Size, Study

MIXERS = ("full", "swa-128", "swa-512", "swa-2048", "lightning", "mamba2", "gdn")
PAPER = Study(
    name="paper",
    arms=tuple(Arm(name=mixer, pattern=f"{mixer} full" if mixer != "full" else "full") for mixer in MIXERS),
    sizes=tuple(PAPER_SIZES.values()),
    budgets=("100N", "200N", "300N", "400N", "500N", "1000N"),
    seeds=(0, 1, 2),
    data=Noise(vocab_size=32_000, context=16_384),
    recipe=Recipe(learning_rate=0.02, batch_size=32, decay_fraction=0.1),
    evaluations=Evaluations(),
    machine=Machine(workers={"S1": 1, "S2": 1, "S3": 2, "S4": 4, "S5": 8}),
)


@pytest.mark.parametrize(("loses", "bar"), [(0.0, 1.05), (0.05, 1.25)])
def test_the_papers_grid_fills_64_devices(tmp_path: Path, loses: float, bar: float) -> None:
    planned = plan.make(PAPER, tmp_path, {}, slots=64)
    assert len(planned.cells) == 7 * 5 * 6 * 3 and len(planned.jobs) == 2 * len(planned.cells)
    found = simulate(planned, tmp_path, loses=loses)
    print(f"makespan {found.ratio:.4f} of the lower bound, {found.straddling} gangs over two nodes")
    assert 1.0 <= found.ratio <= bar


def test_ten_thousand_cells(tmp_path: Path) -> None:
    tiny = [Size(name=f"d{d}", d_model=d, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32) for d in (16, 24)]
    study = Study(
        name="many",
        arms=tuple(Arm(name=f"swa-{w}", pattern=f"swa-{w} full") for w in range(1, 51)),
        sizes=tiny,
        budgets=(25_600, 51_200),
        seeds=tuple(range(50)),
        data=Noise(),
        recipe=Recipe(learning_rate=0.02, batch_size=4),
        machine=Machine(workers=1),
    )
    before, began = _peak_bytes(), time.process_time()
    planned = plan.make(study, tmp_path, {}, slots=64)
    seconds = time.process_time() - began
    assert len(planned.cells) == 10_000
    assert seconds < 10 and _peak_bytes() - before < 2**30
    found = simulate(planned, tmp_path, stop_after=500)
    each = found.driver_s / found.jobs
    print(f"planned in {seconds:.1f} s, {(_peak_bytes() - before) / 2**20:.0f} MiB; {1e3 * each:.1f} ms a job")
    assert each < 0.020


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
