"""`gridlaw export`: a cell's weights in a folder that transformers loads."""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.show import count
from orchestrator.errors import InputError, shortened
from orchestrator.ledger import Ledger

SHORTEST_ID = 4
LISTED = 5


def choose(cells: Sequence[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """The one cell that `wanted` names: its id, the beginning of it, or words such as "swa-8 seed 0".

    A word is an arm, size, data condition, budget in tokens, or "seed N"; those in which no two cells differ may be
    left out. Raises InputError where no cell or several are named.
    """
    words = wanted.replace("seed ", "seed=").split()
    named = [cell for cell in cells if _is_begun(cell["id"], wanted) or (words and _names(cell) >= set(words))]
    if len(named) == 1:
        return named[0]
    listed = "; ".join(f"{cell['id']} ({_name(cell, cells)})" for cell in (named or cells)[:LISTED])
    more = ", …" if len(named or cells) > LISTED else ""
    found = f"names {len(named)} cells" if named else "names no cell of the study"
    raise InputError(f"cell: {shortened(wanted)!r} {found}; choose one by its id or words: {listed}{more}")


def _is_begun(cell_id: str, wanted: str) -> bool:
    return len(wanted) >= SHORTEST_ID and cell_id.startswith(wanted)


def _names(cell: dict[str, Any]) -> set[str]:
    budget = cell["budget_tokens"]
    return {cell["arm"], cell["size"], cell["data"], str(budget), count(budget), f"seed={cell['seed']}"}


def _name(cell: dict[str, Any], cells: Sequence[dict[str, Any]]) -> str:
    varying = [key for key in ("size", "data", "budget_tokens") if len({str(other[key]) for other in cells}) > 1]
    return " ".join([cell["arm"], *(str(cell[key]) for key in varying), f"seed {cell['seed']}"])


def export(
    study_folder: Path, cells: Sequence[dict[str, Any]], wanted: str, folder: Path, step: int | None = None
) -> dict[str, Any]:
    """Writes a cell's weights; the document of `gridlaw export --json`.

    study_folder: STUDY_ROOT/NAME. cells: those of its study.json. wanted: as `choose` reads it. folder: one that is not
    there, or empty. step: a kept checkpoint's; None for the end of a finished cell. Raises InputError, and then nothing
    has been written.
    """
    cell = choose(cells, wanted)
    _refuse_full(folder)
    state = _state(study_folder, cell["id"])
    if step is None and state != "finished":
        raise InputError(
            f"cell: {_name(cell, cells)} is {state}, not finished; run the study, or name a checkpoint with --step"
        )
    from model import export as exporting
    from model.lm import LanguageModel
    from model.mixers.table import config_from
    from orchestrator.training import checkpoint

    stored = {found.step: found for found in checkpoint.committed(study_folder / "jobs" / cell["id"] / "checkpoints")}
    if not stored:
        raise InputError(f"cell: {_name(cell, cells)} has no whole checkpoint; run the study to train it")
    if step is not None and step not in stored:
        raise InputError(f"--step: {step} is no checkpoint of the cell; it has {', '.join(map(str, stored))}")
    chosen = stored[max(stored) if step is None else step]
    document = cell["identity"]
    model = LanguageModel(config_from(document["model"]))
    checkpoint.load_weights(chosen, model)
    source = {
        "study": study_folder.name,
        **{key: cell[key] for key in ("id", "arm", "size", "data", "seed")},
        "step": chosen.step,
        "tokens": cell["budget_tokens"] * chosen.step // document["steps"],
    }
    with _whole(folder) as partial:
        exporting.write(model, partial, source)
    return {"folder": str(folder), **source, "params": cell["params"]}


def _state(study_folder: Path, cell_id: str) -> str:
    """Where the cell's training stands, by the ledger."""
    if not Ledger.is_at(study_folder / "ledger.db"):
        return "not run"
    with Ledger.read(study_folder / "ledger.db") as ledger:
        row = ledger.snapshot([cell_id]).get(cell_id)
    return "not run" if row is None else row.state


def _refuse_full(folder: Path) -> None:
    try:
        free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise InputError(f"folder: {folder} is not usable ({error.strerror}); give another") from None
    if not free:
        raise InputError(f"folder: {folder} is there and not empty; give a new one")


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write in that becomes `folder` at the end, or goes away."""
    absent = [path for path in folder.absolute().parents if not path.exists()]
    partial = folder.absolute().with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)  # over an empty folder too
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for path in absent:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"folder: {folder} cannot be written ({error.strerror}); give another") from None
        raise


def show(document: dict[str, Any]) -> str:
    return (
        f"{document['folder']}: {document['arm']} seed {document['seed']} after {count(document['tokens'])} tokens "
        f"(step {document['step']}); load it with\n"
        f"AutoModelForCausalLM.from_pretrained({document['folder']!r}, trust_remote_code=True)"
    )
