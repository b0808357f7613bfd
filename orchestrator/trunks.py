"""Trunks: the steps before the decay, which the budgets of one (arm, size, data, seed) share.

With warmup-stable-decay the learning rate before the decay does not depend on the budget. So each budget is a branch:
it starts from the trunk where its decay begins. The trunk itself is cut there into jobs, one after the other, so that a
branch waits for no more of it than it needs.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from orchestrator import identity
from orchestrator.cells import Cell
from orchestrator.recipe import Recipe


@dataclass(frozen=True)
class Trunk:
    """The steps up to where the decay of `cell` begins. cells: ids of all that share at least these steps."""

    id: str
    steps: int
    cell: Cell
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Branching:
    """What to run. before: cell id or trunk id → the trunk it starts from. trunks: those to train, shortest first."""

    before: dict[str, Trunk]
    trunks: tuple[Trunk, ...]


def of_study(cells: Iterable[Cell], recipe: Recipe) -> tuple[tuple[Trunk, ...], ...]:
    """The trunks of each group of cells that differ in their budget alone, shortest first, where they share steps.

    The last one that counts a cell among its own is the one the cell leaves where its own decay begins.
    """
    groups: dict[tuple[str, str, str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.arm, cell.size, cell.data, cell.seed].append(cell)
    lines = []
    for group in groups.values():
        if len(group) < 2:
            continue
        at = {recipe.decay_starts(cell.steps): cell for cell in sorted(group, key=lambda cell: -cell.steps)}
        trunks = [
            Trunk(
                id=identity.digest(identity.of_trunk(cell.document, steps)),
                steps=steps,
                cell=cell,
                cells=tuple(other.id for other in group if recipe.decay_starts(other.steps) >= steps),
            )
            for steps, cell in sorted(at.items())
            if steps > 0
        ]
        if trunks:
            lines.append(tuple(trunks))
    return tuple(lines)


def branching(
    lines: Iterable[tuple[Trunk, ...]], recipe: Recipe, wanted: Collection[Cell], finished: Collection[str]
) -> Branching:
    """Which trunks to train so that the `wanted` cells start as late as they can, with the least training.

    wanted: cells to be trained that have not begun. finished: ids of trunks that are there already. A cell alone trains
    by itself, unless a finished trunk takes it part of the way.
    """
    by_id = {cell.id: cell for cell in wanted}
    before: dict[str, Trunk] = {}
    to_train: list[Trunk] = []
    for line in lines:
        there = [trunk for trunk in line if trunk.id in finished]
        mine = [by_id[cell_id] for cell_id in line[0].cells if cell_id in by_id]
        if len(mine) > 1:
            needed = {recipe.decay_starts(cell.steps) for cell in mine}
            for trunk in line:
                if trunk.steps in needed and trunk not in there:
                    to_train.append(trunk)
                    _after(before, trunk.id, trunk.steps, there)
                    there.append(trunk)
        for cell in mine:
            _after(before, cell.id, recipe.decay_starts(cell.steps), there)
    return Branching(before, tuple(to_train))


def why_not(study_budgets: int, recipe: Recipe, share: bool, lines: Collection[tuple[Trunk, ...]]) -> str | None:
    """Why budgets are trained one by one; None where they share trunks, or there is but one budget."""
    if study_budgets < 2 or lines:
        return None
    if not share:
        return "machine.share_trunks is off"
    return f"recipe.decay_fraction {recipe.decay_fraction:g} decays from the first step: no two budgets share a step"


def _after(before: dict[str, Trunk], job_id: str, latest: int, there: Iterable[Trunk]) -> None:
    usable = [trunk for trunk in there if trunk.steps <= latest and trunk.id != job_id]
    if usable:
        before[job_id] = max(usable, key=lambda trunk: trunk.steps)
