import json

import polars as pl
import pytest

from analysis.results import collect
from orchestrator.errors import InputError

from .conftest import FakeArm, Write


def test_every_cell_has_a_row_whatever_became_of_it(write_study: Write) -> None:
    results = collect(write_study(), "laziness")
    assert results.counts() == {"diverged": 1, "failed": 1, "finished": 12, "running": 1}
    runs = results.runs
    assert runs.height == 15
    diverged = runs.row(by_predicate=pl.col("state") == "diverged", named=True)
    assert diverged["cause"] == "loss is not finite at step 420" and diverged["train_loss"] is None
    assert diverged["tokens_done"] == 420 * 2048
    finished = runs.filter(pl.col("state") == "finished")
    assert finished["train_loss"].is_finite().all() and finished["recall/accuracy/beyond-128"].is_finite().all()
    for name, table in (("runs", runs), ("metrics", results.metrics), ("heads", results.heads)):
        assert pl.read_parquet(results.folder / "results" / f"{name}.parquet").equals(table)


def test_heads_keep_layer_and_head(write_study: Write) -> None:
    heads = collect(write_study(), "laziness").heads
    assert set(heads["layer"]) == {1, 3} and set(heads["head"]) == {0, 1, 2, 3}
    assert heads.filter(pl.col("id") == "000000000000").height == 6 * 8


def test_an_unstarted_study_is_pending(write_study: Write) -> None:
    root = write_study((FakeArm("full", (0.8, 0.7)),))
    (root / "laziness" / "ledger.db").unlink()
    assert collect(root, "laziness").counts() == {"pending": 2}


def test_a_measurement_of_an_older_definition_is_left_out(write_study: Write) -> None:
    root = write_study((FakeArm("full", (0.8,)),))
    record = root / "laziness" / "jobs" / "000000000000" / "record.jsonl"
    old = {"step": 60, "tokens": 122880, "time": 1.0, "source": "recall", "measurement": "recall-0"}
    with record.open("a") as file:
        file.write(json.dumps({**old, "metrics": {"recall/accuracy/beyond-128": 0.77}, "rows": []}) + "\n")
        file.write('{"step": 910, "tok')  # a torn line is work in progress
    assert 0.77 not in set(collect(root, "laziness").metrics["value"])


def test_a_late_measurement_of_an_early_step_is_not_the_final_value(write_study: Write) -> None:
    root = write_study((FakeArm("full", (0.8,)),))
    before = collect(root, "laziness").runs["recall/accuracy/beyond-128"][0]
    line = {"step": 30, "tokens": 61440, "time": 1.0, "source": "recall", "measurement": "recall-1"}
    with (root / "laziness" / "jobs" / "000000000000" / "record.jsonl").open("a") as file:
        file.write(json.dumps({**line, "metrics": {"recall/accuracy/beyond-128": 0.01}, "rows": []}) + "\n")
    assert collect(root, "laziness").runs["recall/accuracy/beyond-128"][0] == before


def test_an_unknown_study_is_refused(write_study: Write) -> None:
    with pytest.raises(InputError, match="'nowhere' is neither a study file nor a study under"):
        collect(write_study(), "nowhere")
