"""A real run through the command: two tiny cells, in processes of its own."""

import json
import os
import runpy
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.measures.needles import Needles
from analysis.measures.recall import RecallByDistance
from experiments.measuring import MEASURES, with_measures
from orchestrator.study import Study

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

    cells = (tmp_path / "studies" / "tiny" / "study.json").read_text()
    measured, document = gridlaw("measure", "tiny", "needle", "entropy", "recall", cwd=tmp_path)
    assert document["jobs"] == 2 and "swa-8 seed 0" in measured.stderr
    metrics = pl.read_parquet(tmp_path / "studies" / "tiny" / "results" / "metrics.parquet")
    assert {"needle/accuracy/32", "entropy/L1H0"} <= set(metrics["metric"])
    ids = [[cell["id"] for cell in json.loads(text)["cells"]] for text in (cells, _study_json(tmp_path))]
    assert ids[0] == ids[1]
    with closing(sqlite3.connect(tmp_path / "studies" / "tiny" / "ledger.db")) as ledger:
        rows = ledger.execute("SELECT kind, count(*), sum(attempts) FROM jobs GROUP BY kind ORDER BY kind").fetchall()
    assert rows == [("measure", 2, 2), ("train", 2, 2)]
    assert gridlaw("measure", "tiny", "needle", cwd=tmp_path)[1]["jobs"] == 0


def _study_json(folder: Path) -> str:
    return (folder / "studies" / "tiny" / "study.json").read_text()


def test_measures_are_named_by_words_and_need_a_finished_cell(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(STUDY)
    for words, said in (
        (["tiny.py", "speed"], "measures: 'speed' is no measure; choose from validation, recall, needle"),
        (["tiny.py", "needle"], "study: no cell of tiny has finished under studies; run it first"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "experiments.command", "measure", *words, "--gpus", "0"],
            capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr and done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.py"]


def test_the_study_keeps_its_own_settings_of_a_measure() -> None:
    own = RecallByDistance(documents=8, edges=(8,))
    study = Study.model_construct(measures=(own,))
    assert with_measures(study, ["recall", "needle", "needle"]).measures == (own, Needles())
    assert all(measure.name == name for name, measure in MEASURES.items())
