"""From the folder of a study to tables: what every cell did, what was measured, where it stands. Reads records only.

Works while a study is unfinished: a cell without a record has a row all the same, so that none is lost by being absent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
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
ANSWERS = {"id": pl.String, "metric": pl.String, "answers": pl.Int64}
RUNS = {
    "id": pl.String, "job_id": pl.String, "arm": pl.String, "size": pl.String, "data": pl.String,
    "budget_tokens": pl.Int64, "seed": pl.Int64, "params": pl.Int64, "non_embedding_params": pl.Int64,
    "state": pl.String, "cause": pl.String, "attempts": pl.Int64, "tokens_done": pl.Int64,
    "flops_per_token": pl.Float64, "train_loss": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class Results:
    """The tables of one study.

    study: study.json. runs: a row a cell, with its final metrics as further columns; flops_per_token: of training,
    as planned. metrics: a row a value (id, step, tokens, source, metric, value), null where it was not finite. heads:
    (id, tokens, source, layer, head, score). answers: (id, metric, answers behind each value of it), where recorded.
    """

    folder: Path
    study: dict[str, Any]
    runs: pl.DataFrame
    metrics: pl.DataFrame
    heads: pl.DataFrame
    answers: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=ANSWERS))

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
    current = [measure["identity"] for measure in study.get("measures", [])]
    tables, heads = [], []
    answers: list[dict[str, Any]] = []
    stored: list[tuple[Path, str]] = []
    for cell in study["cells"]:
        job = folder / "jobs" / cell["job_id"]
        if _is_current(job):
            stored.append((job / "record.parquet", cell["id"]))
            lines = record.read_with_rows(job / "record.jsonl")
        else:
            lines = record.read(job / "record.jsonl")
            tables.append(record.table(lines).with_columns(id=pl.lit(cell["id"])))
        kept = [line for line in lines if "metrics" in line and line.get("measurement") in {*current, None}]
        heads += [row for line in kept for row in _head_rows(cell["id"], line)]
        answers += _answers(cell["id"], kept)
    metrics = _metrics(tables, stored, current)
    results = Results(
        folder, study, _runs(study["cells"], jobs, metrics), metrics, pl.DataFrame(heads, schema=HEADS),
        pl.DataFrame(answers, schema=ANSWERS),
    )  # fmt: skip
    _write(results)
    return results


def _is_current(job: Path) -> bool:
    """Whether the job's Parquet holds all of its record: it is written after the last line."""
    lines, table = job / "record.jsonl", job / "record.parquet"
    return table.exists() and lines.exists() and table.stat().st_mtime_ns >= lines.stat().st_mtime_ns


def _metrics(tables: list[pl.DataFrame], stored: list[tuple[Path, str]], current: list[str]) -> pl.DataFrame:
    parts = [pl.LazyFrame(schema=METRICS)]
    of_this = pl.col("measurement").is_null() | pl.col("measurement").is_in(current)
    parts += [table.lazy().filter(of_this).select(list(METRICS)) for table in tables]
    if stored:
        # One scan of all files: a frame a file costs more than its rows.
        cells = pl.LazyFrame({"path": [str(path) for path, _ in stored], "id": [cell for _, cell in stored]})
        scan = pl.scan_parquet([path for path, _ in stored], include_file_paths="path")
        parts.append(scan.filter(of_this).join(cells, on="path", maintain_order="left").select(list(METRICS)))
    return pl.concat(parts).collect()


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


def _answers(cell: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many answers stand behind each accuracy; held-out documents are the same at every evaluation."""
    found = {
        f"{line['source']}/accuracy/{row['bucket']}": row["answers"]
        for line in lines
        for row in line.get("rows") or []
        if {"bucket", "answers"} <= row.keys()
    }
    return [{"id": cell, "metric": metric, "answers": count} for metric, count in found.items() if count]


def _runs(cells: list[dict[str, Any]], jobs: dict[str, JobRow], metrics: pl.DataFrame) -> pl.DataFrame:
    """A row a cell, with the final value of every metric measured; a final loss that is not finite is null."""
    last = pl.col("value").sort_by("step", maintain_order=True).tail(FINAL_LOSS_LINES)
    losses = (
        metrics.filter(pl.col("metric") == "train/loss")
        .group_by("id")
        .agg(train_loss=pl.when(last.null_count() == 0).then(last.mean()))
    )
    # A measurement made later stands behind lines of later steps.
    measured = metrics.filter(pl.col("source") != "train").sort("step", maintain_order=True)
    final = measured.group_by("id", "metric", maintain_order=True).last()
    names = final["metric"].unique(maintain_order=True).to_list()
    rows = [
        {key: cell[key] for key in RUNS if key in cell}
        | {"state": "pending", "cause": None, "attempts": 0, "tokens_done": 0, "flops_per_token": None}
        | ({key: getattr(job, key) for key in ("state", "cause", "attempts", "tokens_done")} if job else {})
        | ({"flops_per_token": job.flops / job.tokens} if job and job.tokens and job.kind == "train" else {})
        for cell, job in ((cell, jobs.get(cell["job_id"])) for cell in cells)
    ]
    runs = pl.DataFrame(rows, schema={key: kind for key, kind in RUNS.items() if key != "train_loss"})
    runs = runs.join(losses, on="id", how="left", maintain_order="left")
    if names:
        wide = final.pivot("metric", index="id", values="value")
        runs = runs.join(wide.select("id", *names), on="id", how="left", maintain_order="left")
    return runs


def _write(results: Results) -> None:
    folder = results.folder / "results"
    folder.mkdir(exist_ok=True)
    for name, table in (("runs", results.runs), ("metrics", results.metrics), ("heads", results.heads)):
        partial = folder / f".{name}.parquet"
        table.write_parquet(partial)
        partial.replace(folder / f"{name}.parquet")  # a reader never sees half a table
