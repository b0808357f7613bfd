"""A real run through the command: two tiny cells, in processes of its own."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT.parent / "shared" / "check_contract.py"

STUDY = """
from analysis.measures.recall import RecallByDistance
from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Evaluations, Question, Size, Study

study = Study(
    name="tiny",
    arms=[Arm(name="full", pattern="full"), Arm(name="swa-8", pattern="swa-8 full")],
    sizes=[Size(name="s", d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)],
    budgets=[2560],
    seeds=[0],
    data=RecallLanguage(context=64),
    recipe=Recipe(learning_rate=0.02, batch_size=4),
    measures=[RecallByDistance(documents=8, edges=(8,))],
    evaluations=Evaluations(every_tokens=512, checkpoints=1),
    question=Question(capability="recall/accuracy/beyond-8", reference="full"),
)
"""


def gridlaw(*words: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The finished process and its JSON document, which must be all of its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.command", *words, "--json"],
        capture_output=True, text=True, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, json.loads(done.stdout)


@pytest.mark.cluster
def test_run_status_fit_and_run_again(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(STUDY)
    done, ran = gridlaw("run", "tiny.py", "--cpus", "2", cwd=tmp_path)
    assert ran["counts"] == {"finished": 2}
    assert "swa-8 seed 0 finished" in done.stderr
    assert "Traceback" not in done.stderr
    assert Path(tmp_path, ran["report"]).exists()
    names = ["study.json", "ledger.db", "results/runs.parquet", "results/metrics.parquet", "report/report.html"]
    assert all((tmp_path / "studies" / "tiny" / name).exists() for name in names)

    documents = {verb: gridlaw(verb, "tiny", cwd=tmp_path)[1] for verb in ("plan", "status", "fit")}
    if CONTRACT.exists():
        checker = runpy.run_path(str(CONTRACT))
        for verb, document in documents.items():
            assert checker["departures"](checker["SHAPES"][verb], document) == [], verb
    assert documents["plan"]["missing"] == 0 and documents["plan"]["jobs"] == []
    assert documents["status"]["busy_core_s"] > 0
    assert [row["arm"] for row in documents["fit"]["emergence"]] == ["full", "swa-8"]

    before = (tmp_path / "studies" / "tiny" / "ledger.db").read_bytes()
    again, document = gridlaw("run", "tiny", cwd=tmp_path)
    assert document["counts"] == {"finished": 2}
    assert "seed" not in again.stderr
    assert (tmp_path / "studies" / "tiny" / "ledger.db").read_bytes() == before
