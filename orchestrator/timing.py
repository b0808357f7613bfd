"""How well a study used its machine, from the attempts in the ledger."""

from collections import Counter
from collections.abc import Collection

from orchestrator.ledger import Ledger


def timing(ledger: Ledger, job_ids: Collection[str] | None = None) -> dict[str, float | None]:
    """How well the machine was used, in seconds, over the jobs named (default all).

    makespan_s: over driver sessions, from the session's start (start-up counts) to its last job's end.
    busy_core_s: training and measuring × workers. lower_bound_s: busy_core_s / slots, or the longest job if greater.
    overhead_s_per_job: mean over jobs run by a warm gang of the time that gang and job were both available, less busy.
    None where nothing has run.
    """
    rows = [
        row
        for row in ledger.query(
            "SELECT attempts.*, jobs.workers, sessions.started AS session_started, sessions.slots, sessions.seen"
            " FROM attempts JOIN jobs ON jobs.id = attempts.job_id JOIN sessions ON sessions.id = attempts.session"
        )
        if job_ids is None or row["job_id"] in job_ids
    ]
    if not rows:
        return dict.fromkeys(("makespan_s", "busy_core_s", "lower_bound_s", "overhead_s_per_job"))
    last_end: dict[int, tuple[float, float]] = {}
    longest: Counter[str] = Counter()
    for row in rows:
        ended = row["seen"] if row["ended"] is None else row["ended"]
        started, previous = last_end.get(row["session"], (row["session_started"], row["session_started"]))
        last_end[row["session"]] = (started, max(previous, ended))
        longest[row["job_id"]] += row["busy_s"]
    busy = sum(row["busy_s"] * row["workers"] for row in rows)
    overheads = [
        row["ended"] - row["available"] - row["busy_s"] for row in rows if row["warm"] and row["state"] == "finished"
    ]
    return {
        "makespan_s": sum(end - start for start, end in last_end.values()),
        "busy_core_s": busy,
        "lower_bound_s": max(busy / max(row["slots"] for row in rows), max(longest.values())),
        "overhead_s_per_job": sum(overheads) / len(overheads) if overheads else None,
    }
