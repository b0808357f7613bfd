import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.laws.emergence import (
    ENDS_ABOVE,
    NEVER_EMERGED,
    NO_PLATEAU,
    NON_MONOTONE,
    SLOPE_AT_BOUND,
    TOO_FEW_POINTS,
    emergence_level,
    fit_curve,
)

DATA = Path(__file__).parents[2] / "data"
CHANCE = 1 / 32
# Exact logistics with L=.05, U=.9, k=5 and T50 of 8e9 and 20e9 tokens.
TOKENS = np.array([0.5e9, 1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 64e9])
A = [0.0520589809318171, 0.059197273917644726, 0.08991831083374652, 0.20440987688059542, 0.475, 0.7455901231194046,
     0.8600816891662535, 0.8908027260823553]  # fmt: skip
B = [0.050282127670801494, 0.051269460201868226, 0.05568892328564213, 0.07504025110280316, 0.15224531003415256,
     0.3740015301893813, 0.6748260230032804, 0.8370382757225064]  # fmt: skip


def logistic(tokens: np.ndarray, floor: float, ceiling: float, slope: float, t50: float) -> np.ndarray:
    return floor + (ceiling - floor) / (1 + np.exp(-slope * (np.log10(tokens) - np.log10(t50))))


def pythia(model: str) -> tuple[list[float], list[float]]:
    with (DATA / "pythia_lambada.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    return [float(row["tokens"]) for row in rows], [float(row["accuracy"]) for row in rows]


@pytest.mark.parametrize("chance", [0.05, None])
def test_exact_curves_are_recovered(chance: float | None) -> None:
    a, b = fit_curve(TOKENS, A, chance), fit_curve(TOKENS, B, chance)
    assert a.t50_tokens == pytest.approx(8e9, rel=1e-5)
    assert b.t50_tokens == pytest.approx(20e9, rel=1e-5)
    assert a.t50_tokens and b.t50_tokens and b.t50_tokens / a.t50_tokens == pytest.approx(2.5, rel=1e-5)
    assert (a.slope, a.ceiling, a.floor) == pytest.approx((5, 0.9, 0.05), rel=1e-5)
    assert a.tokens_at(0.5) == pytest.approx(8445910000, rel=1e-5)
    assert a.tokens_at(0.95) is None and a.tokens_at(0.05) is None
    assert a.flags == b.flags == ()
    assert a.at(TOKENS) == pytest.approx(np.array(A), abs=1e-6)


def test_without_a_plateau_neither_ceiling_nor_t50_is_reported() -> None:
    curve = fit_curve(TOKENS[:5], A[:5], chance=0.05, level=0.4)
    assert curve.flags == (NO_PLATEAU,)
    assert curve.ceiling is None and curve.t50_tokens is None
    assert curve.crossing_tokens is not None and 4e9 < curve.crossing_tokens < 8e9


def test_a_curve_that_rises_a_second_time_says_so() -> None:
    tokens = np.arange(1, 16) * 122_880
    first = CHANCE + (0.75 - CHANCE) / (1 + np.exp(-30 * (np.log10(tokens) - np.log10(6e5))))
    curve = fit_curve(tokens, first + np.where(tokens > 1.5e6, 0.12, 0.0), CHANCE)
    assert curve.flags == (ENDS_ABOVE,)
    assert curve.t50_tokens == pytest.approx(6e5, rel=0.05), "of the first rise"
    assert fit_curve(tokens, first, CHANCE).flags == ()


def test_a_curve_that_falls_again_has_no_t50() -> None:
    tokens, accuracy = pythia("pythia-70m-deduped")  # rises to .261, falls to .192
    # A logistic forced on these points levels off at .2197 and puts T50 at 2.2e9; half of that is crossed at 3.43e9.
    curve = fit_curve(tokens, accuracy, chance=0.0, level=0.2197 / 2)
    assert NON_MONOTONE in curve.flags and curve.t50_tokens is None
    assert curve.crossing_tokens == pytest.approx(3.43e9, rel=0.01)


def test_a_real_curve_is_fitted_with_its_dispersion() -> None:
    tokens, accuracy = pythia("pythia-1.4b")
    curve = fit_curve(tokens, accuracy, chance=0.0, n_trials=5153)
    assert curve.flags == ()
    assert curve.dispersion is not None and 11 < curve.dispersion < 35  # binomial errors would be 3-6 times too small
    assert curve.t50_tokens == pytest.approx(5.8e9, rel=0.05)


def test_a_stuck_seed_is_censored_not_fitted() -> None:
    tokens = np.arange(1, 16) * 122_880
    noise = np.random.default_rng(0).normal(0, 0.015, len(tokens))
    curve = fit_curve(tokens, np.clip(CHANCE + noise, 0, 1), CHANCE)
    assert curve.flags == (NEVER_EMERGED,) and not curve.emerged
    assert curve.t50_tokens is None and curve.ceiling is None and curve.crossing_tokens is None
    assert curve.bracket == (pytest.approx(15 * 122_880), None)
    with pytest.raises(ValueError, match="never emerged"):
        curve.at(tokens)


def test_half_a_capability_is_not_emergence() -> None:
    tokens = np.arange(1, 16) * 122_880
    curve = fit_curve(tokens, logistic(tokens, CHANCE, 0.18, 14, 0.8e6), CHANCE)
    assert not curve.emerged and curve.last_value == pytest.approx(0.18, abs=0.01)


def test_the_crossing_is_interpolated_over_log_tokens() -> None:
    curve = fit_curve([1e5, 1e6, 1e7, 2e7, 4e7], [0.1, 0.3, 0.7, 0.9, 0.9], chance=0.0)
    assert curve.crossing_tokens == pytest.approx(10**6.5)
    assert curve.bracket == (pytest.approx(1e6), pytest.approx(1e7))


def test_a_jump_between_two_points_puts_the_slope_at_its_bound() -> None:
    tokens = np.geomspace(1e5, 1e7, 13)
    curve = fit_curve(tokens, np.where(tokens < 1e6, CHANCE, 0.95), CHANCE)
    assert SLOPE_AT_BOUND in curve.flags
    assert curve.t50_tokens is not None and tokens[5] <= curve.t50_tokens <= tokens[6]


def test_too_few_points_give_a_crossing_only() -> None:
    curve = fit_curve([1e5, 1e6, 2e6], [0.03, 0.4, 0.9], CHANCE)
    assert curve.flags == (TOO_FEW_POINTS,) and curve.emerged
    assert curve.t50_tokens is None and curve.crossing_tokens is not None


def test_the_level_of_emergence_lies_above_chance() -> None:
    assert emergence_level(1 / 32) == emergence_level(None) == 0.5
    assert emergence_level(0.5) == 0.75


@pytest.mark.parametrize(
    ("tokens", "value", "match"),
    [([1e5, 1e6], [0.1], "one value for each point"), ([0.0], [0.1], "nothing to fit"), ([1e5], [46.1], "percent")],
)
def test_wrong_points_are_refused(tokens: list[float], value: list[float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit_curve(tokens, value)


@settings(max_examples=40, deadline=None)
@given(
    m=st.floats(5.5, 6.1), k=st.floats(6, 30), ceiling=st.floats(0.7, 1.0), shift=st.floats(-2, 3),
    order=st.permutations(range(15)),
)  # fmt: skip
def test_t50_scales_with_the_unit_of_tokens_and_ignores_order(
    m: float, k: float, ceiling: float, shift: float, order: list[int]
) -> None:
    tokens = np.arange(1, 16) * 122_880.0
    value = logistic(tokens, CHANCE, ceiling, k, 10**m)
    curve = fit_curve(tokens, value, CHANCE)
    moved = fit_curve(tokens[order] * 10**shift, value[order], CHANCE)
    if curve.t50_tokens is None:
        assert moved.t50_tokens is None and set(curve.flags) & {NO_PLATEAU, NEVER_EMERGED}
    else:
        assert curve.t50_tokens == pytest.approx(10**m, rel=2e-3)
        assert moved.t50_tokens == pytest.approx(curve.t50_tokens * 10**shift, rel=1e-3)
