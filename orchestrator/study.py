"""A study: a named grid of arms, sizes, budgets, data conditions and seeds, written as a short Python file."""

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from model import cost
from model.config import ModelConfig
from model.mixers.table import parse_pattern
from orchestrator import finding
from orchestrator.errors import InputError, one_line
from orchestrator.finding import Finding
from orchestrator.recipe import Recipe, check_recipe
from orchestrator.tuning import settings
from orchestrator.tuning.settings import Tuning

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
LONGEST_NAME = 80
MOST_EVALUATIONS = 10_000
PositiveInt = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=NAME, max_length=LONGEST_NAME)]


class Arm(BaseModel):
    """One architecture.

    pattern: mixer words repeated over the layers ("swa-8 full"), joined by + where mixers share a layer's heads
    ("swa-8:3+full"). positions: which layers rotate, "rope", "nope" or "nope-full", or by mixer, a number the share of
    each head that does: {"full": "nope", "swa": 0.25}. backbone: fields in which the arm differs from the study's
    backbone: {"sinks": 4}.
    """

    model_config = STRICT

    name: Name
    pattern: str
    positions: Literal["rope", "nope", "nope-full"] | dict[str, Literal["rope", "nope"] | float] = "rope"
    backbone: dict[str, Any] = {}

    @field_validator("backbone")
    @classmethod
    def _is_known(cls, backbone: dict[str, Any]) -> dict[str, Any]:
        try:
            Backbone.model_validate(backbone)
        except ValidationError as error:
            raise ValueError(one_line(error)) from None
        return backbone

    @field_validator("positions", mode="before")
    @classmethod
    def _are_positions(cls, positions: Any) -> Any:
        by_mixer = positions.values() if isinstance(positions, dict) else ()
        if positions in ("rope", "nope", "nope-full") or (
            by_mixer and all(rope in ("rope", "nope") or type(rope) in (int, float) for rope in by_mixer)
        ):
            return positions
        raise ValueError(
            f"{positions!r} is refused; give rope, nope or nope-full, or by mixer rope, nope or the share of each head "
            f'that turns: {{"full": "nope", "swa": 0.25}}'
        )


class Size(BaseModel):
    """A model shape. d_ff is the hidden width of the MLP; head_dim the width of keys and values."""

    model_config = STRICT

    name: Name
    d_model: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    d_ff: int = Field(gt=0)


class Backbone(BaseModel):
    """What all arms share around their mixers; most fields are those of `model.config.ModelConfig`.

    sinks: first tokens of the sequence that layers with a window see besides it.
    mixers: settings that differ from a mixer's defaults, by its word: {"mamba2": {"head_dim": 16, "d_state": 16}}.
    match_parameters: MLPs beside other mixers take the width that gives the layer the parameters of full attention.
    """

    model_config = STRICT

    mlp: Literal["swiglu", "relu2"] = "swiglu"
    norm_gain: bool = True
    qk_norm: float | None = None
    key_shift: bool = False
    tied_embeddings: bool = False
    rope_base: float = Field(default=1e4, gt=1)
    sinks: int = Field(default=0, ge=0)
    sink_logit: bool = False
    logit_scale: float = Field(default=1.0, gt=0)
    logit_softcap: float | None = Field(default=None, gt=0)
    mixers: dict[str, dict[str, StrictInt | str]] = {}
    match_parameters: bool = False


class Evaluations(BaseModel):
    """When measures run and weights are kept.

    every_tokens: distance of evaluations, rounded to whole steps; None for a sixteenth of the budget.
    checkpoints: how many evaluations, log-spaced in tokens, also keep their weights; the last always does.
    """

    model_config = STRICT

    every_tokens: int | None = Field(default=None, gt=0)
    checkpoints: int = Field(default=6, gt=0)

    def steps(self, steps: int, tokens_per_step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(evaluate_at, checkpoint_at): ascending steps completed, both ending with `steps`. Raises InputError."""
        return _measured_at(self.every_tokens, self.checkpoints, steps, tokens_per_step)


@lru_cache(maxsize=4096)  # a grid asks for few budgets many times
def _measured_at(
    every_tokens: int | None, checkpoints: int, steps: int, tokens_per_step: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    every = max(1, round((every_tokens or steps * tokens_per_step / 16) / tokens_per_step))
    if steps // every > MOST_EVALUATIONS:
        raise InputError(
            f"evaluations.every_tokens: {every_tokens} makes {steps // every} evaluations of "
            f"{steps * tokens_per_step} tokens; raise it (at most {MOST_EVALUATIONS} evaluations)"
        )
    evaluate = sorted({*range(every, steps + 1, every), steps})
    ratio = steps / evaluate[0]
    wanted = [steps / ratio ** (i / max(1, checkpoints - 1)) for i in range(checkpoints)]
    checkpoint = {min(evaluate, key=lambda step: abs(step - want)) for want in wanted}
    return tuple(evaluate), tuple(sorted(checkpoint))


class Machine(BaseModel):
    """How jobs are run; nothing here changes what is learnt, so nothing here is identity.

    workers: processes that train one job together, or that number by size {"S1": 1, "S5": 8}. zero_stage: DeepSpeed
    ZeRO. micro_batch: sequences a worker puts through at once, None for its whole share. threads: of one worker.
    recompute: keep only each layer's input for the backward pass and run the layer again there: a third more FLOPs, a
    fraction of the memory, the same losses. share_trunks: whether budgets that differ in their decay alone train the
    steps before it once. keep_optimizer: whose optimizer state stays on disk once a job is finished: the trunks', from
    which later budgets branch off, or everybody's. Weights of checkpoints always stay.
    """

    model_config = STRICT

    workers: PositiveInt | dict[str, PositiveInt] = 1
    zero_stage: Literal[0, 1, 2] = 0
    micro_batch: int | None = Field(default=None, gt=0)
    threads: int = Field(default=1, gt=0)
    recompute: bool = False
    log_every: int = Field(default=10, gt=0)
    share_trunks: bool = True
    keep_optimizer: Literal["trunks", "all"] = "trunks"

    def workers_of(self, size: str) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers[size]


class Question(BaseModel):
    """What the analysis asks. capability: a metric in [0, 1]; reference: the arm the others are compared with;
    margin: difference of ceilings that counts as the same, in the capability's own unit."""

    model_config = STRICT

    capability: str
    reference: str
    margin: float = Field(default=0.05, gt=0)


class Study(BaseModel):
    """A grid of cells: data conditions x arms x sizes x budgets x seeds.

    budgets: training tokens, absolute (1_843_200) or in multiples of non-embedding parameters ("100N").
    data: one source, or named conditions {"near": …, "far": …}. measures: objects of `analysis.measures`.
    tuning: how learning rates are found before the cells train, None for the recipe's own. learning_rates: rates given
    by hand, by "arm" or "arm size"; they go before tuning and recipe.
    findings: what is claimed, with the rule that decides it, written before the run.
    notes: choices a reader of the report must know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    name: Name
    arms: tuple[Arm, ...]
    sizes: tuple[Size, ...]
    budgets: tuple[StrictInt | str, ...]
    seeds: tuple[StrictInt, ...]
    data: dict[str, Any]
    recipe: Recipe
    backbone: Backbone = Backbone()
    measures: tuple[Any, ...] = ()
    evaluations: Evaluations = Evaluations()
    machine: Machine = Machine()
    question: Question | None = None
    tuning: Tuning | None = None
    learning_rates: dict[str, StrictFloat | StrictInt] = {}
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name in ("mlflow.db", "mlartifacts", "throughput.json"):
            raise ValueError(f"{name!r} is what a file beside the studies is called; choose another")
        return name

    @field_validator("data", mode="before")
    @classmethod
    def _name_the_data(cls, data: Any) -> Any:
        conditions = data if isinstance(data, dict) else {"default": data}
        for name, source in conditions.items():
            if not isinstance(name, str) or not re.fullmatch(NAME, name) or len(name) > LONGEST_NAME:
                raise ValueError(f"{name!r} is no name; use letters, digits and . _ + -, at most {LONGEST_NAME}")
            if not all(hasattr(source, part) for part in ("batch", "held_out", "facts", "identity", "check")):
                raise ValueError(f"{source!r} is no data source; use one of orchestrator.data")
        return conditions

    @field_validator("arms", "sizes", "budgets", "seeds", "data")
    @classmethod
    def _not_empty(cls, values: Any) -> Any:
        if not values:
            raise ValueError("empty, so the study has no cell; give at least one")
        return values

    @field_validator("measures")
    @classmethod
    def _are_measures(cls, measures: tuple[Any, ...]) -> tuple[Any, ...]:
        for measure in measures:
            parts = ("name", "identity", "capabilities")
            if isinstance(measure, type) or not (callable(measure) and all(hasattr(measure, part) for part in parts)):
                raise ValueError(f"{measure!r} is no measure; hand over an object of analysis.measures")
        _refuse_repeats("measure", [measure.name for measure in measures])
        return measures

    @field_validator("budgets")
    @classmethod
    def _are_budgets(cls, budgets: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for budget in budgets:
            if isinstance(budget, str) and not re.fullmatch(r"\d+(\.\d+)?N", budget):
                raise ValueError(f'{budget!r} is no budget; give tokens (1_843_200) or a multiple of N ("100N")')
        _refuse_repeats("budget", [str(budget) for budget in budgets])
        return budgets

    @field_validator("seeds")
    @classmethod
    def _are_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        for seed in seeds:
            if not 0 <= seed < 2**31:
                raise ValueError(f"{seed} is no seed; give whole numbers from 0 to 2147483647")
        _refuse_repeats("seed", [str(seed) for seed in seeds])
        return seeds

    @model_validator(mode="after")
    def _fits_together(self) -> "Study":
        _refuse_repeats("arm", [arm.name for arm in self.arms])
        _refuse_repeats("size", [size.name for size in self.sizes])
        for arm in self.arms:
            for size in self.sizes:
                for source in self.data.values():
                    try:
                        self.model_of(arm, size, source)
                    except ValueError as error:
                        raise ValueError(f"arm {arm.name!r}, size {size.name!r}: {error}") from None
        if self.question and self.question.reference not in {arm.name for arm in self.arms}:
            names = ", ".join(arm.name for arm in self.arms)
            raise ValueError(f"question.reference: {self.question.reference!r} is no arm; arms: {names}")
        for source in self.data.values() if self.question else ():
            known = [name for measure in self.measures for name in measure.capabilities(source)]
            if self.question and self.question.capability not in known:
                raise ValueError(
                    f"question.capability: {self.question.capability!r} is none of what the measures give; "
                    f"choose from {', '.join(known) or 'nothing: add a measure such as RecallByDistance()'}"
                )
        chances = {name: source.chance for name, source in self.data.items()}
        if self.question and len(set(chances.values())) > 1:
            each = ", ".join(f"{name} {chance:g}" for name, chance in chances.items())
            raise ValueError(
                f"data: guessing is right with different chances ({each}), so one floor does not serve them all; "
                f"make a study of each"
            )
        finding.check(
            self.findings,
            [arm.name for arm in self.arms],
            [size.name for size in self.sizes],
            self.data,
            self.measures,
            self.question.capability if self.question else None,
        )
        settings.check(
            self.tuning,
            self.learning_rates,
            [arm.name for arm in self.arms],
            [size.name for size in self.sizes],
            [measure.name for measure in self.measures],
        )
        check_recipe(self.recipe, self.machine.zero_stage)
        if isinstance(self.machine.workers, dict) and set(self.machine.workers) != {size.name for size in self.sizes}:
            names = ", ".join(size.name for size in self.sizes)
            raise ValueError(
                f"machine.workers: given for {', '.join(self.machine.workers)}; give one for each of {names}"
            )
        for size in self.sizes:
            self._fits_workers(self.machine.workers_of(size.name))
        return self

    def _fits_workers(self, workers: int) -> None:
        share, rest = divmod(self.recipe.batch_size, workers)
        if rest:
            raise ValueError(
                f"machine.workers: {workers} does not divide batch_size {self.recipe.batch_size}; "
                f"choose a divisor of it"
            )
        if self.machine.micro_batch and share % self.machine.micro_batch:
            raise ValueError(
                f"machine.micro_batch: {self.machine.micro_batch} does not divide a worker's {share} sequences a step; "
                f"choose a divisor of it"
            )

    def model_of(self, arm: Arm, size: Size, data: Any) -> ModelConfig:
        """The decoder of one arm at one size on one data source."""
        backbone = self.backbone_of(arm)
        model = ModelConfig(
            vocab_size=data.vocab_size,
            context=data.context,
            layers=parse_pattern(arm.pattern, size.n_layers, arm.positions, backbone.mixers, backbone.sinks),
            **size.model_dump(exclude={"name", "n_layers"}),
            **backbone.model_dump(exclude={"mixers", "match_parameters", "sinks"}),
        )
        cost.parameters(model)  # a mixer refuses here the shapes it cannot have
        return cost.matched(model) if backbone.match_parameters else model

    def backbone_of(self, arm: Arm) -> Backbone:
        """The study's backbone with the arm's own changes."""
        return (
            Backbone.model_validate({**self.backbone.model_dump(), **arm.backbone}) if arm.backbone else self.backbone
        )

    def recipe_of(self, arm: str, size: str) -> Recipe:
        """The recipe of one arm at one size, at its rate by hand where there is one."""
        rate = settings.by_hand(self.learning_rates, arm, size)
        return self.recipe if rate is None else self.recipe.at_rate(rate)

    def is_tuned(self, arm: str, size: str) -> bool:
        """Whether trials, or a law over them, give the learning rate."""
        return self.tuning is not None and settings.by_hand(self.learning_rates, arm, size) is None


# The paper's sizes (arXiv 2606.15378): d_ff = 2.5 d, head width 64, two key-value heads. S5's shape is inferred.
PAPER_SIZES = {
    name: Size(name=name, d_model=d, n_layers=layers, n_heads=d // 64, n_kv_heads=2, head_dim=64, d_ff=5 * d // 2)
    for name, d, layers in (("S1", 384, 10), ("S2", 512, 12), ("S3", 640, 16), ("S4", 768, 18), ("S5", 1280, 30))
}


def load(path: Path) -> Study:
    """Runs a study file and returns its `study`. Raises InputError, naming file and line where the file is at fault.

    It runs in its own folder, so that relative paths in it mean the same from everywhere. That folder also goes to the
    end of the import path: helper modules beside the file can be imported, and none of them (a `model.py`, an
    `analysis/`) can shadow gridlaw's own rooms, which are imported before.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise InputError(f"study: {path} does not exist; give a study file or the name of a study under the root")
    for room in ("model", "orchestrator", "analysis", "experiments"):
        importlib.import_module(room)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"gridlaw_study_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"study: {path.name} is no Python file; give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # by-value pickling of the file's own classes looks the module up here
    try:
        with contextlib.chdir(path.parent):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        file = Path(error.filename or path).name
        line = f":{error.lineno}" if error.lineno else ""
        raise InputError(f"{file}{line}: {error.msg}; mend the Python syntax there") from None
    except ValidationError as error:
        raise InputError(f"{_place(error, path)}: {one_line(error)}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit in a study file too: it must not end in silence
        reason = str(error).splitlines()[0] if str(error) else "no message"
        raise InputError(f"{_place(error, path)}: {type(error).__name__}: {reason}") from None
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise InputError(f"{path.name}: defines no `study`; end the file with study = Study(...)")
    for source in study.data.values():
        source.check()
    return study


def _place(error: BaseException, path: Path) -> str:
    """file:line of the deepest frame in the study's own folder."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == path.parent]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else path.name


def _refuse_repeats(what: str, values: list[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ValueError(f"{what} {value!r} is given {count} times; give each {what} once")
