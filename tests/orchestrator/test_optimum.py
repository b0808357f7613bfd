"""Minima of tuning curves and the law they follow, on curves whose answer is known."""

import math

import numpy as np
import pytest

from orchestrator.tuning import optimum


def test_the_minimum_of_a_parabola_is_found_between_the_trials() -> None:
    rates = [0.004, 0.007, 0.012, 0.02, 0.035, 0.09]
    losses = [3 + 0.3 * math.log(rate / 0.015) ** 2 for rate in rates]
    found = optimum.find(rates, losses, 1e-3, 1e-1)
    assert found.method == "parabola" and found.rate == pytest.approx(0.015)
    assert (found.low, found.high) == pytest.approx((0.015, 0.015)) and found.at_edge is None


@pytest.mark.parametrize(
    ("rates", "losses", "best", "low", "high", "edge"),
    [
        ([0.002, 0.01, 0.05], [3.0, 2.0, 2.5], 0.01, 0.002, 0.05, None),  # too few for a fit
        ([0.01, 0.02, 0.04, 0.08], [4.0, 3.0, 2.0, 1.0], 0.08, 0.04, 0.1, "high"),  # no valley
        ([0.0012, 0.03], [1.0, 2.0], 0.0012, 0.001, 0.03, "low"),
        ([0.02], [1.0], 0.02, 0.001, 0.1, None),
    ],
)
def test_without_a_valley_it_is_the_best_trial(
    rates: list[float], losses: list[float], best: float, low: float, high: float, edge: str | None
) -> None:
    found = optimum.find(rates, losses, 1e-3, 1e-1)
    assert (found.rate, found.low, found.high) == pytest.approx((best, low, high))
    assert (found.at_edge, found.method) == (edge, "best trial")


@pytest.mark.parametrize(("rate", "edge"), [(0.00155, "low"), (0.0017, None), (0.06, None), (0.065, "high")])
def test_the_edge_is_the_outer_tenth_of_the_logarithm(rate: float, edge: str | None) -> None:
    assert optimum.find([rate], [1.0], 1e-3, 1e-1).at_edge == edge


def test_a_noisy_minimum_lies_in_its_interval_95_times_in_100() -> None:
    draw = np.random.default_rng(0)
    x = np.linspace(math.log(0.006), math.log(0.03), 9)
    covered = 0
    for _ in range(400):
        losses = 3 + 0.3 * (x - math.log(0.0135)) ** 2 + draw.normal(0, 0.01, len(x))
        found = optimum.find(list(np.exp(x)), list(losses), 1e-3, 1e-1)
        covered += found.low <= 0.0135 <= found.high
    assert 0.92 < covered / 400 < 0.98


def test_a_law_has_the_slope_its_points_were_made_with() -> None:
    points = [(n, 3.0 * n**-0.25, 1.0, 1.0) for n in (10_000, 40_000, 90_000)]
    law = optimum.fit(points)
    assert law.slope == pytest.approx(-0.25) and law.slope_ci == pytest.approx((-0.25, -0.25))
    assert law.rate(10**6) == pytest.approx(3.0 * 1e6**-0.25)
    assert law.interval(10**6) == pytest.approx((law.rate(10**6),) * 2)


@pytest.mark.parametrize("sizes", [3, 5])
def test_a_law_of_noisy_points_covers_slope_and_extrapolation(sizes: int) -> None:
    draw = np.random.default_rng(sizes)
    n = np.geomspace(1e4, 1e6, sizes)
    at, slopes, rates = 1e7, 0, 0
    for _ in range(1000):
        noisy = [(int(size), float(3 * size**-0.25 * math.exp(draw.normal(0, 0.1))), 1.0, 1.0) for size in n]
        law = optimum.fit(noisy)
        assert law.slope_ci is not None
        slopes += law.slope_ci[0] <= -0.25 <= law.slope_ci[1]
        low, high = law.interval(at)
        rates += low <= 3 * at**-0.25 <= high
    assert 0.93 < slopes / 1000 < 0.97 and 0.93 < rates / 1000 < 0.97


def test_over_two_sizes_the_interval_is_what_both_intervals_allow() -> None:
    law = optimum.fit([(100, 0.02, 0.01, 0.04), (10_000, 0.02, 0.01, 0.04)])
    assert law.slope_ci is None and law.slope == pytest.approx(0)
    assert law.interval(1000) == pytest.approx((0.01, 0.04))  # half-way between them
    low, high = law.interval(10**6)  # a line from 0.04 down through 0.01, as far again, and the same upwards
    assert (low, high) == pytest.approx((0.0025, 0.16))
