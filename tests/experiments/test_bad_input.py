"""Bad input: one clear line on standard error, exit code 2, nothing created."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experiments.command import app

GOOD = """
from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Size, Study

study = Study(
    name="tiny",
    arms=[Arm(name="full", pattern="full"), Arm(name="swa", pattern="swa-8 full")],
    sizes=[Size(name="s", d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)],
    budgets=[4096],
    seeds=[0],
    data=RecallLanguage(context=64),
    recipe=Recipe(learning_rate=0.02, batch_size=4),
)
"""

# What is wrong → (text of the good study, text put in its place, words the line must have).
FAULTS = {
    "unknown field": ("seeds=[0],", "seeds=[0], sedes=[1],", ["sedes", "unknown field", "seeds"]),
    "unknown field of the recipe": ("batch_size=4", "batch_size=4, lr=1", ["Recipe.lr", "unknown field"]),
    "pattern that does not divide": ("swa-8 full", "swa-8 swa-8 full", ["swa-8 swa-8 full", "3 words", "2 layers"]),
    "window 0": ("swa-8", "swa-0", ["swa-0", "window 0", "W >= 1"]),
    "negative window": ("swa-8", "swa--3", ["swa--3", "window -3", "W >= 1"]),
    "no window": ("swa-8", "swa-wide", ["swa-wide", "swa-W"]),
    "unknown mixer": ("swa-8", "conv-8", ["conv-8", "known: full, swa-W"]),
    "budget below one step": ("budgets=[4096]", "budgets=[100]", ["budgets", "100", "one step of 256"]),
    "budget of text": ("budgets=[4096]", 'budgets=["lots"]', ["budgets", "lots", "100N"]),
    "duplicate arm": ('name="swa"', 'name="full"', ["arm", "full", "2 times"]),
    "the same arm twice": ("swa-8 full", "full full", ["swa", "one and the same training", "drop one"]),
    "learning rate of text": ("learning_rate=0.02", 'learning_rate="fast"', ["learning_rate", "fast", "number"]),
    "learning rate that is not finite": ("learning_rate=0.02", 'learning_rate=float("nan")', ["learning_rate", "nan"]),
    "no seed": ("seeds=[0]", "seeds=[]", ["seeds", "empty", "at least one"]),
    "no arm": ("arms=[", "arms=[] and [", ["arms", "empty", "at least one"]),
    "finding about an unknown arm": (
        "seeds=[0],",
        'seeds=[0], findings=[__import__("orchestrator.finding").finding.Finding(claim="so", above=1, statistic='
        '{"kind": "metric ratio", "metric": "train/loss", "arm": "swa-9", "against": "full"})],',
        ["study.py:", "findings.0.arm", "'swa-9'", "arms: full, swa"],
    ),
    "finding without a rule": (
        "seeds=[0],",
        'seeds=[0], findings=[__import__("orchestrator.finding").finding.Finding(claim="so", statistic='
        '{"kind": "metric ratio", "metric": "train/loss", "arm": "swa", "against": "full"})],',
        ["study.py:", "'so' has no rule", "give above, below or both"],
    ),
    "name of MLflow's": ('name="tiny"', 'name="mlflow.db"', ["name", "mlflow.db", "choose another"]),
    "budget with a fraction": ("budgets=[4096]", "budgets=[1e5]", ["Study.budgets.0: 100000.0"]),
    "name of a path": ('name="tiny"', 'name="../tiny"', ["name", "../tiny"]),
    "measure that is none": ("seeds=[0],", "seeds=[0], measures=[3],", ["measure", "3", "analysis.measures"]),
    "unknown measure": ("import Arm, Size", "import Arm, Size; from analysis.measures import smell", ["smell"]),
    "data that is none": ("RecallLanguage(context=64)", "[1, 2]", ["data", "[1, 2]", "orchestrator.data"]),
    "syntax": ("budgets=[4096]", "budgets=[4096", ["study.py:", "syntax"]),
    "exception of the file's own": ("seeds=[0]", "seeds=[1 // 0]", ["study.py:", "ZeroDivisionError"]),
    "sentence with a format": (
        "RecallLanguage(context=64)",
        '__import__("orchestrator.data.text").data.text.TextCorpus(sentence="{word:>9} {number}")',
        ["sentence", "cannot be planted"],
    ),
    "betas outside [0, 1)": ("batch_size=4", "batch_size=4, betas=(1.0, 2.0)", ["Recipe.betas", "1.0", "less than 1"]),
    "no study": ("study = Study(", "grid = Study(", ["study.py", "study = Study("]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a `files` folder in it, where study files go; studies would appear beside it."""
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gridlaw(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def assert_refused(result: Result, folder: Path, *words: str) -> None:
    line = result.stderr.strip()
    assert result.exit_code == 2, (result.exit_code, line, result.exception)
    assert "\n" not in line, line
    assert line.startswith("gridlaw: ")
    assert all(word in line for word in words), line
    assert result.stdout == ""
    assert [path.name for path in folder.iterdir()] == ["files"]


def write(folder: Path, text: str) -> str:
    path = folder / "files" / "study.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("verb", ["plan", "run"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_study_is_refused(folder: Path, verb: str, fault: str) -> None:
    good, bad, words = FAULTS[fault]
    assert good in GOOD
    assert_refused(gridlaw(verb, write(folder, GOOD.replace(good, bad, 1))), folder, *words)


def test_the_good_study_is_not(folder: Path) -> None:
    result = gridlaw("plan", write(folder, GOOD), "--json")
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_missing_data_file(folder: Path) -> None:
    text = GOOD.replace("data.recall import RecallLanguage", "data.text import TextCorpus")
    path = write(folder, text.replace("RecallLanguage(context=64)", 'TextCorpus(folders=("nowhere.txt",))'))
    assert_refused(gridlaw("run", path), folder, "nowhere.txt", "does not exist")


@pytest.mark.parametrize("verb", ["plan", "run", "status", "fit", "report"])
def test_a_study_that_is_not_there(folder: Path, verb: str) -> None:
    assert_refused(gridlaw(verb, "files/absent.py"), folder, "absent.py", "does not exist")
    assert_refused(gridlaw(verb, "absent"), folder, "absent", "neither a study file nor a study under")


@pytest.mark.parametrize("verb", ["fit", "report"])
def test_a_study_that_has_not_run(folder: Path, verb: str) -> None:
    assert_refused(gridlaw(verb, write(folder, GOOD)), folder, "tiny", "run the study first")


def test_an_unreachable_cluster(folder: Path) -> None:
    result = gridlaw("run", write(folder, GOOD), "--address", "127.0.0.1:1")
    assert_refused(result, folder, "--address", "127.0.0.1:1", "cannot be reached")


@pytest.mark.parametrize("root", ["files/study.py/below", "/proc/studies"])
def test_a_root_that_cannot_be_written(folder: Path, root: str) -> None:
    assert_refused(gridlaw("run", write(folder, GOOD), "--root", root), folder, "--root", root)


@pytest.mark.parametrize("uri", ["garbage", "ftp://host", "file:///tmp/runs"])
def test_a_tracking_uri_that_is_none(folder: Path, uri: str) -> None:
    result = gridlaw("run", write(folder, GOOD), "--tracking-uri", uri)
    assert_refused(result, folder, "--tracking-uri", uri, "http://HOST:PORT")


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_devices_that_are_not_there(folder: Path, verb: str) -> None:
    result = gridlaw(verb, write(folder, GOOD), "--gpus", "1000")
    assert_refused(result, folder, "--gpus", "1000", "--gpus 0")
    text = GOOD.replace("import Arm", "import Machine, Arm").replace("seeds=", "machine=Machine(threads=99), seeds=")
    result = gridlaw(verb, write(folder, text), "--cpus", "1", "--gpus", "0")
    assert_refused(result, folder, "machine.threads", "99", "--cpus")


def test_a_file_in_the_way(folder: Path) -> None:
    path = folder / "files/tiny"
    (path / "study.json").mkdir(parents=True)
    result = gridlaw("plan", write(folder, GOOD), "--root", "files")
    assert (result.exit_code, result.stderr) == (0, ""), "what plan does not read is not in its way"
    result = gridlaw("report", "tiny", "--root", "files")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    (path / "study.json").rmdir()
    stored = {"name": "tiny", "source": "x", "arms": [], "cells": [], "measures": []}
    (path / "study.json").write_text(json.dumps(stored))
    (path / "results").write_text("")
    result = gridlaw("report", "tiny", "--root", "files")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "tiny/results: File exists; make room" in result.stderr


def test_more_workers_than_slots(folder: Path) -> None:
    text = GOOD.replace("import Arm", "import Machine, Arm").replace("seeds=", "machine=Machine(workers=4), seeds=")
    result = gridlaw("run", write(folder, text), "--cpus", "1", "--gpus", "0")
    assert_refused(result, folder, "machine.workers", "4", "--cpus")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "STUDY"),
        (["plan", "x", "--colour"], "--colour"),
        (["--colour"], "--colour"),
        (["train", "x"], "train"),
        (["run", "x", "--cpus", "none"], "--cpus"),
        (["run", "x", "--cpus", "0"], "--cpus"),
        (["ui", "--port", "99999"], "--port"),
    ],
)
def test_wrong_words(folder: Path, words: list[str], said: str) -> None:
    assert_refused(gridlaw(*words), folder, said, "gridlaw --help")


def test_no_word_shows_the_help(folder: Path) -> None:
    assert "Commands:" in gridlaw().output


@pytest.mark.parametrize("verb", ["plan", "run", "status", "doctor"])
@pytest.mark.parametrize("root", ["files/study.py", "x" * 300])
def test_a_root_that_is_no_folder(folder: Path, verb: str, root: str) -> None:
    words = [verb, "--root", root] if verb == "doctor" else [verb, write(folder, GOOD), "--root", root]
    write(folder, GOOD)
    assert_refused(gridlaw(*words), folder, "--root", root[:50], "give another")


def test_a_name_that_is_a_path(folder: Path) -> None:
    (folder / "files/tiny").mkdir()
    empty = {"name": "tiny", "source": "tiny.py", "arms": [], "cells": [], "measures": []}
    (folder / "files/tiny/study.json").write_text(json.dumps(empty))
    assert gridlaw("status", "tiny", "--root", "files").exit_code == 0
    for name in ("tiny/../tiny", "../files/tiny", "tiny/"):
        assert_refused(gridlaw("status", name, "--root", "files"), folder, name, "neither a study file nor a study")


@pytest.mark.parametrize("verb", ["plan", "status", "fit", "report"])
@pytest.mark.parametrize("content", ["", "{", "null", "[]", "{}"])
def test_a_damaged_study_document(folder: Path, verb: str, content: str) -> None:
    (folder / "files/tiny").mkdir()
    (folder / "files/tiny/study.json").write_text(content)
    assert_refused(gridlaw(verb, "tiny", "--root", "files"), folder, "tiny/study.json is damaged", "run the study")


@pytest.mark.parametrize("start", [["-m", "experiments.command"]])
def test_as_a_process(folder: Path, start: list[str]) -> None:
    path = write(folder, GOOD.replace("budgets=[4096]", "budgets=[4096"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *start, "run", path], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gridlaw: study.py:") and done.stderr.count("\n") == 1
