"""A plan over its limits: the figures are shown, one line says why, nothing is started."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments import show
from experiments.command import app
from experiments.doctor import usable_cpus
from experiments.limits import as_bytes
from orchestrator import plan
from orchestrator.data.recall import RecallLanguage
from orchestrator.devices import elsewhere
from orchestrator.errors import InputError
from orchestrator.recipe import Recipe
from orchestrator.study import PAPER_SIZES, Arm, Machine, Study

STUDY = """
from analysis.measures.validation import ValidationLoss
from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Size, Study

study = Study(
    name="tiny",
    arms=[Arm(name="full", pattern="full"), Arm(name="swa", pattern="swa-8 full")],
    sizes=[Size(name="s", d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)],
    budgets=[25600],
    seeds=[0, 1],
    data=RecallLanguage(context=64),
    recipe=Recipe(learning_rate=0.02, batch_size=4),
    measures=[ValidationLoss(documents=2)],
)
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.py"
    path.write_text(STUDY)
    return path


def refused(verb: str, study: Path, *words: str) -> str:
    """The line on standard error; the figures stand on standard output and no study was made."""
    root = study.parent / "root"
    result = CliRunner().invoke(app, [verb, str(study), "--root", str(root), "--gpus", "0", *words])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert "tiny: 4 cells, 4 to train" in result.stdout
    assert not (root / "tiny").exists()
    return line


KNOWN = ("--device-flops", "1e9", "--mfu", "0.5")


@pytest.mark.parametrize("verb", ["plan", "run"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-hours", "1"), "gridlaw: --max-hours: 1 cannot be held, the time of 4 of 4 jobs is not known"),
        (("--max-cost", "1", "--price", "2"), "gridlaw: --max-cost: 1 cannot be held, the time of 4 of 4 jobs"),
        (("--max-hours", "1e-6", *KNOWN), "gridlaw: --max-hours: 1e-06 is below the plan's"),
        (("--max-cost", "1", *KNOWN), "gridlaw: --max-cost: 1 needs the price of a device hour; give --price"),
        (("--max-cost", "1e-6", "--price", "2", *KNOWN), "gridlaw: --max-cost: 1e-06 is below the plan's"),
        (("--max-disk", "1k"), "gridlaw: disk: the study needs"),
    ],
)
def test_what_exceeds_a_limit_is_not_started(study: Path, verb: str, words: tuple[str, ...], said: str) -> None:
    line = refused(verb, study, *words)
    assert line.startswith(said)
    assert "calibrate" in line or "cannot be held" not in line


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_what_no_device_can_hold_is_not_started(study: Path, verb: str) -> None:
    study.write_text(STUDY.replace("batch_size=4", "batch_size=2**21").replace("25600", "2**28"))
    line = refused(verb, study)
    assert line.startswith("gridlaw: memory: a worker needs") and "micro_batch" in line


@pytest.mark.parametrize("option", ["--max-hours", "--max-cost", "--price", "--device-flops", "--mfu"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_figure_limits_nothing_and_is_refused(study: Path, option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(study), "--root", str(study.parent / "root"), option, value])
    assert result.exit_code == 2 and result.stderr.startswith(("gridlaw: " + option, "gridlaw: Invalid value for"))
    assert len(result.stderr.splitlines()) == 1


def document(study: Path, *words: str) -> dict[str, Any]:
    root = study.parent / "root"
    result = CliRunner().invoke(app, ["plan", str(study), "--root", str(root), "--gpus", "0", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_seconds_of_what_is_stated(study: Path) -> None:
    got = document(study, *KNOWN, "--price", "3", "--devices", "4")
    totals = got["totals"]
    assert {job["seconds_source"] for job in got["jobs"]} == {"estimated"}
    assert [job["seconds"] for job in got["jobs"]] == pytest.approx([job["flops"] / 5e8 for job in got["jobs"]])
    assert totals["price"] == pytest.approx(3 * totals["device_hours"])
    longest, work = max(job["seconds"] for job in got["jobs"]), totals["device_hours"] * 3600
    assert totals["makespan_lower_bound_s"] == pytest.approx(max(work / 4, longest))


def test_a_device_that_is_not_here(study: Path) -> None:
    got = document(study, "--device", "h100", "--mfu", "0.25", "--devices", "8")
    assert got["device"] == {
        "name": "H100", "threads": 1, "flops": 67e12 / 4, "memory_bytes": 80e9, "here": False, "price": None,
        "count": 8,
    }  # fmt: skip
    for words, said in ((("--calibrate",), "--calibrate: times this machine"), (KNOWN, "--device-flops: the peak of")):
        result = CliRunner().invoke(app, ["plan", str(study), "--device", "H100", *words])
        assert result.exit_code == 2 and result.stderr.startswith(f"gridlaw: {said}")
    with pytest.raises(InputError, match="--device: 'abacus' is not known; choose from A100, H100, H200"):
        elsewhere("abacus", "bfloat16", 0.4, None)


def test_more_devices_than_here_leave_a_worker_its_memory(study: Path) -> None:
    one, many = document(study)["device"], document(study, "--devices", "4096")["device"]
    assert many == {**one, "count": 4096}


def test_threads_of_another_machine_need_not_be_here(study: Path) -> None:
    study.write_text(
        STUDY.replace('name="tiny",', 'name="tiny", machine=Machine(threads=4096),').replace(
            "import Arm, Size", "import Arm, Machine, Size"
        )
    )
    assert document(study, "--device", "H100", "--devices", "8")["device"]["count"] == 8
    assert "machine.threads: 4096" in CliRunner().invoke(app, ["plan", str(study), "--gpus", "0"]).stderr


def test_calibrated_once_a_plan_knows_its_time(study: Path) -> None:
    assert document(study)["totals"]["device_hours"] is None
    got = document(study, "--calibrate")
    assert got["totals"]["seconds_sources"] == {"calibrated": 4}
    assert not (study.parent / "root" / "tiny").exists()
    slots = min(4, usable_cpus())
    table = json.loads((study.parent / "root" / "throughput.json").read_text())
    assert [entry["kernels"] for entry in table] == [["causal"], ["blocks", "causal"]]
    assert all(entry["device"].startswith("CPU") and entry["threads"] == 1 and entry["date"] for entry in table)
    speed, (measuring,) = table[0]["tokens_per_second"], table[0]["measure_seconds"].values()
    assert all(entry["beside"] == slots and entry["commit_seconds"] > 0 for entry in table)
    # 100 steps, an evaluation each 6 of them and one at the end; 6 of the checkpoints are kept.
    around = table[0]["start_seconds"] + 6 * table[0]["commit_seconds"]
    assert got["jobs"][0]["seconds"] == pytest.approx(around + 25600 / speed + 17 * measuring)
    later = document(study)
    assert later["jobs"] == got["jobs"], "what was timed is used without timing again"
    assert document(study, "--device", "A100")["totals"]["seconds_sources"] == {"estimated": 4}
    (study.parent / "root" / "throughput.json").write_text("[{")
    result = CliRunner().invoke(app, ["plan", str(study), "--root", str(study.parent / "root")])
    assert result.exit_code == 2 and "throughput.json is damaged; delete it" in result.stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("500M", 5e8), ("20GB", 2e10), ("1.5T", 1.5e12), ("7", 7.0), (None, None)]
)
def test_bytes_are_read(text: str | None, expected: float | None) -> None:
    assert as_bytes(text) == expected


@pytest.mark.parametrize("text", ["much", "-3G", "3X"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(InputError, match="--max-disk"):
        as_bytes(text)


def test_the_grid_of_the_paper_is_planned_in_seconds_and_seen_at_a_glance(tmp_path: Path) -> None:
    windows = (128, 512, 2048)
    study = Study(
        name="paper",
        arms=(
            Arm(name="full", pattern="full"),
            *(Arm(name=f"swa-{w}", pattern=f"swa-{w} full") for w in windows),
            *(Arm(name=f"swa-{w}-nope", pattern=f"swa-{w} full", positions="nope-full") for w in windows),
        ),
        sizes=tuple(PAPER_SIZES.values()),
        budgets=("100N", "200N", "300N", "400N", "500N", "1000N"),
        seeds=(0,),
        data={"recall": RecallLanguage(context=16_384, g_min=4)},
        recipe=Recipe(learning_rate=0.02, batch_size=32, precision="bfloat16", decay_fraction=0.1),
        machine=Machine(micro_batch=1),
    )
    began = time.process_time()
    made = plan.make(study, tmp_path, {}, slots=64, device=elsewhere("H100", "bfloat16", 0.4, 2.0))
    planned = made.as_json()
    console = Console(width=80, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(show.plan(planned), soft_wrap=True)
    assert time.process_time() - began < 5
    assert len(planned["cells"]) == 210
    shown = capture.get().splitlines()
    assert len(shown) < 24 and max(map(len, shown)) <= 80, shown
    by_arm, by_size = shown[1:8], shown[10:15]
    assert [line.split()[1] for line in by_arm] == ["30"] * 7 and [line.split()[1] for line in by_size] == ["42"] * 5
    assert "as timed" not in capture.get() and "396TFLOP/s" in capture.get()
