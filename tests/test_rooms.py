"""Imports run downwards only: experiments → analysis → orchestrator → model."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("experiments", "analysis", "orchestrator", "model")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, first word of the imported module) of each import, type-checking ones and those in functions included."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (package[0] if node.level else (node.module or "").split(".")[0])


def departures(allowed: dict[str, set[str]]) -> list[str]:
    """Imports of a room that `allowed` does not list for the importing one."""
    found = []
    for path in FILES:
        room = path.relative_to(ROOT).parts[0]
        for line, name in imports(path):
            if name in ROOMS and name not in allowed[room]:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


def test_imports_run_downwards() -> None:
    allowed = {room: set(ROOMS[i:]) for i, room in enumerate(ROOMS)}
    assert departures(allowed) == []


def test_an_upward_import_is_seen() -> None:
    """The check itself: with downward imports forbidden it must find them."""
    assert departures({room: {room} for room in ROOMS})


def test_model_needs_torch_and_numpy_only() -> None:
    """Libraries of the extras are imported in one file each, where they are installed."""
    allowed = {"model", "torch", "numpy", *sys.stdlib_module_names}
    others = {
        "kernels.py": {"flash_attn", "fla", "triton"},
        "export.py": {"safetensors"},
        "modeling_gridlaw.py": {"transformers"},
    }
    found = []
    for path in sorted((ROOT / "model").rglob("*.py")):
        also = others.get(path.name, set())
        found += [f"{path.name}:{line} imports {name}" for line, name in imports(path) if name not in allowed | also]
    assert found == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is(room: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
