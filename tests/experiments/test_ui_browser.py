"""`gridlaw ui` serves pages that open in a browser, on a free port, and leaves nothing behind."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from experiments.ui import listen, serve
from orchestrator.errors import InputError
from orchestrator.replay import Replay
from orchestrator.tracked_runs import CellState
from orchestrator.tracking import log_report

CELLS = {
    "aaaaaaaaaaaa": CellState("finished", None, 1),
    "bbbbbbbbbbbb": CellState("diverged", "loss: NaN at step 70", 1),
}
NAMES = ["swa-8 laptop 1.8M seed 0", "swa-8 laptop 1.8M seed 1"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study root with a store made from the records of two cells, the second diverged after 60 steps."""
    root = tmp_path_factory.mktemp("studies") / "Läufe und mehr"
    document = {
        "name": "tiny",
        "arms": [{"name": "swa-8", "pattern": "swa-8 full", "positions": "rope"}],
        "recipe": {"learning_rate": 0.02},
        "cells": [
            {"id": cell, "arm": "swa-8", "size": "laptop", "data": "recall", "budget_tokens": 1_843_200, "seed": seed}
            | {"params": 143_000, "non_embedding_params": 131_000, "job_id": cell}
            for seed, cell in enumerate(CELLS)
        ],
    }
    for cell, last in zip(CELLS, (900, 60), strict=True):
        job = root / "tiny/jobs" / cell
        job.mkdir(parents=True)
        (job / "config.json").write_text(json.dumps({"d_model": 64}))
        with (job / "record.jsonl").open("w") as record:
            for step in range(10, last + 1, 10):
                metrics = {"train/loss": 3 / step + 1, "recall/accuracy/beyond-128": step / 1000}
                line = {"step": step, "tokens": step * 2048, "time": 1_764_559_865 + step, "metrics": metrics}
                record.write(json.dumps(line) + "\n")
    (root / "tiny/study.json").write_text(json.dumps(document))
    Replay(root, document, None).deliver(CELLS, leaving=True, go_on=lambda: True)
    report = root / "tiny/report"
    (report / "figures").mkdir(parents=True)
    (report / "figures/emergence.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>")
    assert log_report(root, "tiny", report) is None
    return root


@contextmanager
def served(root: Path, port: int) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """The user interface as a process of its own, and the addresses it told: by study, and "all studies"."""
    program = f"from pathlib import Path; from experiments.ui import serve; serve(Path({str(root)!r}), {port})"
    server = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        told: dict[str, str] = {}
        while "all studies" not in told:
            line = server.stderr.readline()
            assert line, "it ended without an address"
            if found := re.match(r"(.+): (http://\S+)", line):
                told[found[1]] = found[2]
        yield psutil.Process(server.pid), told
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        assert "Traceback" not in server.stderr.read()
    finally:
        server.kill()
        server.wait(20)


def page(address: str, folder: Path, name: str) -> str:
    """The rendered document at an address, and a screenshot of it in `folder`. Needs Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1500,900", "--virtual-time-budget=40000"]
    shot = subprocess.run(
        [*command, f"--screenshot={folder / name}.png", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return shot.stdout


def test_no_studies_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"no studies under {re.escape(str(tmp_path))}"):
        serve(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_taken_port_gives_way_to_the_next() -> None:
    with listen("127.0.0.1", 5400) as first, listen("127.0.0.1", 5400) as second:
        assert second.getsockname()[1] > first.getsockname()[1] >= 5400


@pytest.mark.browser
def test_pages_open_in_a_browser(root: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 5420))), served(root, 5420) as (server, told):
        assert set(told) == {"tiny", "all studies"}
        assert ":5420" not in told["tiny"]
        listening = [each.laddr.ip for each in server.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]
        study = page(told["tiny"], tmp_path, "study")
        for name in NAMES:
            assert name in study
        assert "recall/accuracy" in study
        address = told["tiny"].partition("/#")[0]
        store = f"{address}/ajax-api/2.0/mlflow/runs/search"
        query = urllib.request.Request(
            store, b'{"experiment_ids": ["1"]}', headers={"Content-Type": "application/json", "Origin": address}
        )
        with urllib.request.urlopen(query, timeout=20) as found:
            runs = {run["info"]["run_name"]: run["info"]["run_id"] for run in json.load(found)["runs"]}
        run_pages = f"{address}/#/experiments/1/runs"
        overview = page(f"{run_pages}/{runs[NAMES[1]]}", tmp_path, "run")
        over_tokens = page(f"{run_pages}/{runs[NAMES[0]]}/model-metrics", tmp_path, "metrics")
        configuration = page(f"{run_pages}/{runs[NAMES[0]]}/artifacts/config.json", tmp_path, "configuration")
        figure = page(f"{run_pages}/{runs['tiny']}/artifacts/report/figures/emergence.svg", tmp_path, "figure")
        assert "tiny" in page(told["all studies"], tmp_path, "all")
        for words in (NAMES[1], "Failed", "train/loss", "recipe.learning_rate", "0.02", "loss: NaN at step 70"):
            assert words in overview
        assert "1.5M" in over_tokens, "the step axis is tokens: steps end at 900"
        assert "d_model" in configuration
        assert "report/figures/emergence.svg" in figure
        began = time.monotonic()
        children = server.children(recursive=True)
    assert time.monotonic() - began < 10
    assert not children
