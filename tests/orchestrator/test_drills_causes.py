"""What each cause of an end costs: trunks killed, memory and disk that do not suffice, hangs, notices, odd paths."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from commands import ROOT, Command, is_under_way, losses, mlflow_runs, record, rows
from fake_study import FakeJob, run_fake, seen

from orchestrator import lock
from orchestrator.errors import InputError

pytestmark = [pytest.mark.drill, pytest.mark.cluster]

# A measure that breaks its worker once, at its first evaluation in the cell of the wide window.
SABOTAGE = """
import errno, pathlib
from dataclasses import dataclass
from orchestrator.measure import Measurement

def out_of_memory(marker):
    import torch
    from model.lm import LanguageModel
    true = LanguageModel.objective
    def objective(self, tokens, targets, z_loss=0.0):
        if len(tokens) == 8 and not marker.exists():
            marker.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return true(self, tokens, targets, z_loss)
    LanguageModel.objective = objective

def disk_full(marker):
    import os
    from orchestrator.training import checkpoint
    def write(path, text):
        marker.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    checkpoint._write = write

BREAKS = {"out_of_memory": out_of_memory, "disk_full": disk_full}

@dataclass(frozen=True)
class Sabotage:
    what: str
    marker: str
    name: str = "sabotage"
    def identity(self):
        return {}
    def capabilities(self, data):
        return ()
    def __call__(self, model, data):
        marker = pathlib.Path(self.marker)
        if any(layer.mixer == "swa" for layer in model.config.layers) and not marker.exists():
            BREAKS[self.what](marker)
        return Measurement({"sabotage/value": 0.0})
"""


def sabotaged(study: Path, what: str) -> Path:
    (study.parent / "sabotage.py").write_text(SABOTAGE)
    marker = str(study.parent / "done")
    text = study.read_text().replace("    machine=", f"    measures=[Sabotage({what!r}, {marker!r})],\n    machine=")
    study.write_text("from sabotage import Sabotage\n" + text)
    return study


def of_arm(root: Path, arm: str) -> str:
    """Id of the one cell of an arm."""
    cells = json.loads((root / "tiny/study.json").read_text())["cells"]
    return next(cell["id"] for cell in cells if cell["arm"] == arm)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.mark.slow
def test_15_and_16_branches_of_a_killed_trunk_wait(make_study: Callable[..., Path], root: Path) -> None:
    study = make_study()
    text = study.read_text().replace("budgets=[STEPS * 4 * 64]", "budgets=[n * STEPS * 4 * 64 for n in (1, 2, 3)]")
    study.write_text(text.replace('Arm(name="full", pattern="full"), ', ""))
    command = Command(study, root)
    trunks = "SELECT count(*) FROM attempts JOIN jobs ON jobs.id = job_id WHERE kind = 'trunk'"
    for attempt in (1, 2, 3):
        command.wait_for(lambda n=attempt: has(root, f"{trunks} AND attempts.state = 'running' AND number = {n}"))
        command.wait_for(command.workers)[0].kill()
    output = command.ends()
    assert command.process.returncode == 1, output
    states = rows(root, "SELECT kind, state, count(*) FROM jobs GROUP BY kind, state ORDER BY kind, state")
    assert states == [("train", "blocked", 3), ("trunk", "blocked", 2), ("trunk", "failed", 1)]

    again = Command(study, root)
    output = again.ends()
    assert again.process.returncode == 0, output
    assert rows(root, "SELECT DISTINCT state FROM jobs") == [("finished",)]
    steps = [[step // (4 * 64) for step, _ in points] for points in losses(root).values()]
    assert sorted(each[-1] for each in steps) == sorted([210, 420, 630, 300, 600, 900])
    assert all(each == list(range(10, each[-1] + 1, 10)) for each in steps)
    shared = {job_id: dict(points) for job_id, points in losses(root).items()}

    apart = root.parent / "apart"
    study.write_text(study.read_text().replace("Machine(", "Machine(share_trunks=False, "))
    separate = Command(study, apart)
    output = separate.ends()
    assert separate.process.returncode == 0, output
    assert len(losses(apart)) == 3
    for cell, points in losses(apart).items():
        assert shared[cell] == pytest.approx(dict(points), rel=1e-5)

    tags = "SELECT value FROM tags WHERE key = 'mlflow.parentRunId'"
    (parent,) = set(rows(root, tags, "mlflow.db"))
    runs = mlflow_runs(root)
    assert len(runs) == 7 and {status for _, _, status in runs} == {"FINISHED"}
    assert len(rows(root, tags, "mlflow.db")) == 6 and parent[0] in {run_id for run_id, _, _ in runs}


def has(root: Path, sql: str) -> bool:
    if not (root / "tiny/ledger.db").exists():
        return False
    with contextlib.suppress(Exception):  # its tables are being made
        return rows(root, sql)[0][0] > 0
    return False


def test_19_out_of_memory_goes_on_with_half_the_micro_batch(make_study: Callable[..., Path], root: Path) -> None:
    study = make_study(steps=100)
    study.write_text(study.read_text().replace("batch_size=4", "batch_size=8"))
    plain = Command(study, root.parent / "plain")
    output = plain.ends()
    assert plain.process.returncode == 0, output
    command = Command(sabotaged(study, "out_of_memory"), root)
    output = command.ends()
    assert command.process.returncode == 0, output
    cell = of_arm(root, "swa-8")
    attempts = rows(root, f"SELECT state, cause FROM attempts WHERE job_id = '{cell}' ORDER BY number")
    assert [state for state, _ in attempts] == ["failed", "finished"]
    assert "out of memory" in attempts[0][1] and attempts[0][1].endswith("again with micro-batch 4")
    (said,) = [line["cause"] for line in record(root, cell) if "micro-batch" in (line.get("cause") or "")]
    assert said.endswith("micro-batch 4, as memory did not suffice for more")
    for job_id, points in losses(root.parent / "plain").items():
        assert dict(losses(root)[job_id]) == pytest.approx(dict(points), rel=1e-4)


@pytest.mark.slow
def test_20_a_full_disk_is_said_and_harms_nothing_else(make_study: Callable[..., Path], root: Path) -> None:
    study = sabotaged(make_study(), "disk_full")
    command = Command(study, root)
    output = command.ends()
    assert command.process.returncode == 1, output
    assert "disk full: " in output and "MANIFEST.json cannot be written; make room, run again" in output
    assert sorted(rows(root, "SELECT state FROM jobs")) == [("failed",), ("finished",)]
    again = Command(study, root)
    output = again.ends()
    assert again.process.returncode == 0, output
    assert {state for (state,) in rows(root, "SELECT state FROM jobs")} == {"finished"}


def test_21_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    jobs = [FakeJob("hangs", flops=9.0), FakeJob("other")]
    result = run_fake(tmp_path, jobs, {"hangs": "hang once"}, hung_s=3.0)
    assert result.exit_code == 0
    assert [start.since for start in seen(tmp_path, "hangs")] == [0, 3]
    assert len(seen(tmp_path, "other")) == 1


def test_a_notice_to_a_worker_costs_no_attempt(make_study: Callable[..., Path], root: Path, unbroken: Path) -> None:
    command = Command(make_study(), root)
    command.wait_for(is_under_way(root, 100))
    command.workers()[0].send_signal(signal.SIGTERM)
    output = command.ends()
    assert command.process.returncode == 0, output
    ends = rows(root, "SELECT state, cause FROM attempts WHERE state != 'finished'")
    assert ends == [("stopped", "a worker was told to end (SIGTERM), or its node to go")]
    events = [line.get("event") for (job_id,) in rows(root, "SELECT id FROM jobs") for line in record(root, job_id)]
    assert events.count("stopped") == events.count("resumed") == 1
    assert losses(root) == losses(unbroken)


@pytest.mark.slow
def test_24_a_long_root_with_spaces_and_letters_of_all_kinds(make_study: Callable[..., Path], tmp_path: Path) -> None:
    root = tmp_path / "Größe und Länge λ"
    root = root / ("ø " * 200)[: 150 - len(str(root)) - 2].strip() if len(str(root)) < 147 else root
    root = root.with_name(root.name + "x" * (150 - len(str(root))))
    assert len(str(root)) >= 150
    command = Command(make_study(steps=20), root)
    output = command.ends()
    assert command.process.returncode == 0, output
    assert {state for (state,) in rows(root, "SELECT state FROM jobs")} == {"finished"}
    assert (root / "tiny/report/report.html").exists()


def stop(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "experiments.command", "stop", "tiny", "--root", str(root), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_6_stop_from_another_shell(make_study: Callable[..., Path], root: Path) -> None:
    command = Command(make_study(), root)
    running = command.wait_for(is_under_way(root, 50))
    told = stop(root, "--json")
    assert command.process.poll() is not None, "it returns once the run has ended"
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == {"study": "tiny", "stopped": True, "pid": command.process.pid}
    assert command.process.returncode == 128 + signal.SIGTERM
    assert command.left_over() == []
    for job_id in running:
        assert record(root, job_id)[-1]["event"] == "stopped"
    none = stop(root, "--json")
    assert none.returncode == 2 and none.stdout == ""
    assert none.stderr == "gridlaw: study: tiny is not being run; nothing to stop\n"


def test_a_run_on_another_machine_is_stopped_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock.held(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(InputError, match=r"is being run by process \d+ on .*; stop it there"):
            lock.stop_holder(tmp_path, 0.1)


def test_who_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    held = "import sys, signal, time; from pathlib import Path; from orchestrator import lock\n"
    held += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    held += f"with lock.held(Path({str(tmp_path)!r})):\n    print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", held], cwd=ROOT, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout and deaf.stdout.readline()
        assert lock.stop_holder(tmp_path, 0.5) is None
        deaf.kill()
