"""The command's promises that need no training."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.command import app

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT.parent / "shared" / "check_contract.py"
VERBS = ["plan", "run", "measure", "stop", "status", "fit", "report", "ui", "export", "doctor"]
HEAVY = "{'torch', 'ray', 'mlflow', 'deepspeed', 'polars', 'scipy', 'matplotlib', 'numpy'}"


def loaded_by(code: str) -> str:
    """What a fresh process prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.strip()


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_an_example(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert f"Example: gridlaw {verb}" in result.stdout


def test_no_verb_is_left_out() -> None:
    assert sorted(command.callback.__name__ for command in app.registered_commands if command.callback) == sorted(VERBS)


def test_the_command_alone_loads_nothing_heavy() -> None:
    assert loaded_by(f"import sys, experiments.command; print({HEAVY} & set(sys.modules))") == "set()"


def test_a_plan_needs_no_engine(tmp_path: Path) -> None:
    code = (
        "import sys; from experiments.command import app;"
        f"app(['plan', 'experiments/quickstart.py', '--json', '--root', {str(tmp_path / 'studies')!r}],"
        " standalone_mode=False);"
        "print({'ray', 'mlflow', 'deepspeed'} & set(sys.modules))"
    )
    document, loaded = loaded_by(code).splitlines()
    assert len(json.loads(document)["cells"]) == 10
    assert loaded == "set()"
    assert list(tmp_path.iterdir()) == []


def invoke(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.skipif(not CONTRACT.exists(), reason="the contract's checker is not beside the project")
@pytest.mark.parametrize("verb", ["plan", "status"])
def test_json_keeps_the_contract_before_a_run(verb: str, tmp_path: Path) -> None:
    checker = runpy.run_path(str(CONTRACT))
    document = invoke(verb, str(ROOT / "experiments" / "quickstart.py"), "--root", str(tmp_path))
    assert checker["departures"](checker["SHAPES"][verb], document) == []


def test_doctor_knows_this_machine(tmp_path: Path) -> None:
    document = invoke("doctor", "--root", str(tmp_path / "a" / "b"))
    if not document["devices"]:
        assert document["mixers"]["swa-128"]["kernel"] == "blocks"
        assert "no window" in document["mixers"]["swa-128"]["refused"]["causal"]
        assert document["mixers"]["gdn"] == {"kernel": "chunks", "refused": {"fla": "not installed"}}
    assert document["cpus"] >= 1 and document["packages"]["torch"]
    assert document["root_writable"] is True and document["disk_free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
