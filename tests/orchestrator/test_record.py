"""A record holds every measurement once, whatever interrupts its writer."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from orchestrator.errors import InputError
from orchestrator.record import RecordWriter, exclusive, read, table, to_parquet


def write(path: Path, upto: int) -> None:
    writer = RecordWriter(path, tokens_per_step=8)
    for step in range(1, upto + 1):
        writer.measured(step, "train", {"train/loss": 1 / step})
    writer.close()


def test_lines_have_the_documented_form(tmp_path: Path) -> None:
    path = tmp_path / "job" / "record.jsonl"
    writer = RecordWriter(path, tokens_per_step=2048)
    writer.event(0, "started")
    writer.measured(10, "train", {"train/loss": np.float32(3.25), "train/tokens_per_second": 24000.0})
    writer.measured(60, "recall", {"recall/accuracy/1-8": math.nan}, "abc", [{"layer": np.int64(1), "score": 0.5}])
    writer.close()
    started, train, recall = read(path)
    assert (started["event"], started["cause"], started["tokens"]) == ("started", None, 0)
    assert train["tokens"] == 20480
    assert train["metrics"] == {"train/loss": 3.25, "train/tokens_per_second": 24000.0}
    assert recall["measurement"] == "abc"
    assert recall["metrics"] == {"recall/accuracy/1-8": None}
    assert recall["rows"] == [{"layer": 1, "score": 0.5}]


@pytest.mark.parametrize("torn", [b'{"step": 4, "tok', b'{"step": 4, "tok\n', b"\x00\x00\x00", b"\x00\x00\n"])
def test_a_torn_last_line_is_ignored_and_then_cut(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "record.jsonl"
    write(path, 3)
    with path.open("ab") as file:
        file.write(torn)
    assert [line["step"] for line in read(path)] == [1, 2, 3]
    write(path, 5)
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("damage", ['"step": oops', '"step": "2"', '"pets": 2', '"metrics": {"loss": "x"}, "step": 2'])
def test_damage_inside_a_record_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "record.jsonl"
    write(path, 3)
    text = path.read_text()
    if "metrics" in damage:
        text = text.replace('"metrics"', '"was"')
    path.write_text(text.replace('"step": 2', damage))
    with pytest.raises(InputError, match=r"record\.jsonl:[12]: no line of a record; restore the file, or delete"):
        read(path)


def test_what_the_record_holds_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path, 3)
    writer = RecordWriter(path, tokens_per_step=8)
    assert writer.holds("train", 3)
    assert not writer.holds("train", 3, "other")
    writer.measured(3, "train", {"train/loss": 0.0})
    writer.measured(3, "train", {"train/loss": 0.0}, "other")
    writer.close()
    assert [(line["step"], line.get("measurement")) for line in read(path)][2:] == [(3, None), (3, "other")]


def test_the_table_is_long(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    writer = RecordWriter(path, tokens_per_step=8)
    writer.event(0, "started")
    writer.measured(2, "recall", {"recall/accuracy/1-8": 0.5, "recall/loss/1-8": math.inf}, "abc", [{"fact": 1}])
    writer.close()
    to_parquet(path, tmp_path / "record.parquet")
    stored = pl.read_parquet(tmp_path / "record.parquet")
    assert stored.equals(table(read(path)))
    assert stored.columns == ["step", "tokens", "time", "source", "measurement", "metric", "value"]
    assert stored.select("tokens", "metric", "value").rows() == [
        (16, "recall/accuracy/1-8", 0.5),
        (16, "recall/loss/1-8", None),
    ]
    assert table([]).columns == stored.columns


def test_one_process_at_a_time_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    hold = (
        f"import sys, time; sys.path.insert(0, {root!r})\n"
        "from pathlib import Path; from orchestrator.record import exclusive\n"
        f"with exclusive(Path({str(tmp_path)!r})):\n    print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError, match="another process has held this job"), exclusive(tmp_path, wait_s=0.3):
        pass
    other.kill()
    other.wait()
    with exclusive(tmp_path, wait_s=1.0):
        pass
