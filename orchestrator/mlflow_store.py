"""The one file that talks to MLflow. Importing it costs nothing; opening a store costs seconds of one core."""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 1000  # metrics MLflow takes in one call
PARAMS = 100  # params, and tags, MLflow takes in one call
VALUE_CHARACTERS = 6000
CALL_SECONDS = 10

KIND = {"mlflow.experimentKind": "custom_model_development"}  # otherwise MLflow shows pages for chat traces

# A call to a dead server must fail in seconds (MLflow's own default: four minutes), whoever calls repeats it. Standard
# output may be one JSON document, so nothing of MLflow's is printed. Telemetry would open connections of its own.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(CALL_SECONDS),
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


@dataclass(frozen=True)
class Point:
    """One metric value. time_ms: when it was measured, milliseconds since 1970; tokens: the step axis in MLflow."""

    name: str
    value: float
    time_ms: int
    tokens: int


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it. tags: ours ("gridlaw.…"); status: MLflow's word."""

    run_id: str
    status: str
    tags: Mapping[str, str]


def default_uri(root: Path) -> str:
    """The studies' own store: SQLite in the study root, whatever characters its path has."""
    path = str(root.resolve() / "mlflow.db")
    if not set(path) & set("%?#"):
        return f"sqlite:///{path}"  # not escaped without need: MLflow makes the folder it reads in the text of the URI
    from sqlalchemy import URL

    return URL.create("sqlite", database=path).render_as_string()


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def settle() -> None:
    """Puts MLflow's settings in place where the user has none; to be called before MLflow is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def make_default(root: Path) -> str:
    """The URI of the studies' own store, which is made if it is not there.

    Making its tables takes seconds: a kill in between leaves a file MLflow never opens again, and two programs at it
    both fail. So one at a time makes it aside and moves it into place.
    """
    store = root / "mlflow.db"
    if store.exists():
        return default_uri(root)
    settle()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with (root / ".mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not store.exists():
            aside = root / ".mlflow-making"  # no study is called that
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            SqlAlchemyStore(default_uri(aside), (root.resolve() / "mlartifacts").as_uri()).engine.dispose()
            (aside / "mlflow.db").replace(store)
            shutil.rmtree(aside)
    return default_uri(root)


class MlflowStore:
    """One experiment of a tracking store. Every method raises what MLflow raises; each call ends within seconds.

    uri: a tracking URI (sqlite:///…, http://…). artifacts: where a store without a server keeps its files.
    """

    def __init__(self, uri: str, experiment: str, artifacts: Path) -> None:
        settle()
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            place = None if uri.startswith("http") else (artifacts.resolve() / experiment).as_uri()
            self._experiment = self._client.create_experiment(experiment, artifact_location=place, tags=KIND)
        else:
            self._experiment = found.experiment_id
            if found.lifecycle_stage == "deleted":
                self._client.restore_experiment(self._experiment)

    def runs(self) -> list[StoredRun]:
        """Every run of the experiment that is not deleted, oldest first."""
        runs: list[StoredRun] = []
        page: str | None = None
        while page != "":
            found = self._client.search_runs(
                [self._experiment], order_by=["attributes.start_time ASC"], max_results=BATCH, page_token=page
            )
            runs += [StoredRun(run.info.run_id, run.info.status, run.data.tags) for run in found]
            page = found.token or ""
        return runs

    def create_run(self, name: str, tags: Mapping[str, str], start_ms: int) -> str:
        """A new run, RUNNING; its id. The tags are there from the first moment, so that a later search finds it."""
        run = self._client.create_run(self._experiment, start_time=start_ms, tags=dict(tags), run_name=name)
        return str(run.info.run_id)

    def describe(self, run_id: str, name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """Sets name and tags, adds the params the run does not have: MLflow never changes a param once it is set."""
        from mlflow.entities import Param

        self._client.update_run(run_id, name=name)
        self.tag(run_id, tags)
        there = self._client.get_run(run_id).data.params
        new = [Param(key, str(value)[:VALUE_CHARACTERS]) for key, value in params.items() if key not in there]
        for some in _batches(new, PARAMS):
            self._client.log_batch(run_id, params=some)

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags, at most 100."""
        from mlflow.entities import RunTag

        self._client.log_batch(run_id, tags=[RunTag(key, value[:VALUE_CHARACTERS]) for key, value in tags.items()])

    def log(self, run_id: str, points: Iterable[Point]) -> None:
        """Stores points; one the run already holds (same name, value, time and tokens) is not stored again."""
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.time_ms, point.tokens) for point in points]
        for some in _batches(metrics, BATCH):
            self._client.log_batch(run_id, metrics=some)

    def set_status(self, run_id: str, status: str, end_ms: int) -> None:
        """Sets RUNNING, or an end status with the time it ended."""
        if status == "RUNNING":
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status, end_ms)

    def log_file(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Stores one file among the run's artifacts, in place of an earlier one of that name."""
        self._client.log_artifact(run_id, str(path), folder)

    def log_folder(self, run_id: str, path: Path, folder: str) -> None:
        """Stores the files of a folder, and of those below it, among the run's artifacts."""
        self._client.log_artifacts(run_id, str(path), folder)
