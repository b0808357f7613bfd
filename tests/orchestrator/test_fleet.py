"""Real gangs under fake jobs: widths, lost workers, taken ports, bugs, what a study's own module needs on a worker."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

sys.path.append(str(Path(__file__).parent))
from fake_study import FakeJob, run_fake, seen

from orchestrator import cluster, lock
from orchestrator.errors import InputError
from orchestrator.fleet import Fleet, FleetOptions, GangLost, _Gang
from orchestrator.ledger import Ledger

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    # One that has ended and is not waited for yet is gone: who waits for it may be its parent that has just ended.
    assert {child for child in set(psutil.Process().children(recursive=True)) - before if _lives(child)} == set()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def states(folder: Path) -> dict[str, str]:
    with Ledger.read(folder / "ledger.db") as ledger:
        return {row.id: row.state for row in ledger.snapshot().values()}


def test_narrow_and_wide_jobs_with_everything_that_may_happen_to_them(tmp_path: Path) -> None:
    """One session, two slots: gangs are re-used, re-cut and replaced; only what is at fault pays."""
    jobs = [
        FakeJob("wide-port", workers=2, flops=80.0),
        FakeJob("wide", workers=2, flops=60.0),
        FakeJob("dies", flops=9.0),
        FakeJob("diverges", flops=8.0),
        FakeJob("buggy", flops=7.0),
        FakeJob("after-wide", after=("wide",), flops=6.0),
        FakeJob("after-buggy", after=("buggy",), flops=5.0),
    ]
    behave = {"wide-port": "port taken once", "dies": "die once", "diverges": "diverge", "buggy": "bug"}
    result = run_fake(tmp_path, jobs, behave)

    assert states(tmp_path) == {
        "wide-port": "finished",
        "wide": "finished",
        "dies": "finished",
        "diverges": "diverged",
        "buggy": "failed",
        "after-wide": "finished",
        "after-buggy": "blocked",
    }
    assert result.exit_code == 1
    assert any("mat1 and mat2" in line for line in result.causes)
    with Ledger.read(tmp_path / "ledger.db") as ledger:
        rows = ledger.snapshot()
        attempts = ledger.query("SELECT * FROM attempts ORDER BY started")
    assert (rows["dies"].attempts, rows["wide-port"].attempts, rows["buggy"].attempts) == (2, 2, 1)
    assert "a worker died" in next(a["cause"] for a in attempts if a["job_id"] == "dies")
    assert [start.since for start in seen(tmp_path, "dies")] == [0, 3], "it goes on where it was"
    first, again = seen(tmp_path, "wide-port")[:2], seen(tmp_path, "wide-port")[2:]
    assert {s.rank for s in first} == {s.rank for s in again} == {0, 1}
    assert len({s.port for s in first}) == 1 and {s.port for s in first} != {s.port for s in again}
    for a in attempts:
        reserved = sum(
            rows[b["job_id"]].workers for b in attempts if b["started"] <= a["started"] < (b["ended"] or a["started"])
        )
        assert reserved <= 2

    again = run_fake(tmp_path, jobs)
    assert again.exit_code == 1, "the diverged job stays so"
    assert states(tmp_path)["after-buggy"] == "finished"
    assert len(seen(tmp_path, "wide")) == 2, "what has finished is not run again"


def test_a_bug_stops_the_study_after_three_failures(tmp_path: Path) -> None:
    jobs = [FakeJob(f"job{i}") for i in range(50)]
    result = run_fake(tmp_path, jobs, dict.fromkeys((job.id for job in jobs), "bug"))
    assert result.exit_code == 1
    assert 3 <= result.counts["failed"] <= 5
    assert result.counts["pending"] == 50 - result.counts["failed"]
    assert "mat1 and mat2 shapes" in result.causes[0]
    assert len(result.causes) == 2, "the breaker's line and one group"


def test_nothing_missing_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.add([FakeJob("a")])
        ledger.query("UPDATE jobs SET state = 'finished'")
    monkeypatch.setattr("orchestrator.driver.Fleet", None)
    assert run_fake(tmp_path, [FakeJob("a")]).exit_code == 0


def test_too_wide_a_job_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.driver.Fleet", None)
    with pytest.raises(InputError, match=r"machine\.workers: 4 do not fit on 2 slots"):
        run_fake(tmp_path, [FakeJob("a", workers=4)])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", "no.such.host.invalid:6379"])
def test_an_unreachable_cluster_is_told_at_once(tmp_path: Path, address: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match="--address"):
        run_fake(tmp_path, [FakeJob("a")], address=address)
    assert time.monotonic() - began < 15


def test_a_port_that_does_not_answer_as_ray_is_told_soon(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        began = time.monotonic()
        with pytest.raises(InputError, match="--address"):
            run_fake(tmp_path, [FakeJob("a")], address=f"127.0.0.1:{listener.getsockname()[1]}")
        assert time.monotonic() - began < 15


def test_one_driver_a_study(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match=f"run by process {os.getpid()}")
    with lock.held(tmp_path), refused, lock.held(tmp_path):
        pass
    with lock.held(tmp_path):
        pass


def test_slots() -> None:
    assert FleetOptions(cpus=5, threads=2).slots() == 2
    assert FleetOptions(cpus=5, gpus=3, threads=2).slots() == 3


def test_a_ray_that_never_starts_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fails(*_: object) -> None:
        tries.append(1)
        raise Exception("The current node timed out\nduring startup")  # what Ray raises

    monkeypatch.setattr(cluster, "_start_once", fails)
    with pytest.raises(InputError, match=r"^ray: it did not start in 3 tries \(The current node timed out during"):
        cluster.start(1, 1, 0)
    assert len(tries) == 3


def test_a_node_told_to_go_gets_no_job_and_its_own_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    resources = {"CPU": 4.0, "memory": 1.0}
    there = [{"NodeID": name, "Alive": name != "dead", "Resources": resources} for name in ("a", "b", "dead")]
    leaving: set[str] = set()
    monkeypatch.setattr(ray, "nodes", lambda: [*there, {"NodeID": "head", "Alive": True, "Resources": {}}])
    monkeypatch.setattr(cluster, "draining_nodes", lambda: leaving)
    crew = Fleet.__new__(Fleet)
    crew.options, crew._events, crew._gpus, crew._most = FleetOptions(threads=2), [], 0, None
    monkeypatch.setattr(crew, "stop", lambda gang_id: asked.append(f"stop {gang_id}"), raising=False)
    monkeypatch.setattr(crew, "retire", lambda gang_id: asked.append(f"retire {gang_id}"), raising=False)
    crew._gangs = {
        i: _Gang(i, nodes, None, [], [], state=state)
        for i, (nodes, state) in enumerate([(("a",), "busy"), (("a", "b"), "busy"), (("b",), "busy"), (("a",), "idle")])
    }
    crew._follow_nodes()
    assert crew.nodes == {"a": 2, "b": 2} and asked == []
    leaving.add("a")
    crew._follow_nodes()
    assert crew.nodes == {"b": 2} and crew.slots == 2
    assert asked == ["stop 0", "stop 1", "retire 3"]
    assert crew.poll(0) == [GangLost(3, "its node has left the cluster", node_lost=True)]
