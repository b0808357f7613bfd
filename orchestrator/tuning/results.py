"""What tuning has found, as it lies on disk: STUDY/tuning/ARM@SIZE.json, written once, read by anybody at any time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tuning"


def read(study_folder: Path, name: str, group_id: str) -> dict[str, Any] | None:
    """The finding of a group, as `outcome.of_trials` and `of_law` made it; None before it is there.

    One of other trials, that a study file said before, is none.
    """
    try:
        found = json.loads((study_folder / FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        rate = found["rate"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not there, or no whole file: it is made again from the trials
    return found if found.get("id") == group_id and isinstance(rate, float) else None


def write(study_folder: Path, found: Mapping[str, Any]) -> None:
    path = study_folder / FOLDER / f"{found['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")
    partial.replace(path)


def of_cells(study_folder: Path, cells: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Group name → finding, of all that these cells need and that has been found, in the order of the cells.

    cells: rows of study.json or of a plan, whose `tuning` says which group gives their rate.
    """
    wanted = {cell["tuning"]["name"]: cell["tuning"]["id"] for cell in cells if cell.get("tuning")}
    found = {name: read(study_folder, name, group_id) for name, group_id in wanted.items()}
    return {name: each for name, each in found.items() if each is not None}


def tags(study_folder: Path, document: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What there is to say in the tracking store, by the id of a cell or a trial. document: study.json."""
    found = of_cells(study_folder, document["cells"])
    said: dict[str, dict[str, str]] = {}
    for cell in document["cells"]:
        each = found.get(cell["tuning"]["name"]) if cell.get("tuning") else None
        if each:
            said[cell["id"]] = {
                "learning_rate": f"{each['rate']:.6g}",
                "tuning": "; ".join(each["warnings"]) or "sound",
            }
    for trial in document.get("trials", []):
        each = found.get(trial["group"])
        if each:
            told = each["trials"][trial["number"]]
            said[trial["id"]] = {"learning_rate": f"{told['rate']:.6g}", "trial": told["state"]}
    return said


def sentence(found: Mapping[str, Any]) -> str:
    """One line for a reader: `full d16: learning rate 0.0123 (0.00977 to 0.0158), …`."""
    low, high = found["interval"]
    place = " ".join([found["arm"], found["size"], *([found["data"]] if found["name"].count("@") > 1 else [])])
    if found["law"]:
        law = found["law"]
        how = f"by LR ~ N^{law['slope']:.2f} over {len(law['points'])} sizes" + (
            "" if law["slope_ci"] else " (its interval: lines through both of theirs)"
        )
    else:
        states = [trial["state"] for trial in found["trials"]]
        parts = [f"{states.count(word)} {word}" for word in ("pruned", "failed") if word in states]
        how = f"the best of {len(states)} trials" + (f" ({', '.join(parts)})" if parts else "")
    return f"{place}: learning rate {found['rate']:.3g} ({low:.3g} to {high:.3g}), {how}"
