"""Measures by the words that `gridlaw measure` takes, each with its defaults; others belong into the study file."""

from dataclasses import replace
from typing import TYPE_CHECKING

from analysis.measures.ablation import HeadAblation
from analysis.measures.attention_entropy import AttentionEntropy
from analysis.measures.gradient_profile import GradientProfile
from analysis.measures.longppl import LongPPL
from analysis.measures.needles import Needles
from analysis.measures.probing import Probing
from analysis.measures.recall import RecallByDistance
from analysis.measures.receptive_field import ReceptiveField
from analysis.measures.retrieval_heads import RetrievalHeads
from analysis.measures.ruler import Ruler
from analysis.measures.validation import ValidationLoss
from orchestrator.errors import InputError
from orchestrator.measure import Measure

if TYPE_CHECKING:
    from orchestrator.plan import Plan
    from orchestrator.study import Study

ALL: tuple[Measure, ...] = (
    ValidationLoss(),
    RecallByDistance(),
    Needles(),
    LongPPL(),
    Ruler(),
    RetrievalHeads(),
    AttentionEntropy(),
    ReceptiveField(),
    HeadAblation(),
    GradientProfile(),
    Probing(),
)
MEASURES = {measure.name: measure for measure in ALL}


def with_measures(study: "Study", names: list[str]) -> "Study":
    """The study with these measures besides its own, whose settings win. Raises InputError for unknown words."""
    for name in names:
        if name not in MEASURES:
            raise InputError(f"measures: {name!r} is no measure; choose from {', '.join(MEASURES)}")
    own = {measure.name for measure in study.measures}
    added = tuple(MEASURES[name] for name in dict.fromkeys(names) if name not in own)
    return study.model_copy(update={"measures": (*study.measures, *added)})


def measurements_of(plan: "Plan") -> "Plan":
    """The plan without its training. Raises InputError where no cell has finished."""
    if plan.missing == len(plan.cells):
        raise InputError(f"study: no cell of {plan.study.name} has finished under {plan.folder.parent}; run it first")
    return replace(plan, jobs=tuple(job for job in plan.jobs if job.kind == "measure"))
