"""What MLflow shows of a study: which runs there are, what they are called, what they carry, how they end."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATUS = {"running": "RUNNING", "finished": "FINISHED", "diverged": "FAILED", "failed": "FAILED"}  # others: KILLED


@dataclass(frozen=True)
class CellState:
    """Where a cell stands: a state of the ledger, its cause, and the attempts made."""

    state: str
    cause: str | None = None
    attempts: int = 0

    @property
    def status(self) -> str:
        """MLflow's word for it. What waits or was stopped is KILLED: nothing that does not run is left RUNNING."""
        return STATUS.get(self.state, "KILLED")


@dataclass(frozen=True)
class Run:
    """One MLflow run to be: of a cell or trunk (job: the id), or the study's own (None). files: sent once there."""

    job: str | None
    name: str
    folder: Path
    tags: dict[str, str]
    params: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def is_cell(self) -> bool:
        return self.tags["gridlaw.kind"] == "cell"

    @property
    def record(self) -> Path:
        return self.folder / "record.jsonl"

    @property
    def digest(self) -> str:
        """Changes whenever the run has to be described anew."""
        return hashlib.sha256(json.dumps([self.name, self.tags, self.params]).encode()).hexdigest()[:12]


def budget_words(tokens: int) -> str:
    """Tokens to two digits, for reading: 1843200 is "1.8M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            digits = 1 if tokens < 10 * size else 0
            return f"{tokens / size:.{digits}f}".removesuffix(".0") + letter
    return str(tokens)


def run_names(document: Mapping[str, Any]) -> dict[str, str]:
    """Names of the cells' runs by cell id: "swa-8 laptop 1.8M seed 0", all different within a study."""
    several = len({cell["data"] for cell in document["cells"]}) > 1

    def name(cell: Mapping[str, Any], budget: str) -> str:
        data = [cell["data"]] if several else []
        return " ".join([cell["arm"], cell["size"], *data, budget, f"seed {cell['seed']}"])

    names = {cell["id"]: name(cell, budget_words(cell["budget_tokens"])) for cell in document["cells"]}
    times = Counter(names.values())
    exact = {cell["id"]: name(cell, str(cell["budget_tokens"])) for cell in document["cells"]}
    return {cell: exact[cell] if times[name] > 1 else name for cell, name in names.items()}


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; lists as JSON text."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def planned_runs(folder: Path, document: Mapping[str, Any]) -> tuple[Run, list[Run]]:
    """The study's run and its cells' runs. folder: STUDY_ROOT/NAME; document: study.json."""
    study, names = document["name"], run_names(document)
    arms = {arm["name"]: arm for arm in document["arms"]}
    version = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]
    about = {"gridlaw.study": study, "gridlaw.kind": "study", "gridlaw.version": version}
    parent = Run(None, study, folder, about, files=(folder / "study.json",))
    runs = []
    several = len({cell["data"] for cell in document["cells"]}) > 1
    for cell in document["cells"]:
        plain = {key: value for key, value in cell.items() if key not in ("id", "job_id", "identity", "trunk")}
        arm = {key: arms[cell["arm"]][key] for key in ("pattern", "positions")}
        resolved = {"recipe": document["recipe"], **cell.get("identity", {})}
        job = folder / "jobs" / cell["job_id"]
        tags = {
            "gridlaw.study": study,
            "gridlaw.kind": "cell",
            "gridlaw.cell": cell["id"],
            "gridlaw.job": cell["job_id"],
        }
        if cell.get("trunk"):
            tags["gridlaw.trunk"] = cell["trunk"]["id"]
        runs.append(
            Run(cell["id"], names[cell["id"]], job, tags, flatten({**resolved, **plain, **arm}), (job / "config.json",))
        )
    for trunk in document.get("trunks", []):
        tags = {"gridlaw.study": study, "gridlaw.kind": "trunk", "gridlaw.job": trunk["id"]}
        place = [trunk["arm"], trunk["size"], trunk["data"]] if several else [trunk["arm"], trunk["size"]]
        name = " ".join([*place, f"trunk to {budget_words(trunk['tokens'])} seed {trunk['seed']}"])
        plain = {key: value for key, value in trunk.items() if key != "id"}
        runs.append(Run(trunk["id"], name, folder / "jobs" / trunk["id"], tags, flatten(plain)))
    return parent, runs


def study_state(states: Mapping[str, CellState], runs: list[Run]) -> CellState:
    """Where a study stands once its driver has left."""
    there = [states.get(str(run.job), CellState("pending")).state for run in runs if run.is_cell]
    if all(state == "finished" for state in there):
        return CellState("finished")
    bad = sum(state in ("failed", "diverged") for state in there)
    left = sum(state not in ("finished", "failed", "diverged") for state in there)
    if left:
        return CellState("stopped", f"{left} of {len(there)} cells to go")
    return CellState("failed", f"{bad} of {len(there)} cells failed or diverged")
