"""What a plan says of time and disk, what finished jobs leave there, and who may go on from it."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_trunks import STEP, grid, train

from model import cost
from orchestrator import identity, plan, resumption, throughput
from orchestrator.devices import Device
from orchestrator.errors import InputError
from orchestrator.jobs import Known
from orchestrator.plan import Plan
from orchestrator.study import Evaluations, Machine, Size, Study
from orchestrator.throughput import Speed
from orchestrator.training import job
from orchestrator.training.engine import end_process_group, start_process_group


@pytest.fixture(scope="module")
def one_worker() -> Iterator[None]:
    start_process_group(rank=0, world=1, port=0)
    yield
    end_process_group()


def speed(study: Study, device: str = "CPU x", **changes: object) -> Speed:
    cell = plan.make(study, Path("none"), {}).cells[0]
    measured = {identity.of_measure(measure): 0.5 for measure in study.measures}
    entry = Speed(throughput.key(study, cell), cell.params, device, 1, 100.0, 9, measured, ["causal"], "2.13", "today")
    return replace(entry, **changes)  # type: ignore[arg-type]


def seconds(study: Study, known: dict[str, Known], speeds: list[Speed], device: Device) -> list[tuple[object, object]]:
    made = plan.make(study, Path("none"), known, {}, 1, speeds, device)
    return [(job.seconds_source, job.seconds and round(job.seconds, 6)) for job in made.jobs]


def test_seconds_come_from_the_nearest_measurement() -> None:
    study = grid((10 * STEP,), evaluations=Evaluations(every_tokens=5 * STEP, checkpoints=1), seeds=(0, 1))
    here, flops = Device("CPU x"), Device("CPU x", flops=1e6)
    made = plan.make(study, Path("none"), {})
    assert seconds(study, {}, [], here) == [(None, None)] * 2
    estimated = round(made.jobs[0].flops / 1e6, 6)
    assert seconds(study, {}, [], flops) == [("estimated", estimated)] * 2
    calibrated = 10 * STEP / 100 + 2 * 0.5
    assert seconds(study, {}, [speed(study)], flops) == [("calibrated", calibrated)] * 2
    slow = speed(study, start_seconds=3.0, commit_seconds=2.0)
    assert seconds(study, {}, [slow], flops) == [("calibrated", calibrated + 3 + 2)] * 2, "one checkpoint is kept"
    slower = speed(study, tokens_per_second=1.0, commit_seconds=2.0)
    saved = (10 * STEP + 2 * 0.5) // 30
    assert seconds(study, {}, [slower], flops) == [("calibrated", 10 * STEP + 2 * 0.5 + 2 * saved)] * 2
    assert seconds(study, {}, [speed(study, threads=2)], here) == [(None, None)] * 2
    assert seconds(study, {}, [speed(study, measure_seconds={})], here) == [(None, None)] * 2
    assert seconds(study, {}, [speed(study, "CPU y")], here) == [(None, None)] * 2
    finished = {made.cells[0].id: Known("finished", 7.0, 10 * STEP, True)}
    assert plan.make(study, Path("none"), finished, {}, 1, [speed(study)], here).jobs[-1].seconds == 7.0
    elsewhere = Device("H100", flops=1e6, here=False)
    assert plan.make(study, Path("none"), finished, {}, 1, [], elsewhere).jobs[-1].seconds_source == "estimated"
    there = speed(study, "NVIDIA H100 80GB HBM3", threads=4)
    assert seconds(study, {}, [there], elsewhere) == [("calibrated", calibrated)] * 2


def test_workers_of_a_gang_share_the_tokens() -> None:
    study = grid((10 * STEP,), measures=(), machine=Machine(workers=2))
    made = plan.make(study, Path("none"), {}, {}, 2, [speed(study)], Device("CPU x"))
    assert made.jobs[0].seconds == pytest.approx(10 * STEP / 200)
    assert made.totals()["device_hours"] == pytest.approx(2 * 10 * STEP / 200 / 3600)


def test_half_precision_saves_no_memory_on_a_cpu() -> None:
    half = grid(recipe={"precision": "bfloat16"})
    planned = [
        plan.make(study, Path("none"), {}, device=Device(name)).jobs[0].memory_bytes
        for study, name in ((grid(), "CPU x"), (half, "CPU x"), (half, "H100"))
    ]
    assert planned[0] == planned[1] > planned[2]


def test_a_newer_speed_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    study = grid()
    throughput.add(tmp_path, [speed(study), speed(study, "CPU y")])
    throughput.add(tmp_path, [speed(study, tokens_per_second=200.0)])
    table = [(each.device, each.tokens_per_second) for each in throughput.read(tmp_path)]
    assert table == [("CPU x", 200.0), ("CPU y", 100.0)]


def states(planned: Plan) -> dict[str, list[str]]:
    """Of each job, the checkpoints that hold optimizer state."""
    folders = {each.id: planned.folder / "jobs" / each.id / "checkpoints" for each in planned.jobs}
    return {name: sorted(path.parent.name for path in root.glob("*/optimizer-*")) for name, root in folders.items()}


def on_disk(folder: Path) -> int:
    """Bytes of all files, each counted once however many names it has."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({entry.st_ino: entry.st_size for entry in files}.values())


def test_a_finished_cell_leaves_weights_and_a_trunk_its_last_state(tmp_path: Path, one_worker: None) -> None:
    planned = plan.make(grid(), tmp_path, {})
    train(planned)
    ends = ["step-00000007", "step-00000014", "step-00000028"]
    assert list(states(planned).values()) == [[end] for end in ends] + [[]] * 3
    for each in planned.jobs:  # killed before the ledger heard of it, a job is run again
        assert job.run(planned.task(each), 0, lambda: False).busy_s == 0.0
    kept = plan.make(grid(machine=Machine(keep_optimizer="all")), tmp_path / "all", {})
    train(kept)
    assert all(len(there) == 1 for there in states(kept).values())


@pytest.mark.parametrize("keep", ["trunks", "all"])
def test_disk_is_what_jobs_leave(tmp_path: Path, one_worker: None, keep: str) -> None:
    size = Size(name="wide", d_model=64, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=32, d_ff=256)
    study = grid(sizes=(size,), machine=Machine(keep_optimizer=keep))  # type: ignore[arg-type]
    planned = plan.make(study, tmp_path, {})
    train(planned)
    cell = planned.cells[0]
    state = cost.optimizer_state_bytes(cell.model, "muon")
    meanwhile = 2 * 4 * cell.params + 3 * state
    assert on_disk(tmp_path / "jobs") == pytest.approx(planned.disk_bytes - meanwhile, rel=0.05)
    (stored,) = {path.stat().st_size for path in (tmp_path / "jobs" / planned.jobs[0].id).rglob("optimizer-*")}
    assert stored == pytest.approx(state, rel=0.05)


def test_no_more_jobs_write_at_once_than_there_are() -> None:
    disks = [plan.make(grid(seeds=(0, 1)), Path("none"), {}, slots=slots).disk_bytes for slots in (1, 2, 12, 1000)]
    assert disks[1] - disks[0] == pytest.approx((disks[2] - disks[1]) / 10) and disks[2] == disks[3]


def saved(folder: Path, stage: int, workers: int) -> None:
    """A checkpoint as far as the check reads it."""
    folder = folder / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    manifest = {"step": 3, "workers": workers, "zero_stage": stage, "files": {"optimizer-0.pt": {}}}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "COMMITTED").touch()


@pytest.mark.parametrize(
    ("stage", "workers", "now", "said"),
    [
        (0, 2, Machine(workers=1), None),
        (1, 2, Machine(workers=2, zero_stage=1), None),
        (1, 2, Machine(workers=1, zero_stage=1), None),
        (
            1,
            2,
            Machine(workers=2, zero_stage=2),
            r"machine.zero_stage: 2, but full tiny \d+ tokens .* back to 1 to go on, or del",
        ),
        (0, 1, Machine(workers=1, zero_stage=1), r"machine.zero_stage: 1, but full tiny .* back to 0 to go on, or del"),
    ],
)
@pytest.mark.parametrize("of", ["cell", "trunk"])
def test_other_gangs_go_on_and_other_stages_are_refused_before_anything_starts(
    tmp_path: Path, stage: int, workers: int, now: Machine, said: str | None, of: str
) -> None:
    planned = plan.make(grid(machine=now), tmp_path, {})
    saved(tmp_path / "jobs" / planned.jobs[1 if of == "trunk" else -1].id, stage, workers)
    if said is None:
        resumption.check(planned)
        return
    with pytest.raises(InputError, match=said):
        resumption.check(planned)
