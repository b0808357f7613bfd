"""Tuning as a real study runs it: the driver killed midway, trials that diverge, cells trained at the rate found."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_drills import Command, mlflow_runs, record, rows

STUDY = """
from analysis.measures.validation import ValidationLoss
from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Backbone, Evaluations, Size, Study, Tuning

def size(d):
    return Size(name=f"d{d}", d_model=d, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)

study = Study(
    name="tiny",
    arms=[Arm(name="full", pattern="full")],
    sizes=[size(16), size(24), size(32)],
    budgets=[40 * 4 * 64],
    seeds=[0],
    data=RecallLanguage(context=64, facts_per_document=(2, 4)),
    recipe=Recipe(learning_rate=0.02, batch_size=4),
    backbone=Backbone(mlp="relu2", norm_gain=False),
    measures=[ValidationLoss(documents=4)],
    evaluations=Evaluations(every_tokens=20 * 4 * 64, checkpoints=1),
    # The first round's rates are 1.8 and 56,000, of which the second diverges.
    tuning=Tuning(low=0.01, high=1e7, trials=4, together=2, rungs=(0.5,), budget=40 * 4 * 64, sizes=("d16", "d24")),
)
"""

pytestmark = [pytest.mark.drill, pytest.mark.cluster, pytest.mark.slow]


def found(root: Path) -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((root / "tiny/tuning").glob("*@*.json"))}


def trials_over(root: Path) -> int:
    try:
        return int(rows(root, "SELECT count(*) FROM jobs WHERE kind = 'tune' AND state = 'finished'")[0][0])
    except Exception:  # no ledger yet, or one being written
        return 0


def test_a_killed_driver_goes_on_to_the_same_trials_and_rates(tmp_path: Path) -> None:
    study = tmp_path / "study folder/tiny.py"
    study.parent.mkdir()
    study.write_text(STUDY)
    roots = tmp_path / "unbroken", tmp_path / "killed"
    whole = Command(study, roots[0], cpus=1)
    output = whole.ends()
    assert whole.process.returncode == 0, output

    killed = Command(study, roots[1])
    try:
        killed.wait_for(lambda: trials_over(roots[1]) >= 3)
    finally:
        killed.kill()
    assert not rows(roots[1], "SELECT 1 FROM jobs WHERE kind = 'train' AND attempts > 0")
    journal = roots[1] / "tiny/tuning/journal.log"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 6, "worker')
    again = Command(study, roots[1])
    output = again.ends()
    assert again.process.returncode == 0, output

    assert found(roots[1]) == found(roots[0])  # on other numbers of slots too
    for root in roots:
        tuned = found(root)
        assert list(tuned) == ["full@d16", "full@d24", "full@d32"]
        states = [trial["state"] for name in ("full@d16", "full@d24") for trial in tuned[name]["trials"]]
        assert len(states) == 8 and {"failed", "complete"} <= set(states)
        peaks = {}
        for job_id, size in rows(root, "SELECT id, json_extract(document, '$.size') FROM cells"):
            rates = [line["metrics"].get("train/learning_rate") for line in record(root, job_id) if "metrics" in line]
            peaks[f"full@{size}"] = max(rate for rate in rates if rate)
        assert peaks == pytest.approx({name: each["rate"] for name, each in tuned.items()})
        assert {state for (state,) in rows(root, "SELECT state FROM jobs")} == {"finished"}
        tags = rows(root, "SELECT value FROM tags WHERE key = 'gridlaw.learning_rate'", "mlflow.db")
        assert {f"{each['rate']:.6g}" for each in tuned.values()} <= {tag for (tag,) in tags}
        assert "RUNNING" not in {status for _, _, status in mlflow_runs(root)}
        warnings = [line for each in tuned.values() for line in each["warnings"]]
        report = (root / "tiny/report/report.html").read_text()
        assert "full d16: learning rate" in report and all(line in report for line in warnings)

    third = Command(study, roots[1], "--json")
    third.ends()
    assert third.process.returncode == 0 and not third.workers()
    assert rows(roots[1], "SELECT count(*) FROM sessions") == [(2,)]
