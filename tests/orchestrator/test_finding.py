"""A study's findings: data, checked before anything runs, and no part of what a cell is."""

from typing import Any

import pytest
from pydantic import ValidationError

from analysis.measures.recall import RecallByDistance
from analysis.measures.validation import ValidationLoss
from orchestrator.cells import expand
from orchestrator.data.recall import RecallLanguage
from orchestrator.errors import one_line
from orchestrator.finding import Difference, EndLevel, Finding, LawDifference, MetricRatio, SpeedRatio, Trend, Within
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Question, Size, Study

RATIO = SpeedRatio(arm="swa", against="full")
BEYOND = "recall/accuracy/beyond-32"


def study(*findings: Finding, **changes: Any) -> Study:
    fields: dict[str, Any] = {
        "name": "tiny",
        "arms": [Arm(name="full", pattern="full"), Arm(name="swa", pattern="swa-8 full")],
        "sizes": [Size(name="s", d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)],
        "budgets": [4096],
        "seeds": [0, 1],
        "data": RecallLanguage(context=64),
        "recipe": Recipe(learning_rate=0.02, batch_size=4),
        "measures": [ValidationLoss(), RecallByDistance(edges=(8, 32))],
        "question": Question(capability=BEYOND, reference="full"),
        "findings": findings,
    }
    return Study(**{**fields, **changes})


def test_findings_are_no_part_of_a_cell() -> None:
    claimed = study(Finding(claim="later", statistic=RATIO, above=1.1, paper="1.5"))
    assert [cell.id for cell in expand(claimed)] == [cell.id for cell in expand(study())]


def test_a_finding_survives_study_json() -> None:
    for statistic in (
        RATIO,
        EndLevel(arm=["swa"], against="full"),
        Difference(metric="validation/loss", arm="swa", against="full"),
        Within(metric="a/b", against_metric="a/c", arm=("swa", "full")),
        Trend(labels={"swa": 8, "full": 64}),
        MetricRatio(metric="validation/loss", arm="swa", against="full", budget="smallest"),
        LawDifference(power="beta", arm="swa", against="full"),
    ):
        finding = Finding(claim="so", statistic=statistic, above=0.5, below=2)
        assert Finding.model_validate(finding.model_dump(mode="json")) == finding
        assert finding.rule == "between 0.5 and 2"


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        ({"statistic": SpeedRatio(arm="swa-9", against="full")}, ["findings.0.arm", "'swa-9'", "arms: full, swa"]),
        ({"statistic": SpeedRatio(arm="swa", against=("full", "no"))}, ["findings.0.against", "'no'", "full, swa"]),
        ({"statistic": SpeedRatio(arm="swa", against="swa")}, ["findings.0", "swa stands on both sides"]),
        ({"statistic": Trend(labels={"swa": 8, "gdn": 9})}, ["findings.0.labels", "'gdn'"]),
        (
            {"statistic": Difference(metric="longppl/longppl", arm="swa", against="full")},
            ["findings.0.metric", "'longppl/longppl'", "recall, train, validation", "add the measure"],
        ),
        (
            {"statistic": Difference(metric="recall/accuracy/beyond-8", arm="swa", against="full")},
            ["findings.0.metric", "beyond-8", f"choose from recall/accuracy/1-8, recall/accuracy/9-32, {BEYOND}"],
        ),
        (
            {"statistic": Difference(metric=BEYOND, arm="swa", against="full"), "above": -0.1, "below": 0.1},
            ["findings.0", "some may never emerge", "EndLevel"],
        ),
        ({"statistic": RATIO, "data": "text"}, ["findings.0.data", "'text'", "choose from default"]),
        ({"statistic": RATIO, "size": "S9"}, ["findings.0.size", "'S9'", "choose from s"]),
    ],
)
def test_what_a_study_can_never_judge_is_refused(finding: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        study(Finding(**{"claim": "so", "above": 1, **finding}))
    line = one_line(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_without_a_question_there_is_no_t50() -> None:
    with pytest.raises(ValidationError, match="give the study a question"):
        study(Finding(claim="later", statistic=RATIO, above=1), question=None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"statistic": RATIO}, "no rule; give above, below or both"),
        ({"statistic": RATIO, "above": 2, "below": 1}, "above: 2 is not under below 1"),
        ({"statistic": RATIO, "above": -1}, "a ratio is always above 0"),
        ({"statistic": RATIO, "above": "1.1"}, "valid number"),
        ({"statistic": RATIO, "above": float("nan")}, "finite number"),
        ({"statistic": RATIO, "over": 1}, "unknown field"),
        (
            {"statistic": LawDifference(power="beta", arm="a", against="b"), "above": 0, "size": "S1"},
            "leave size out",
        ),
    ],
)
def test_a_finding_without_a_sound_rule_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Finding(**{"claim": "so", **fields})
    assert words in one_line(caught.value)


def test_a_trend_needs_two_numbers() -> None:
    with pytest.raises(ValidationError, match="do not vary"):
        Trend(labels={"a": 8, "b": 8})
