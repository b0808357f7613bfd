"""The grid of a study, one cell a point."""

from dataclasses import dataclass
from typing import Any

from model import cost
from model.config import ModelConfig
from orchestrator import identity
from orchestrator.errors import InputError, shortened
from orchestrator.study import Study
from orchestrator.tuning import groups as tuned

MOST_TOKENS = 1e16  # hundreds of times the largest training there was


@dataclass(frozen=True)
class Cell:
    """One training to be had. id: hash of `document`, all that changes its weights.

    budget_tokens: tokens really trained, a whole number of steps. data: name of the data condition.
    params counts all parameters; non_embedding_params leaves out embedding and head (the N of the paper).
    """

    id: str
    arm: str
    size: str
    data: str
    budget_tokens: int
    seed: int
    steps: int
    params: int
    non_embedding_params: int
    model: ModelConfig
    document: dict[str, Any]

    @property
    def coordinates(self) -> tuple[str, str, str, int, int]:
        return self.arm, self.size, self.data, self.budget_tokens, self.seed

    @property
    def tokens_per_step(self) -> int:
        return self.budget_tokens // self.steps


def expand(study: Study) -> tuple[Cell, ...]:
    """Every cell, in the order data, size, budget, seed, arm: arms of one seed are neighbours. Raises InputError."""
    cells = []
    groups = tuned.of_study(study)
    for data_name, source in study.data.items():
        tokens_per_step = study.recipe.batch_size * source.context
        for size in study.sizes:
            for budget in study.budgets:
                for seed in study.seeds:
                    for arm in study.arms:
                        model = study.model_of(arm, size, source)
                        count = cost.parameters(model)
                        tokens = budget if isinstance(budget, int) else float(budget[:-1]) * count.non_embedding
                        if tokens > MOST_TOKENS:
                            raise InputError(
                                f"budgets: {shortened(budget)} is more than {MOST_TOKENS:.0e} tokens; lower it"
                            )
                        steps = round(tokens / tokens_per_step)
                        if steps < 1:
                            raise InputError(
                                f"budgets: {budget} is {tokens:.0f} tokens, below one step of {tokens_per_step}; "
                                f"raise the budget or lower recipe.batch_size"
                            )
                        recipe = study.recipe_of(arm.name, size.name)
                        document = identity.document(model, source, recipe, steps, seed)
                        if group := groups.get((arm.name, size.name, data_name)):
                            document = identity.with_rate(document, group.rate_document)
                        cells.append(
                            Cell(
                                id=identity.digest(document),
                                arm=arm.name,
                                size=size.name,
                                data=data_name,
                                budget_tokens=steps * tokens_per_step,
                                seed=seed,
                                steps=steps,
                                params=count.total,
                                non_embedding_params=count.non_embedding,
                                model=model,
                                document=document,
                            )
                        )
    by_id: dict[str, Cell] = {}
    for cell in cells:
        if cell.id in by_id:
            raise InputError(
                f"study: cells {by_id[cell.id].coordinates} and {cell.coordinates} are one and the same training; "
                f"drop one of the two"
            )
        by_id[cell.id] = cell
    return tuple(cells)
