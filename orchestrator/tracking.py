"""MLflow beside a running driver: a thread that replays records, and never in the way of what trains."""

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.replay import Replay
from orchestrator.tracked_runs import CellState

POLL_S = 2.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Pending:
    """What the store does not have yet. points: metric values; reason: why, None when the store has everything."""

    points: int
    reason: str | None


class Tracker:
    """Keeps MLflow up to date from a thread of its own while a driver runs. No method waits for the store but `stop`.

    root: the study root. document: the study's study.json. tracking_uri: None for the studies' own store.
    """

    def __init__(self, root: Path, document: Mapping[str, Any], tracking_uri: str | None = None) -> None:
        self._replay = Replay(root, document, tracking_uri)
        self._states: Mapping[str, CellState] = {}
        self._reason: str | None = None
        self._leaving = threading.Event()
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)

    def start(self) -> None:
        """Starts delivering in the background."""
        self._thread.start()

    def update(self, states: Mapping[str, CellState]) -> None:
        """Tells where the cells stand; cells not named are pending."""
        self._states = dict(states)

    def stop(self, timeout_s: float) -> Pending:
        """Delivers what is left, at most for `timeout_s`, and leaves no run RUNNING; what could not be delivered.

        What is pending stays on disk, and the next tracker of this study delivers it.
        """
        self._deadline = time.monotonic() + timeout_s
        self._leaving.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._replay.is_done(self._states):
            return Pending(0, None)
        late = f"the tracking store did not answer in {timeout_s:g} s"
        never = "the run ended before the store was opened"
        return Pending(self._replay.waiting(), self._reason or (late if self._thread.ident else never))

    def _run(self) -> None:
        pause = 0.0
        while not self._leaving.wait(pause):
            began = time.monotonic()
            if self._pass(leaving=False):
                pause = max(POLL_S, 4 * (time.monotonic() - began))
            else:
                pause = min(LONGEST_PAUSE_S, max(POLL_S, 2 * pause))
        # A store may be locked for a moment by another program: the last pass gets a second try.
        if not self._pass(leaving=True) and time.monotonic() < self._deadline:
            time.sleep(0.5)
            self._pass(leaving=True)

    def _pass(self, leaving: bool) -> bool:
        try:
            self._replay.deliver(self._states, leaving, lambda: time.monotonic() < self._deadline)
        except Exception as error:  # whatever the store does must not reach the training
            self._reason = in_words(error, self._replay.uri)
            self._replay.forget_store()
            return False
        self._reason = None
        return True


def up_to_date(
    root: Path, document: Mapping[str, Any], states: Mapping[str, CellState], tracking_uri: str | None = None
) -> bool:
    """Whether the store has everything of a study, by the notes on disk: no MLflow is imported, no store opened."""
    return Replay(root, document, tracking_uri).is_done(states)


def log_report(root: Path, study: str, report_folder: Path, tracking_uri: str | None = None) -> str | None:
    """Stores a report's files with the study's own run, under "report"; why it could not, None when it did."""
    document = json.loads((root / study / "study.json").read_text())
    try:
        store, run_id = Replay(root, document, tracking_uri).open_parent()
        store.log_folder(run_id, report_folder, "report")
    except Exception as error:  # the report is on disk; a tracking server must not fail the command
        return in_words(error, tracking_uri or "the studies' own store")
    return None


def in_words(error: Exception, place: str) -> str:
    """One line on why a store failed. place: its URI."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "ConnectionPool" not in text and "Connection aborted" not in text:
        return text[:300]
    known = ("Connection refused", "timed out", "Connection reset", "Failed to resolve", "closed connection")
    return f"{place} cannot be reached ({next((words for words in known if words in text), 'no connection')})"
