"""Tuning with made-up trials: the same trials and rates whatever the order, the kills, the writes cut short."""

import math
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_study import SIZE
from tuned_study import BIG, HUGE, STEP, FakeDriver, Killed, tuned, valley

from orchestrator.errors import InputError
from orchestrator.ledger import Ledger
from orchestrator.tuning.search import open_journal


def trials(driver: FakeDriver, name: str = "full@tiny") -> dict[int, tuple[float, str]]:
    return {trial["number"]: (trial["rate"], trial["state"]) for trial in driver.found(name)["trials"]}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    driver = FakeDriver(tuned(), tmp_path_factory.mktemp("unbroken"), valley(0.012))
    driver.run()
    return driver


def test_cells_get_the_rate_the_trials_found(unbroken: FakeDriver, tmp_path: Path) -> None:
    driver = FakeDriver(tuned(), tmp_path, valley(0.012))
    rates = driver.run()
    assert set(rates) == {cell.id for cell in driver.plan().cells}
    assert len(set(rates.values())) == 1
    assert rates.popitem()[1] == pytest.approx(0.012, rel=0.05)
    found = driver.found()
    assert found["interval"][0] < 0.012 < found["interval"][1] and found["warnings"] == []
    assert len(found["trials"]) == 8
    again = driver.plan()
    assert {job.kind for job in again.jobs} == {"train"} and not any(job.after for job in again.jobs)
    assert all(again.task(job).recipe.learning_rate == found["rate"] for job in again.jobs)


@pytest.mark.parametrize("order", [1, 2])
def test_neither_order_nor_slots_change_what_is_tried(unbroken: FakeDriver, tmp_path: Path, order: int) -> None:
    driver = FakeDriver(tuned(), tmp_path, valley(0.012), order)
    driver.run()
    assert driver.found() == unbroken.found()
    assert [job for job, _ in driver.ran] != [job for job, _ in unbroken.ran]


def test_the_worse_half_of_a_round_is_pruned_at_its_rung(unbroken: FakeDriver) -> None:
    first = {number: trials(unbroken)[number] for number in range(4)}
    assert [state for _, state in sorted(first.values())] == ["pruned", "complete", "complete", "pruned"]
    halves = [trial for trial in unbroken.found()["trials"] if trial["state"] == "pruned"]
    assert all(list(trial["losses"]) == [str(5 * STEP)] for trial in halves)
    assert len(unbroken.ran) == 2 * 8 - len(halves)


@pytest.mark.parametrize("jobs_a_session", [1, 3, 5])
def test_killed_again_and_again_it_comes_to_the_same_trials(
    unbroken: FakeDriver, tmp_path: Path, jobs_a_session: int
) -> None:
    sessions: list[FakeDriver] = []
    ended = False
    while not ended:
        assert len(sessions) < 60
        sessions.append(FakeDriver(tuned(), tmp_path, valley(0.012), order=len(sessions)))
        try:
            sessions[-1].run(kill_after=jobs_a_session)
            ended = True
        except Killed:
            pass
    assert len(sessions) > len(unbroken.ran) / jobs_a_session
    assert sessions[-1].found() == unbroken.found()
    with Ledger.read(tmp_path / "ledger.db") as ledger:
        assert {row.state for row in ledger.snapshot().values() if row.kind == "tune"} == {"finished"}


@pytest.mark.parametrize("cut", ["in the last line", "after the last line", "all of it"])
def test_a_journal_cut_short_is_repaired(unbroken: FakeDriver, tmp_path: Path, cut: str) -> None:
    with pytest.raises(Killed):
        FakeDriver(tuned(), tmp_path, valley(0.012)).run(kill_after=6)
    journal = tmp_path / "tuning/journal.log"
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    torn = {"in the last line": content[:-20], "after the last line": content + lines[-1][:30], "all of it": b""}[cut]
    journal.write_bytes(torn)
    (tmp_path / "tuning/journal.log.lock").symlink_to(journal)
    driver = FakeDriver(tuned(), tmp_path, valley(0.012), order=3)
    driver.run()
    assert driver.found() == unbroken.found()


def test_a_journal_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        FakeDriver(tuned(), tmp_path, valley(0.012)).run(kill_after=6)
    journal = tmp_path / "tuning/journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], b"no json\n", *lines[3:]]))
    with pytest.raises(InputError, match=r"tuning: .*journal.log is damaged .* move it away"):
        open_journal(journal)


def test_more_trials_go_on_from_those_there_are(unbroken: FakeDriver, tmp_path: Path) -> None:
    FakeDriver(tuned(), tmp_path, valley(0.012)).run()
    more = FakeDriver(tuned({"trials": 12}), tmp_path, valley(0.012))
    more.run()
    assert list(trials(more).items())[:8] == list(trials(unbroken).items())
    assert len(trials(more)) == 12
    assert 4 <= len(more.ran) <= 8


def test_a_lost_ledger_trains_no_trial_again_that_optuna_knows(tmp_path: Path, unbroken: FakeDriver) -> None:
    with pytest.raises(Killed):
        FakeDriver(tuned(), tmp_path, valley(0.012)).run(kill_after=7)
    (tmp_path / "ledger.db").unlink()
    driver = FakeDriver(tuned(), tmp_path, valley(0.012))
    driver.run()
    assert driver.found() == unbroken.found()
    assert len(driver.ran) <= len(unbroken.ran) - 6


@pytest.mark.parametrize("bad", [None, math.nan])
def test_trials_that_diverge_fail_alone(tmp_path: Path, bad: float | None) -> None:
    good = valley(0.012)
    driver = FakeDriver(tuned(), tmp_path, lambda rate, share: bad if rate > 0.02 else good(rate, share))
    rates = driver.run()
    assert len(rates) == 2 and set(rates.values()) == {driver.found()["rate"]}
    assert driver.found()["rate"] == pytest.approx(0.012, rel=0.15)
    failed = [trial for trial in driver.found()["trials"] if trial["state"] == "failed"]
    assert failed and all(trial["rate"] > 0.02 for trial in failed)
    assert len(driver.found()["trials"]) == 8


def test_where_all_trials_diverge_cells_are_blocked_with_the_cause(tmp_path: Path) -> None:
    for _ in range(2):
        driver = FakeDriver(tuned(), tmp_path, lambda rate, share: None)
        assert driver.run() == {}
        with Ledger.read(tmp_path / "ledger.db") as ledger:
            rows = ledger.snapshot()
        blocked = [row for row in rows.values() if row.kind == "train"]
        assert {row.state for row in blocked} == {"blocked"}
        assert {row.cause for row in blocked} == {
            "it has no learning rate: every one of 8 tuning trials of full tiny diverged; lower tuning.low 0.001 and "
            "tuning.high 0.1"
        }
    assert driver.ran == []


@pytest.mark.parametrize(("at", "edge", "field"), [(0.0011, "low", "tuning.low"), (0.2, "high", "tuning.high")])
def test_a_best_rate_at_the_edge_is_warned_of(tmp_path: Path, at: float, edge: str, field: str) -> None:
    driver = FakeDriver(tuned(), tmp_path, valley(at))
    driver.run()
    (line,) = driver.found()["warnings"]
    assert driver.found()["at_edge"] == edge
    assert f"lies at the {edge} edge" in line and field in line
    assert f"warning: {line}" in driver.told


def test_untuned_sizes_follow_the_law_of_the_tuned_ones(tmp_path: Path) -> None:
    study = tuned({"sizes": ("tiny", "big"), "trials": 12}, sizes=[SIZE, BIG, HUGE])
    n = {cell.size: cell.non_embedding_params for cell in FakeDriver(study, tmp_path, valley(1)).plan().cells}
    best = {name: 0.02 * (n[name] / n["tiny"]) ** -0.3 for name in n}
    driver = FakeDriver(study, tmp_path, {name: valley(rate) for name, rate in best.items()})
    rates = driver.run()
    sizes = {cell.id: cell.size for cell in driver.plan().cells}
    for cell_id, rate in rates.items():
        assert rate == pytest.approx(best[sizes[cell_id]], rel=0.15)
    law = driver.found("full@huge")["law"]
    assert law["slope"] == pytest.approx(-0.3, abs=0.05)
    low, high = driver.found("full@huge")["interval"]
    assert low < best["huge"] < high

    for name in ("full@huge", "full@big"):  # killed before the law was written, or before one of its tunings was
        shutil.copytree(tmp_path, tmp_path.with_name(name))
        (tmp_path.with_name(name) / f"tuning/{name}.json").unlink()
        again = FakeDriver(study, tmp_path.with_name(name), driver.curve)
        assert again.run() == rates and again.ran == []


def test_a_metric_that_is_not_measured_blocks_what_needs_it(tmp_path: Path) -> None:
    for ran in (4, 0):
        driver = FakeDriver(tuned({"metric": "validation/perplexity"}), tmp_path, valley(0.01))
        assert driver.run() == {} and len(driver.ran) == ran
        with Ledger.read(tmp_path / "ledger.db") as ledger:
            causes = {row.cause for row in ledger.snapshot().values() if row.kind == "train"}
        why = "tuning.metric: 'validation/perplexity' is not measured; choose from validation/loss"
        assert causes == {f"it has no learning rate: {why}"}
