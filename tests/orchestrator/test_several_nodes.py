"""A study on several Ray nodes: gangs across nodes, a node that dies, one that is told to go."""

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

sys.path.append(str(Path(__file__).parent))
from commands import Command, is_under_way, losses, rows

from orchestrator import fleet
from orchestrator.fleet import Fleet, FleetOptions

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.drill]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head that trains nothing and three nodes of one CPU each."""
    monkeypatch.setitem(os.environ, "RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes(60)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def works(node: Any) -> bool:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any("ray::Worker" in " ".join(child.cmdline()) for child in raylet.children())


def test_a_gang_across_two_nodes_outlives_one_of_them(
    nodes: Cluster, make_study: Callable[..., Path], tmp_path: Path
) -> None:
    root, whole = tmp_path / "root", tmp_path / "whole"
    command = Command(make_study(workers=2), root, "--address", nodes.address)
    command.wait_for(is_under_way(root, 100))
    at_work = [node for node in nodes.worker_nodes if works(node)]
    assert len(at_work) == 2, "the gang has a worker on each of two nodes"
    nodes.remove_node(at_work[0], allow_graceful=False)
    output = command.ends(400)
    assert command.process.returncode == 0, output
    assert sorted(rows(root, "SELECT state, attempts FROM jobs")) == [("finished", 1), ("finished", 2)]
    undisturbed = Command(make_study(workers=2), whole)
    output = undisturbed.ends()
    assert undisturbed.process.returncode == 0, output
    for job_id, points in losses(whole).items():
        assert dict(losses(root)[job_id]) == pytest.approx(dict(points), rel=1e-6)


def test_room_is_requested_and_released(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = fleet.request_resources

    def noted(**wanted: Any) -> None:
        asked.append(wanted["bundles"])
        real(**wanted)

    monkeypatch.setattr(fleet, "request_resources", noted)
    with Fleet(FleetOptions(address=nodes.address)) as crew:
        assert sorted(crew.nodes.values()) == [1, 1, 1]
        crew.request(workers=2, widest=2)
        wide = nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        crew.request(workers=5, widest=5)
        assert crew.slots == 5
        nodes.remove_node(wide, allow_graceful=False)
        deadline = time.monotonic() + 60
        while crew.slots == 5 and time.monotonic() < deadline:
            crew.progress()
            time.sleep(0.5)
        assert sorted(crew.nodes.values()) == [1, 1, 1]
    assert asked == [[{"CPU": 1.0}] * 2, [{"CPU": 1.0}] * 5, []]
