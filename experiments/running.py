"""A plan carried out under the user's eyes: events, a live table, what waits for MLflow, the report at the end."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from experiments import status as standing
from orchestrator.errors import InputError
from orchestrator.submit import Submission, submit

if TYPE_CHECKING:
    from orchestrator.driver import Event
    from orchestrator.fleet import FleetOptions
    from orchestrator.plan import Plan


def carry_out(
    plan: "Plan",
    source: Path,
    fleet: "FleetOptions",
    look: standing.Look,
    console: Console,
    tracking_uri: str | None,
    started: float,
) -> tuple[Submission, Path | None]:
    """What became of it, and the report; none where the run was stopped or there is nothing to report on yet."""
    root, name = plan.folder.parent, plan.study.name
    live = console.is_terminal and bool(plan.jobs)
    with standing.following(look, console) if live else contextlib.nullcontext():
        submission = submit(
            plan,
            source,
            fleet,
            tracking_uri=tracking_uri,
            on_event=lambda event: _tell(event, look, console, live),
            started=started,
        )
    if submission.waiting and submission.waiting.points:
        text = f"{submission.waiting.points} points wait for MLflow ({submission.waiting.reason}); run again to send"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    for cause in submission.result.causes if submission.result else []:
        console.print(Text(cause, style="red"), soft_wrap=True)
    if was_stopped(submission):
        return submission, None
    written = _write_report(name, root, console)
    if written and submission.ran:
        _track_report(written, name, root, tracking_uri, console)
    return submission, written


def was_stopped(submission: Submission) -> bool:
    """By a signal."""
    return submission.result is not None and submission.result.stopped_by is not None


def _tell(event: "Event", look: Callable[[], dict[str, Any]], console: Console, live: bool) -> None:
    """A line for what happened; beside a live table only for what the table does not show."""
    if live and event.kind in ("started", "finished"):
        return
    from experiments import show

    console.print(Text(show.event(event.kind, event.job_id, event.text, look())), soft_wrap=True)


def _write_report(name: str, root: Path, console: Console) -> Path | None:
    from analysis import report as reporting

    try:
        return reporting.write(root, name)
    except InputError as error:
        console.print(Text(f"no report: {error}", style="yellow"), soft_wrap=True)
        return None


def _track_report(written: Path, name: str, root: Path, tracking_uri: str | None, console: Console) -> None:
    from orchestrator.tracking import log_report

    reason = log_report(root, name, written.parent, tracking_uri)
    if reason:
        console.print(Text(f"the report is not in MLflow: {reason}", style="yellow"), soft_wrap=True)
