"""`gridlaw ui`: MLflow's pages over the studies' store, in this process alone."""

import contextlib
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.mlflow_store import default_uri, settle

PORTS = 20


def serve(
    root: Path,
    port: int = 5000,
    host: str = "127.0.0.1",
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Serves the runs of every study under `root` until Ctrl-C or SIGTERM. Tells the address once it is listened on.

    port: the first one tried; when it is taken the next free one, of 20, is used. Raises InputError where no study has
    run under `root` or no port is free.
    """
    if not (root / "mlflow.db").exists():
        raise InputError(f"--root: no studies under {root}; run one first (gridlaw run STUDY) or give another root")
    listening = listen(host, port)
    used = listening.getsockname()[1]
    tell(f"MLflow is starting on the studies under {root} …")
    settle()
    # MLflow's server reads its settings from the environment. Its own command would add two layers of child processes
    # and a job runner, which a kill of the parent leaves behind; the application needs neither.
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR, SERVE_ARTIFACTS_ENV_VAR

    os.environ[BACKEND_STORE_URI_ENV_VAR] = default_uri(root)
    os.environ[ARTIFACT_ROOT_ENV_VAR] = (root.resolve() / "mlartifacts").as_uri()
    os.environ[SERVE_ARTIFACTS_ENV_VAR] = "false"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    with warnings.catch_warnings(action="ignore"):
        import uvicorn
        from mlflow.server.fastapi_app import app

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
    address = f"http://[{host}]:{used}" if ":" in host else f"http://{host}:{used}"
    for study, place in studies(root):
        tell(f"{study}: {address}/{place}")
    tell(f"all studies: {address}/#/experiments?workflowType=machine_learning  (Ctrl-C ends it)")
    with listening, contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after an orderly end
        server.run(sockets=[listening])


def studies(root: Path) -> list[tuple[str, str]]:
    """Each study under a root and where its page lies, charts over tokens beside the cells by name.

    Sorted by anything but the time, MLflow lists a study's cells at once, not folded away under the study's own run.
    """
    from mlflow.tracking import MlflowClient

    by_name = "compareRunsMode=CHART&orderByKey=tags.%60mlflow.runName%60&orderByAsc=true"
    page = f"#/experiments/{{}}/runs?workflowType=machine_learning&{by_name}"
    there = MlflowClient(tracking_uri=default_uri(root)).search_experiments(order_by=["name ASC"])
    return [(each.name, page.format(each.experiment_id)) for each in there if each.experiment_id != "0"]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on the first free port from `port` on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + PORTS, 65536)):
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just left is free
        try:
            taken.bind((host, candidate))
            taken.listen(128)
        except OSError as error:
            taken.close()
            refusal = error.strerror
        else:
            return taken
    raise InputError(f"--port: {port} and those after it cannot be listened on at {host} ({refusal}); give another")
