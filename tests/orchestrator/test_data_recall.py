"""The recall language: its statistics, and that a document depends on (seed, step, row) alone."""

import time

import numpy as np
import pytest
from pydantic import ValidationError

from orchestrator.data.recall import RecallLanguage
from orchestrator.errors import one_line

DATA = RecallLanguage(context=256, g_min=4)


def returns(tokens: np.ndarray, data: RecallLanguage) -> np.ndarray:
    """Distance of each key in the documents to its last occurrence there."""
    found = []
    for document in tokens:
        last: dict[int, int] = {}
        for position in np.flatnonzero((document >= data.fillers) & (document < data.fillers + data.keys)):
            key = int(document[position])
            if key in last:
                found.append(position - last[key])
            last[key] = int(position)
    return np.array(found)


def shares(distances: np.ndarray) -> np.ndarray:
    return np.histogram(distances, [0, 8.5, 32.5, 128.5, np.inf])[0] / len(distances)


def test_statistics_are_those_of_the_published_language() -> None:
    """37 queries a document; distances 35% to 8, 52% to 32, 11% to 128, 1.65% beyond."""
    tokens = np.concatenate([DATA.batch(seed, 0, range(500)) for seed in range(8)])
    distances = returns(tokens, DATA)
    assert len(distances) / len(tokens) == pytest.approx(37, abs=2)
    assert (np.abs(shares(distances) - [0.35, 0.52, 0.11, 0.0165]) < [0.02, 0.02, 0.01, 0.003]).all(), shares(distances)
    assert distances.min() == 4
    assert distances.max() <= 252


def test_larger_g_min_leaves_a_window_less_to_answer() -> None:
    """Of a long document's returns (about half of all documents) those within 32 tokens go."""
    near, far = (returns(RecallLanguage(g_min=g).batch(0, 0, range(1000)), DATA) for g in (4, 48))
    assert (far <= 32).sum() < 0.8 * (near <= 32).sum()
    assert shares(far)[3] > 1.3 * shares(near)[3]


def test_every_return_repeats_the_value() -> None:
    for document in DATA.batch(5, 9, range(50)):
        value_of: dict[int, int] = {}
        keys = np.flatnonzero((document >= 32) & (document < 64))
        keys = keys[keys < 256]
        assert len(set((keys % 2).tolist())) <= 1  # one grid of two tokens
        for position in keys:
            key, value = int(document[position]), int(document[position + 1])
            assert 64 <= value < 96
            assert value_of.setdefault(key, value) == value


def test_filler_follows_the_chain() -> None:
    """Zipf 1.2 over 16 successors: the commonest follows with probability 0.387."""
    tokens = DATA.batch(0, 0, range(400))
    pairs = np.stack([tokens[:, :-1], tokens[:, 1:]], -1).reshape(-1, 2)
    pairs = pairs[(pairs < 32).all(1)]
    counts = np.zeros((32, 32))
    np.add.at(counts, tuple(pairs.T), 1)
    # Pairs that bridge an overwritten stretch never count: both tokens stand side by side in the text.
    assert ((counts > 0).sum(1) <= 16).all()
    weights = np.arange(1, 17) ** -1.2
    common = np.sort(counts[counts.sum(1).argmax()])[::-1][:16]
    np.testing.assert_allclose(common / common.sum(), weights / weights.sum(), atol=0.02)


def test_a_row_depends_on_seed_step_and_row_alone() -> None:
    whole = DATA.batch(3, 17, range(8))
    assert whole.dtype == np.int64
    assert whole.shape == (8, 257)
    np.testing.assert_array_equal(np.concatenate([DATA.batch(3, 17, range(5)), DATA.batch(3, 17, range(5, 8))]), whole)
    np.testing.assert_array_equal(RecallLanguage().batch(3, 17, range(8)), whole)
    for other in (DATA.batch(4, 17, range(8)), DATA.batch(3, 18, range(8)), DATA.batch(3, 17, range(8, 16))):
        assert (other != whole).any(1).all()
    assert (DATA.held_out(8) != DATA.batch(0, 0, range(8))).any(1).all()
    np.testing.assert_array_equal(DATA.held_out(8), DATA.held_out(12)[:8])


def test_the_language_is_pinned() -> None:
    """Another stream of tokens from the same identity would mix two languages under one name."""
    assert DATA.batch(0, 0, range(1))[0, :16].tolist() == [0, 52, 79, 60, 95, 8, 0, 55, 90, 2, 0, 47, 81, 54, 84, 47]
    assert DATA.held_out(1)[0, :16].tolist() == [12, 8, 13, 24, 1, 1, 7, 5, 6, 0, 56, 78, 48, 91, 0, 0]
    assert DATA.facts(1).distance.tolist() == [60, 46, 88, 148, 38, 180, 208, 168, 132, 174, 44, 136]


def test_a_late_step_costs_what_an_early_one_does() -> None:
    DATA.batch(0, 0, range(8))

    def best(step: int) -> float:
        times = []
        for _ in range(20):
            start = time.process_time()
            DATA.batch(0, step, range(8))
            times.append(time.process_time() - start)
        return min(times)

    assert best(1_000_000) < 3 * best(1)
    assert best(1) < 0.02  # 8 rows: 0.7 ms on an idle core


def test_facts_are_stated_once_and_asked_once_at_every_distance() -> None:
    facts = DATA.facts(96)
    assert facts.tokens.shape == (96, 257)
    assert len(facts.answer) == 96 * 12
    np.testing.assert_array_equal(facts.distance, facts.answer - facts.stated)
    for place in (0, -1):  # value and key
        asked = facts.tokens[facts.document, facts.answer + place]
        np.testing.assert_array_equal(asked, facts.tokens[facts.document, facts.stated + place])
    assert (facts.tokens[facts.document, facts.answer] >= 64).all()
    assert ((facts.tokens >= 32).sum(1) == 12 * 4).all()  # nothing but filler besides
    keys = np.where((facts.tokens >= 32) & (facts.tokens < 64), facts.tokens, -1)
    assert all((np.unique(row[row >= 0], return_counts=True)[1] == 2).all() for row in keys)
    counts = np.histogram(facts.distance, [0, 8.5, 32.5, 128.5, np.inf])[0]
    assert (counts >= [60, 120, 300, 400]).all()
    assert facts.distance.min() >= 4
    assert facts.distance.max() <= 252


def test_values_give_no_hint() -> None:
    """Uniform values: the commonest one is near chance, 1/32."""
    facts = DATA.facts(200)
    values = facts.tokens[facts.document, facts.answer]
    assert np.bincount(values - 64).max() / len(values) < 0.05
    assert DATA.chance == 1 / 32


def test_other_shapes() -> None:
    data = RecallLanguage(context=64, keys=8, values=4, fillers=16, facts_per_document=(2, 4))
    assert data.vocab_size == 28
    assert data.batch(0, 0, range(4)).max() < 28
    assert data.batch(0, 0, range(0)).shape == (0, 65)
    assert len(data.facts(3).answer) == 3 * 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"g_min": 252}, ["g_min", "252", "give less than 252"]),
        ({"contxt": 256}, ["contxt", "did you mean context"]),
        ({"context": "256"}, ["context", "'256'", "integer"]),
        ({"facts_per_document": (2, 33)}, ["facts_per_document", "(2, 33)", "32"]),
        ({"successors": 33}, ["successors", "33", "32"]),
    ],
)
def test_refusals_are_one_line(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        RecallLanguage(**fields)  # type: ignore[arg-type]
    line = one_line(refused.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_identity_names_every_field() -> None:
    assert RecallLanguage(g_min=48).identity() != DATA.identity()
    assert set(DATA.identity()) == set(RecallLanguage.model_fields)
