"""What starts where: never more workers than slots, longest first, wide jobs not starved; what is tried again."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.scheduler import (
    Create,
    Gang,
    ReadyJob,
    Retire,
    Start,
    broken_by,
    decide,
    grouped_cause,
    retries,
)


def test_the_longest_job_gets_the_idle_gang() -> None:
    ready = [ReadyJob("short", 1, 1.0), ReadyJob("long", 1, 9.0), ReadyJob("middle", 1, 5.0)]
    assert decide(ready, [Gang(1, 1, "idle"), Gang(2, 1, "idle")], 2) == [Start("long", 1), Start("middle", 2)]


def test_the_longest_is_first_whatever_its_width() -> None:
    ready = [ReadyJob("wide", 4, 2.0), ReadyJob("narrow", 1, 3.0)]
    assert decide(ready, [Gang(1, 1, "idle"), Gang(2, 4, "idle")], 5) == [Start("narrow", 1), Start("wide", 2)]


def test_a_gang_is_created_for_each_job_that_fits() -> None:
    assert decide([ReadyJob(c, 1, 1.0) for c in "abc"], [], 2) == [Create(1), Create(1)]


def test_a_starting_gang_is_waited_for() -> None:
    assert decide([ReadyJob("a", 1, 1.0)], [Gang(1, 1, "starting")], 2) == []


def test_idle_gangs_make_room_for_a_wide_job() -> None:
    gangs = [Gang(1, 1, "idle"), Gang(2, 1, "idle")]
    assert decide([ReadyJob("wide", 2, 1.0)], gangs, 2) == [Retire(1), Retire(2)]
    assert decide([ReadyJob("wide", 2, 1.0)], [], 2) == [Create(2)]


def test_slots_drain_for_a_wide_job_at_the_head() -> None:
    ready = [ReadyJob("wide", 2, 9.0), *(ReadyJob(f"narrow{i}", 1, 1.0) for i in range(9))]
    assert decide(ready, [Gang(1, 1, "busy"), Gang(2, 1, "idle")], 2) == [Retire(2)]
    assert decide(ready, [Gang(1, 1, "busy")], 2) == []


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 4), st.floats(1, 100)), min_size=1, max_size=14),
    slots=st.integers(4, 6),
    seed=st.integers(0, 2**16),
)
def test_any_grid_runs_to_its_end_within_the_slots(jobs: list[tuple[int, float]], slots: int, seed: int) -> None:
    """A fleet in miniature: gangs start, work and end in random order; each job runs once, slots are never exceeded."""
    chance = random.Random(seed)
    ready = {f"job{i}": ReadyJob(f"job{i}", workers, flops) for i, (workers, flops) in enumerate(jobs)}
    gangs: dict[int, Gang] = {}
    running: dict[int, str] = {}
    done: list[str] = []
    for step in range(400):
        for action in decide(list(ready.values()), list(gangs.values()), slots):
            match action:
                case Create(workers):
                    new = max(gangs, default=step * 100) + 1
                    gangs[new] = Gang(new, workers, "starting")
                case Retire(gang_id):
                    assert gangs.pop(gang_id).state == "idle"
                case Start(job_id, gang_id):
                    assert gangs[gang_id].state == "idle" and gangs[gang_id].workers == ready[job_id].workers
                    gangs[gang_id] = Gang(gang_id, gangs[gang_id].workers, "busy")
                    running[gang_id] = job_id
                    del ready[job_id]
            assert sum(gang.workers for gang in gangs.values()) <= slots
        moving = [gang for gang in gangs.values() if gang.state != "idle"]
        if moving:
            gang = chance.choice(moving)
            gangs[gang.id] = Gang(gang.id, gang.workers, "idle")
            if gang.state == "busy":
                done.append(running.pop(gang.id))
        elif not ready:
            break
    assert sorted(done) == sorted(f"job{i}" for i in range(len(jobs)))


def test_only_a_lost_worker_is_tried_again_and_not_for_ever() -> None:
    assert retries("lost", 1) and retries("lost", 2) and not retries("lost", 3)
    assert not any(retries(kind, 1) for kind in ("bug", "out of memory", "disk full"))


def test_causes_that_differ_in_numbers_and_paths_are_one() -> None:
    a = "RuntimeError: shapes (8x64) and (32x16) do not fit in /tmp/jobs/0a1b2c3d4e5f/x.py\nmore"
    b = "RuntimeError: shapes (4x64) and (32x16) do not fit in /tmp/jobs/9f8e7d6c5b4a/x.py"
    assert grouped_cause(a) == grouped_cause(b)
    assert grouped_cause("ValueError: window") != grouped_cause("ValueError: pattern")
    assert grouped_cause("a bad face") == "a bad face"


def test_three_failures_of_one_cause_break_the_circuit() -> None:
    assert broken_by(["A: 1", "B: 2", "A: 3", "B: 4"]) is None
    assert broken_by(["A: 1", "B: 2", "A: 3", "A: 4"]) == "A: 1"
