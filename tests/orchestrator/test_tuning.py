"""What a study may say of its learning rates, what that makes of identities, and what the plan shows of it."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parent))
from test_study import SIZE, make_study
from tuned_study import BIG, STEP, FakeDriver, Validation, tuned, valley

from orchestrator import cells, plan
from orchestrator.errors import InputError, one_line
from orchestrator.ledger import Ledger
from orchestrator.plan import Plan
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Study
from orchestrator.tracked_runs import planned_runs
from orchestrator.tuning.search import Tried, supposed_losses
from orchestrator.tuning.settings import Tuning
from orchestrator.tuning.tuner import Tuner

PINNED = ["c4137719d845", "c02be6d970e0", "9dfb9fc7cc9b", "0babeb243865"]


def ids(study: Study) -> list[str]:
    return [cell.id for cell in cells.expand(study)]


def made(study: Study, folder: Path) -> Plan:
    return plan.make(study, folder, {})


def test_identities_without_tuning_are_what_they_were() -> None:
    """Pinned: cells trained before there was any tuning stay what they are."""
    assert ids(make_study()) == PINNED
    assert ids(make_study(learning_rates={"full": 0.02})) == PINNED


@pytest.mark.parametrize(
    "tuning",
    [{"low": 2e-3}, {"high": 0.2}, {"budget": 30 * STEP}, {"trials": 12}, {"together": 2}, {"rungs": ()}, {"seed": 1},
     {"sampler": "tpe"}, {"metric": "validation/bits_per_byte"}],
)  # fmt: skip
def test_what_changes_the_rate_changes_the_identity(tuning: dict[str, Any]) -> None:
    assert not set(ids(tuned())) & set(ids(tuned(tuning)))


def test_the_recipes_rates_count_by_their_proportion_alone() -> None:
    recipes = [
        Recipe(learning_rate=rate, adam_learning_rate=adam, batch_size=2)
        for rate, adam in ((0.02, 5e-3), (0.04, 1e-2), (0.04, 5e-3))
    ]
    one, alike, other = (ids(tuned(recipe=recipe)) for recipe in recipes)
    assert one == alike and not set(one) & set(other)


def test_a_wider_law_changes_the_cells_that_follow_it_alone() -> None:
    third = SIZE.model_copy(update={"name": "third", "d_ff": 48})
    sizes = [SIZE, BIG, third, SIZE.model_copy(update={"name": "large", "d_ff": 96})]
    narrow, wide = (
        {cell.size: cell.id for cell in cells.expand(tuned({"sizes": names}, sizes=sizes, seeds=[0]))}
        for names in (("tiny", "big"), ("tiny", "big", "third"))
    )
    assert {size for size in narrow if narrow[size] != wide[size]} == {"third", "large"}


def test_rates_by_hand_are_numbers_in_the_identity_and_go_before_tuning() -> None:
    by_hand = make_study(learning_rates={"full": 0.01, "swa-8 tiny": 0.03})
    rates = {cell.arm: cell.document["recipe"] for cell in cells.expand(by_hand)}
    assert (rates["full"]["learning_rate"], rates["swa-8"]["learning_rate"]) == (0.01, 0.03)
    assert rates["full"]["adam_learning_rate"] == pytest.approx(5e-3 / 2)
    both = tuned(arms=[Arm(name="full", pattern="full"), Arm(name="swa-8", pattern="swa-8 full")],
                 learning_rates={"full": 0.01})  # fmt: skip
    documents = {cell.arm: cell.document["recipe"]["learning_rate"] for cell in cells.expand(both)}
    assert documents["full"] == 0.01 and documents["swa-8"]["trials"] == 8


def test_adamw_alone_has_one_rate() -> None:
    recipe = Recipe(optimizer="adamw", learning_rate=1e-3, adam_learning_rate=5e-3, batch_size=2)
    assert recipe.at_rate(2e-3) == recipe.model_copy(update={"learning_rate": 2e-3})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"low": 0.1, "high": 0.01}, ["low: 0.1 is not below high 0.01"]),
        ({"budget": "many"}, ["'many' is no budget", "20N"]),
        ({"budget": 0}, ["0 is no budget"]),
        ({"trials": 10}, ["trials: 10 is no multiple of together 4; give 8 or 12"]),
        ({"rungs": (0.5, 0.25)}, ["do not ascend"]),
        ({"rungs": (1.0,)}, ["rungs"]),
        ({"rate": 1}, ["unknown field"]),
    ],
)
def test_bad_settings_are_refused_in_one_line(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Tuning(**{"low": 1e-3, "high": 1e-1, "budget": "20N", **changes})
    line = one_line(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tuning": {"sizes": ("tiny", "gone")}}, ["tuning.sizes: 'gone' is no size; sizes: tiny"]),
        ({"tuning": {"sizes": ("tiny",)}, "sizes": [SIZE, BIG]}, ["arm 'full' is tuned at 1 size, a law", "needs 2"]),
        ({"tuning": {"sizes": ()}}, ["arm 'full' is tuned at 0 sizes"]),
        ({"measures": []}, ["'validation/loss' is given by none", "add ValidationLoss() to measures"]),
        ({"learning_rates": {"gone": 0.1}}, ["learning_rates: 'gone' is neither", "arms: full; sizes: tiny"]),
        ({"learning_rates": {"full": 0.0}}, ["0.0 of 'full' is no rate"]),
        ({"learning_rates": {"full": "fast"}}, ["learning_rates.full", "'fast' is refused"]),
    ],
)
def test_bad_studies_are_refused_in_one_line(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        tuned(**changes)
    line = one_line(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_what_only_the_sizes_show_is_refused_too() -> None:
    with pytest.raises(InputError, match=r"tuning.budget: 10 is 10 tokens, below one step of 128"):
        cells.expand(tuned({"budget": 10}))
    twin = SIZE.model_copy(update={"name": "twin"})
    with pytest.raises(InputError, match="two of tiny, twin have the same number of parameters"):
        cells.expand(tuned({"sizes": ("tiny", "twin")}, sizes=[SIZE, twin, BIG]))


def test_the_plan_shows_trials_and_that_rates_are_not_known(tmp_path: Path) -> None:
    document = made(tuned(), tmp_path).as_json()
    trials = [job for job in document["jobs"] if job["kind"] == "tune"]
    assert sorted(job["tokens"] for job in trials) == [5 * STEP] * 8 + [20 * STEP] * 8
    assert document["totals"]["tokens"] == 8 * 25 * STEP + 2 * 6400 == document["totals"]["tokens_if_separate"]
    assert [cell["learning_rate"] for cell in document["cells"]] == [None, None]
    last = {job["id"] for job in trials} - {before for job in trials for before in job["after"]}
    assert all(set(job["after"]) == last for job in document["jobs"] if job["kind"] == "train")
    assert list(tmp_path.iterdir()) == []


def test_trunks_wait_for_the_rate_and_branches_for_their_trunk(tmp_path: Path) -> None:
    study = tuned(budgets=[6400, 12800], seeds=[0])
    driver = FakeDriver(study, tmp_path, valley(0.012))
    before = driver.plan()
    trunk = next(job for job in before.jobs if job.kind == "trunk")
    assert before.tuning is not None
    assert trunk.after == before.tuning.by_name["full@tiny"].last
    assert all(before.task(job).trunk is None for job in [trunk, *(job for job in before.jobs if job.kind == "tune")])
    branch = next(job for job in before.jobs if job.kind == "train" and job.after == (trunk.id,))
    assert before.task(branch).trunk == tmp_path / "jobs" / trunk.id
    driver.run()
    rate = driver.found()["rate"]
    after = driver.plan()
    assert {after.task(job).recipe.learning_rate for job in after.jobs} == {rate}
    assert all(after.task(job).recipe.adam_learning_rate == pytest.approx(rate / 4) for job in after.jobs)


def test_trials_train_under_a_seed_that_no_cell_has(tmp_path: Path) -> None:
    planned = made(tuned({"seed": 3}), tmp_path)
    trials = [planned.task(job) for job in planned.jobs if job.kind == "tune"]
    assert {task.seed for task in trials} == {2**31 + 3}
    assert {(task.steps, task.schedule_steps) for task in trials} == {(5, 5), (20, 20)}
    assert len({task.folder for task in trials}) == 16


def test_new_seeds_take_the_rate_that_is_there(tmp_path: Path) -> None:
    FakeDriver(tuned(), tmp_path, valley(0.012)).run()
    wider = FakeDriver(tuned(seeds=[0, 1, 2]), tmp_path, valley(0.012)).plan()
    assert {job.kind for job in wider.jobs} == {"train"}
    shutil.rmtree(tmp_path / "tuning")  # found again from what the trials left
    again = FakeDriver(tuned(seeds=[0, 1, 2]), tmp_path, valley(0.012))
    rates = again.run()
    assert again.ran == [] and len(set(rates.values())) == 1


def test_a_finished_trial_whose_folder_is_gone_runs_again(tmp_path: Path) -> None:
    driver = FakeDriver(tuned(), tmp_path, valley(0.012))
    driver.run()
    found = driver.found()
    shutil.rmtree(tmp_path / "tuning")
    gone = driver.ran[3][0]
    shutil.rmtree(tmp_path / "jobs" / gone)
    again = FakeDriver(tuned(), tmp_path, valley(0.012))
    assert again.plan().lost == (gone,)
    again.run()
    assert [job_id for job_id, _ in again.ran] == [gone] and again.found() == found


def test_mlflow_has_a_run_for_each_trial(tmp_path: Path) -> None:
    document = made(tuned(), tmp_path).study_document(tmp_path / "study.py")
    _, runs = planned_runs(tmp_path, document)
    trials = [run for run in runs if run.tags["gridlaw.kind"] == "tune"]
    assert len(trials) == len({run.name for run in trials}) == 16
    assert sum(run.is_cell for run in runs) == 2


def test_pruned_and_failed_trials_are_given_a_loss_for_the_sampler() -> None:
    trials = [
        Tried(0, 0.01, "complete", {5: 3.0, 20: 2.0}),
        Tried(1, 0.02, "complete", {5: 3.5, 20: 2.2}),
        Tried(2, 0.001, "pruned", {5: 4.0}),
        Tried(3, 0.1, "failed", {}),
    ]
    assert supposed_losses(trials) == pytest.approx([2.0, 2.2, 4.0 - 1.15, 2.85 + 0.85])
    failed = [Tried(i, rate, "failed", {}) for i, rate in enumerate((0.1, 0.01))]
    high, low = supposed_losses(failed)
    assert low < high


def test_the_measure_of_the_metric_is_part_of_it() -> None:
    other = Validation()
    other.identity = lambda: {"documents": 9}  # type: ignore[method-assign]
    assert not set(ids(tuned())) & set(ids(tuned(measures=[other])))


def test_measuring_finished_cells_needs_no_rate(tmp_path: Path) -> None:
    planned = made(tuned(), tmp_path)
    assert planned.tuning is not None
    group = planned.tuning.by_name["full@tiny"]
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        tuner = Tuner(planned.tuning, [], {cell.id: group for cell in planned.cells}, ledger)
        order = planned.task(next(job for job in planned.jobs if job.kind == "train"))
        assert tuner.decides(order) and not tuner.decides(replace(order, kind="measure"))
