"""From the folder of a study to tables: what every cell did, what was measured, where it stands. Reads records only.

Works while a study is unfinished: a cell without a record has a row all the same, so that none is lost by being absent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from orchestrator import record
from orchestrator.ledger import JobRow, Ledger
from orchestrator.plan import stored_document

FINAL_LOSS_LINES = 10  # one batch is noisy: the final training loss is the mean over the last logged lines

METRICS = {
    "id": pl.String, "step": pl.Int64, "tokens": pl.Int64, "source": pl.String, "metric": pl.String,
    "value": pl.Float64,
}  # fmt: skip
HEADS = {
    "id": pl.String, "tokens": pl.Int64, "source": pl.String, "layer": pl.Int64, "head": pl.Int64, "score": pl.Float64,
}  # fmt: skip
RUNS = {
    "id": pl.String, "job_id": pl.String, "arm": pl.String, "size": pl.String, "data": pl.String,
    "budget_tokens": pl.Int64, "seed": pl.Int64, "params": pl.Int64, "non_embedding_params": pl.Int64,
    "state": pl.String, "cause": pl.String, "attempts": pl.Int64, "tokens_done": pl.Int64, "train_loss": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class Results:
    """The tables of one study.

    study: study.json. runs: a row a cell, with its final metrics as further columns. metrics: a row a value (id, step,
    tokens, source, metric, value), null where it was not finite. heads: (id, tokens, source, layer, head, score).
    """

    folder: Path
    study: dict[str, Any]
    runs: pl.DataFrame
    metrics: pl.DataFrame
    heads: pl.DataFrame

    @property
    def arms(self) -> tuple[str, ...]:
        """Names, in the order of the study."""
        return tuple(arm["name"] for arm in self.study["arms"])

    def counts(self) -> dict[str, int]:
        """Cells in each state."""
        return dict(self.runs.group_by("state").len().sort("state").iter_rows())


def collect(root: Path | str, name: str) -> Results:
    """Reads the records of the study `name` under `root` and writes results/{runs,metrics,heads}.parquet.

    Raises InputError where the study is unknown or its study.json cannot be read.
    """
    folder = Path(root) / name
    study = stored_document(Path(root), name)
    jobs = _jobs(folder / "ledger.db")
    current = {measure["identity"] for measure in study.get("measures", [])}
    runs: list[dict[str, Any]] = []
    metrics = [pl.DataFrame(schema=METRICS)]
    heads: list[dict[str, Any]] = []
    for cell in study["cells"]:
        lines = record.read(folder / "jobs" / cell["job_id"] / "record.jsonl")
        kept = [line for line in lines if "metrics" in line and line.get("measurement") in current | {None}]
        mine = record.table(kept).with_columns(id=pl.lit(cell["id"])).select(list(METRICS))
        metrics.append(mine)
        heads += [row for line in kept for row in _head_rows(cell["id"], line)]
        runs.append(_run(cell, jobs.get(cell["job_id"]), mine))
    results = Results(folder, study, _runs_table(runs), pl.concat(metrics), pl.DataFrame(heads, schema=HEADS))
    _write(results)
    return results


def _jobs(ledger: Path) -> dict[str, JobRow]:
    """Jobs by id; none before the first run."""
    if not Ledger.is_at(ledger):
        return {}
    with Ledger.read(ledger) as open_ledger:
        return open_ledger.snapshot()


def _head_rows(cell: str, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in line.get("rows") or []:
        if {"layer", "head", "score"} <= row.keys():
            at = {"id": cell, "tokens": line["tokens"], "source": line["source"]}
            yield at | {key: row[key] for key in ("layer", "head", "score")}


def _run(cell: dict[str, Any], job: JobRow | None, metrics: pl.DataFrame) -> dict[str, Any]:
    # A measurement made later stands behind lines of later steps.
    in_order = metrics.sort("step", maintain_order=True).to_dicts()
    losses = [row["value"] for row in in_order if row["metric"] == "train/loss"][-FINAL_LOSS_LINES:]
    broken = not losses or any(loss is None for loss in losses)
    return {
        **{key: cell[key] for key in RUNS if key in cell},
        "state": job.state if job else "pending",
        "cause": job.cause if job else None,
        "attempts": job.attempts if job else 0,
        "tokens_done": job.tokens_done if job else 0,
        "train_loss": None if broken else sum(losses) / len(losses),
        **{row["metric"]: row["value"] for row in in_order if row["source"] != "train"},
    }


def _runs_table(runs: list[dict[str, Any]]) -> pl.DataFrame:
    measured = dict.fromkeys(key for run in runs for key in run if key not in RUNS)
    return pl.DataFrame(runs, schema=RUNS | dict.fromkeys(measured, pl.Float64))


def _write(results: Results) -> None:
    folder = results.folder / "results"
    folder.mkdir(exist_ok=True)
    for name, table in (("runs", results.runs), ("metrics", results.metrics), ("heads", results.heads)):
        partial = folder / f".{name}.parquet"
        table.write_parquet(partial)
        partial.replace(folder / f"{name}.parquet")  # a reader never sees half a table
