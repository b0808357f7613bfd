"""What starts where: never more workers than slots, longest first, wide jobs not starved; what is tried again."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.scheduler import (
    Create,
    Gang,
    ReadyJob,
    ReadyJobs,
    Retire,
    Start,
    broken_by,
    decide,
    grouped_cause,
    retries,
    smaller_micro_batch,
)


def gang(gang_id: int, workers: int, state: str, node: str = "a") -> Gang:
    return Gang(gang_id, (node,) * workers, state)


def test_the_longest_job_gets_the_idle_gang() -> None:
    ready = ReadyJobs([ReadyJob("short", 1, 1.0), ReadyJob("long", 1, 9.0), ReadyJob("middle", 1, 5.0)])
    assert decide(ready, [gang(1, 1, "idle"), gang(2, 1, "idle")], {"a": 2}) == [Start("long", 1), Start("middle", 2)]


def test_the_longest_is_first_whatever_its_width() -> None:
    ready = ReadyJobs([ReadyJob("wide", 4, 2.0), ReadyJob("narrow", 1, 3.0)])
    gangs = [gang(1, 1, "idle"), gang(2, 4, "idle")]
    assert decide(ready, gangs, {"a": 5}) == [Start("narrow", 1), Start("wide", 2)]


def test_a_gang_is_created_for_each_job_that_fits() -> None:
    assert decide(ReadyJobs(ReadyJob(c, 1, 1.0) for c in "xyz"), [], {"a": 2}) == [Create(("a",)), Create(("a",))]


def test_a_starting_gang_is_waited_for() -> None:
    assert decide(ReadyJobs([ReadyJob("x", 1, 1.0)]), [gang(1, 1, "starting")], {"a": 2}) == []


def test_idle_gangs_make_room_for_a_wide_job() -> None:
    wide = ReadyJobs([ReadyJob("wide", 2, 1.0)])
    assert decide(wide, [gang(1, 1, "idle"), gang(2, 1, "idle")], {"a": 2}) == [Retire(1), Retire(2)]
    assert decide(wide, [], {"a": 2}) == [Create(("a", "a"))]


def test_slots_drain_for_a_wide_job_at_the_head() -> None:
    ready = ReadyJobs([ReadyJob("wide", 2, 9.0), *(ReadyJob(f"narrow{i}", 1, 1.0) for i in range(9))])
    assert decide(ready, [gang(1, 1, "busy"), gang(2, 1, "idle")], {"a": 2}) == [Retire(2)]
    assert decide(ready, [gang(1, 1, "busy")], {"a": 2}) == []


def test_one_node_drains_while_the_others_go_on() -> None:
    ready = ReadyJobs([ReadyJob("wide", 4, 9.0), *(ReadyJob(f"narrow{i}", 1, 1.0) for i in range(9))])
    gangs = [gang(1, 2, "busy", "a"), gang(2, 1, "busy", "b"), gang(3, 3, "busy", "c")]
    assert decide(ready, gangs, {"a": 4, "b": 4, "c": 4}) == [Create(("c",)), Create(("a",)), Create(("a",))]


def test_a_gang_keeps_to_one_node_where_it_can() -> None:
    ready = ReadyJobs([ReadyJob("x", 3, 1.0)])
    gangs = [gang(1, 2, "busy", "a"), gang(2, 2, "busy", "b")]
    assert decide(ready, gangs, {"a": 4, "b": 4}) == [], "two free on each: it waits"
    assert decide(ready, gangs, {"a": 4, "b": 4, "c": 4}) == [Create(("c",) * 3)]
    assert decide(ReadyJobs([ReadyJob("x", 6, 1.0)]), [], {"a": 4, "b": 4}) == [Create(("a",) * 4 + ("b",) * 2)]


def test_the_fullest_node_that_fits_is_taken() -> None:
    ready = ReadyJobs([ReadyJob("x", 1, 1.0)])
    assert decide(ready, [gang(1, 3, "busy", "b")], {"a": 4, "b": 4}) == [Create(("b",))]


def test_a_job_of_more_than_a_node_drains_as_many_as_it_needs() -> None:
    ready = ReadyJobs([ReadyJob("x", 8, 9.0), ReadyJob("y", 1, 1.0)])
    gangs = [gang(1, 1, "busy", "a"), gang(2, 1, "idle", "b"), gang(3, 3, "busy", "c")]
    assert decide(ready, gangs, {"a": 4, "b": 4, "c": 4}) == [Retire(2), Create(("c",))]


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 4), st.floats(1, 100, allow_subnormal=False)), min_size=1, max_size=14),
    slots=st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda slots: sum(slots) >= 4),
    seed=st.integers(0, 2**16),
)
def test_any_grid_runs_to_its_end_within_the_slots(jobs: list[tuple[int, float]], slots: list[int], seed: int) -> None:
    """A fleet in miniature: gangs start, work and end in random order; each job runs once, slots are never exceeded."""
    chance = random.Random(seed)
    nodes = {f"node{i}": n for i, n in enumerate(slots)}
    widths = {f"job{i}": workers for i, (workers, _) in enumerate(jobs)}
    ready = ReadyJobs(ReadyJob(f"job{i}", workers, length) for i, (workers, length) in enumerate(jobs))
    waiting = {job.id: job for job in ready.by_length(())}
    gangs: dict[int, Gang] = {}
    running: dict[int, str] = {}
    done: list[str] = []
    for step in range(400):
        for action in decide(ready, list(gangs.values()), nodes):
            match action:
                case Create(on):
                    new = max(gangs, default=step * 100) + 1
                    gangs[new] = Gang(new, on, "starting")
                    assert len(set(on)) == 1 or len(on) > max(slots)
                case Retire(gang_id):
                    assert gangs.pop(gang_id).state == "idle"
                case Start(job_id, gang_id):
                    assert gangs[gang_id].state == "idle" and gangs[gang_id].workers == widths[job_id]
                    gangs[gang_id] = Gang(gang_id, gangs[gang_id].nodes, "busy")
                    running[gang_id] = job_id
                    ready.remove(waiting.pop(job_id))
            held = Counter(node for gang in gangs.values() for node in gang.nodes)
            assert all(held[node] <= n for node, n in nodes.items())
        moving = [gang for gang in gangs.values() if gang.state != "idle"]
        if moving:
            one = chance.choice(moving)
            gangs[one.id] = Gang(one.id, one.nodes, "idle")
            if one.state == "busy":
                done.append(running.pop(one.id))
        elif not ready:
            break
    assert sorted(done) == sorted(widths)


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(1, 9, allow_subnormal=False)), max_size=20), st.randoms())
def test_ready_jobs_come_longest_first_whatever_is_removed(
    jobs: list[tuple[int, float]], chance: random.Random
) -> None:
    every = [ReadyJob(f"job{i:02}", workers, length) for i, (workers, length) in enumerate(jobs)]
    gone = {job.id for job in every if chance.random() < 0.5}
    ready = ReadyJobs(every)
    for job in every:
        if job.id in gone:
            ready.remove(job)
    left = sorted((job for job in every if job.id not in gone), key=lambda job: (-job.length, job.id))
    assert list(ready.by_length(())) == left and len(ready) == len(left)
    assert list(ready.by_length({1})) == [job for job in left if job.workers != 1]


def test_only_a_lost_worker_is_tried_again_and_not_for_ever() -> None:
    assert retries("lost", 1) and retries("lost", 2) and not retries("lost", 3)
    assert not any(retries(kind, 1) for kind in ("bug", "out of memory", "disk full"))


def test_the_micro_batch_is_halved_to_what_divides_the_share() -> None:
    assert smaller_micro_batch(8, 8) == 4 and smaller_micro_batch(8, None) == 4 and smaller_micro_batch(8, 2) == 1
    assert smaller_micro_batch(6, 6) == 3 and smaller_micro_batch(6, 3) == 1 and smaller_micro_batch(9, None) == 3
    assert smaller_micro_batch(8, 1) is None


def test_causes_that_differ_in_numbers_and_paths_are_one() -> None:
    a = "RuntimeError: shapes (8x64) and (32x16) do not fit in /tmp/jobs/0a1b2c3d4e5f/x.py\nmore"
    b = "RuntimeError: shapes (4x64) and (32x16) do not fit in /tmp/jobs/9f8e7d6c5b4a/x.py"
    assert grouped_cause(a) == grouped_cause(b)
    assert grouped_cause("ValueError: window") != grouped_cause("ValueError: pattern")
    assert grouped_cause("a bad face") == "a bad face"


def test_three_failures_of_one_cause_break_the_circuit() -> None:
    assert broken_by(["A: 1", "B: 2", "A: 3", "B: 4"]) is None
    assert broken_by(["A: 1", "B: 2", "A: 3", "A: 4"]) == "A: 1"
