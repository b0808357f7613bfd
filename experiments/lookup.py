"""Which study is meant: a study file, or the name of a study under the root."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import InputError

if TYPE_CHECKING:
    from orchestrator.study import Study


def is_file(study: str) -> bool:
    return study.endswith(".py") or Path(study).is_file()


def study_of(study: str, root: Path) -> "tuple[Study, Path]":
    """A study and its file: the file given, or the one a study under the root was made from."""
    from orchestrator.plan import stored_document
    from orchestrator.study import load

    if is_file(study):
        return load(Path(study)), Path(study).resolve()
    source = Path(stored_document(root, study)["source"])
    if not source.is_file():
        raise InputError(f"study: {study} was made from {source}, which is gone; give the study file")
    return load(source), source


def name_of(study: str, root: Path) -> str:
    """The name of a study that has been run under the root."""
    from orchestrator.plan import stored_document

    name = study_of(study, root)[0].name if is_file(study) else study
    stored_document(root, name)
    return name


def cells_of(study: str, root: Path) -> tuple[str, Path, list[dict[str, Any]]]:
    """(name, folder, rows of the cells): of the study file where one is given, else of study.json."""
    from orchestrator.plan import stored_document
    from orchestrator.submit import make_plan

    if not is_file(study):
        return study, root / study, stored_document(root, study)["cells"]

    made = make_plan(study_of(study, root)[0], root, slots=1)
    return made.study.name, made.folder, made.as_json()["cells"]
