"""Scaling laws against answers known from construction or from an exhaustive search on published data."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad, minimize

from analysis.law_document import Settings, fitted, judged
from analysis.laws.bootstrap import bootstrap
from analysis.laws.huber import minimise
from analysis.laws.scaling import EXPONENT_BOUNDS, FORMS, Law, Points, fit_law, one_ray, stated

DATA = Path(__file__).parents[2] / "data"
CASES: dict[str, Any] = {case["id"]: case for case in json.loads((DATA / "fit_cases.json").read_text())}
CHINCHILLA, BARE = FORMS["chinchilla"], FORMS["no-constant"]


def hybrid(sizes: str = "S1 S2 S3 S4") -> Points:
    with (DATA / "hybrid_longppl.tsv").open() as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["model_size"] in sizes.split()]
    n = np.array([float(row["n"]) for row in rows])
    d = n * np.array([float(row["token_multiplier"].rstrip("n")) for row in rows])
    return Points(np.log([float(row["loss"]) for row in rows]), n, d)


def case(name: str) -> Points:
    given = CASES[name]["input"]
    return Points(*(np.array(given[key], dtype=float) for key in ("loss", "N", "D")))


def drawn(seed: int = 0, points: int = 240, noise: float = 0.01) -> Points:
    rng = np.random.default_rng(seed)
    n, d = 10 ** rng.uniform(7, 9, points), 10 ** rng.uniform(9, 11, points)
    loss = (1.7 + 400 * n**-0.34 + 410 * d**-0.28) * np.exp(rng.normal(0, noise, points))
    return Points(loss, n, d)


def test_the_hybrid_papers_points_reach_the_true_optimum() -> None:
    law = fit_law(hybrid("S1 S2 S3"), BARE)
    answer = CASES["F1_early_stop"]["answer"]["unbounded"]
    assert law.objective <= 1.95156e-4 and law.objective == pytest.approx(answer["obj"], rel=1e-8)
    assert law.values == pytest.approx({"E": 0} | {k: answer[k] for k in ("A", "B", "alpha", "beta")}, rel=1e-5)
    assert law.agreed and law.at_bound == ()
    held_out = judged(law, hybrid("S4"))
    assert held_out["r2"] == pytest.approx(0.979, abs=5e-4)


def test_under_the_papers_bounds_alpha_ends_on_one() -> None:
    points = hybrid("S1 S2 S3")
    limits = {"alpha": (0.2, 0.3)}
    law = fit_law(points, BARE, limits)
    answer = CASES["F1_early_stop"]["answer"]["alpha in [.2,.3]"]
    assert law.objective <= 2.01723e-4 and law.objective == pytest.approx(answer["obj"], rel=1e-8)
    assert law.values == pytest.approx({"E": 0} | {k: answer[k] for k in ("A", "B", "alpha", "beta")}, rel=1e-5)
    assert law.at_bound == ("alpha",)
    told = fitted(points, Settings(BARE, limits, replicates=0)).document
    assert "alpha at bound 0.3" in told["flags"]


def test_the_fit_of_the_papers_points_takes_little_time() -> None:
    points = hybrid("S1 S2 S3")
    fit_law(points, BARE)
    spent = []
    for _ in range(5):
        start = time.process_time()
        fit_law(points, BARE)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.2


def test_of_two_basins_the_deeper_is_found() -> None:
    law = fit_law(hybrid(), BARE)
    answer = CASES["F2_two_basins"]["answer"]
    assert law.objective == pytest.approx(answer["global_obj"], rel=1e-7)
    found = [law.values[k] for k in ("alpha", "beta", "A", "B")]
    assert found == pytest.approx([answer[k] for k in ("alpha", "beta", "A", "B")], rel=1e-5)
    # The other basin is there: started in it, the descent stays in it.
    problem, _ = stated(hybrid(), BARE, law.limits)
    other = np.array([[0.0, 0.0, answer["local_alpha"], answer["local_beta"]]])
    other[0, :2] = np.log(hybrid().loss).mean() - np.log(2)
    _, loss = minimise(problem, other, np.log(hybrid().loss)[None], np.ones((1, 23)))
    assert loss[0] == pytest.approx(answer["local_obj"], rel=1e-5) or loss[0] == pytest.approx(law.objective, rel=1e-5)


def test_a_design_on_one_ray_names_no_a_and_b() -> None:
    points, answer = case("F4_collinear"), CASES["F4_collinear"]["answer"]
    assert one_ray(points) == pytest.approx(20)
    told = fitted(points, Settings()).document
    assert told["A"] is told["B"] is told["alpha"] is told["beta"] is told["compute_optimal"] is None
    assert told["condition_number"] > 1e15
    assert any("A and B are not identified (D = 20 N at every point)" in flag for flag in told["flags"])
    assert told["identified"]["E"] == pytest.approx(answer["E"], rel=1e-6)
    assert told["identified"]["exponent"] == pytest.approx(answer["exponent"], rel=1e-6)
    assert told["identified"]["A_plus_B_ratio_power"] == pytest.approx(answer["A_plus_B20"], rel=1e-6)
    n = points.variable("alpha")
    d = n * np.array(answer["noncollinear_ratios"])
    twin = fit_law(Points(1.7 + 400 * n**-0.3 + 400 * d**-0.3, n, d), CHINCHILLA)
    assert twin.condition == pytest.approx(34, abs=0.5)
    assert twin.values == pytest.approx({"E": 1.7, "A": 400, "B": 400, "alpha": 0.3, "beta": 0.3}, rel=1e-5)


def test_a_constant_that_is_not_there_is_bounded_from_above() -> None:
    told = fitted(case("F5_no_floor"), Settings()).document
    assert told["E"] < 1e-6 and told["ci"]["E"][0] == 0
    assert any(flag.startswith("E at 0") for flag in told["flags"])
    answer = CASES["F5_no_floor"]["answer"]
    assert [told[k] for k in ("A", "B", "alpha", "beta")] == pytest.approx(
        [answer[k] for k in ("A", "B", "alpha", "beta")], rel=1e-5
    )


def test_the_definition_of_n_moves_the_exponent() -> None:
    given, answer = CASES["F8_embedding"]["input"], CASES["F8_embedding"]["answer"]
    bare, d = (grid.ravel() for grid in np.meshgrid(given["N_noemb"], given["D"]))
    total = bare + 47491 * bare ** (1 / 3)
    loss = 1.82 + 482 / total**0.348 + 2085 / d**0.366
    told = {
        name: fitted(Points(loss, n, d), Settings(replicates=0)).document
        for name, n in (("total", total), ("noemb", bare))
    }
    assert told["total"]["alpha"] == pytest.approx(answer["total"]["alpha"], abs=5e-5)
    assert told["total"]["compute_optimal"]["a"] == pytest.approx(answer["total"]["a"], abs=5e-4)
    assert told["noemb"]["alpha"] == pytest.approx(answer["noemb"]["alpha"], abs=5e-5)
    assert told["noemb"]["E"] == pytest.approx(answer["noemb"]["E"], abs=5e-5)
    assert told["noemb"]["compute_optimal"]["a"] == pytest.approx(answer["noemb"]["a"], abs=5e-4)


def test_undecayed_short_runs_bend_the_law_and_are_suspected() -> None:
    points, answer = case("F9_small_D"), CASES["F9_small_D"]["answer"]
    told = fitted(points, Settings(predict=((7e9, 1e12),))).document
    assert told["beta"] == pytest.approx(answer["all"]["beta"], abs=5e-5)
    assert told["alpha"] == pytest.approx(answer["all"]["alpha"], abs=5e-5)
    assert told["E"] == pytest.approx(answer["all"]["E"], abs=5e-4)
    assert (told["A"], told["B"]) == pytest.approx((answer["all"]["A"], answer["all"]["B"]), rel=2e-4)
    assert told["predictions"][0]["loss"] == pytest.approx(answer["pred_7e9_1e12"]["all"], abs=5e-5)
    rest = points.take(points.variable("beta") >= 5e8)
    law = fit_law(rest, CHINCHILLA)
    assert law.values == pytest.approx(answer["drop_D_below_5e8"], rel=1e-5)
    assert float(law.predict(7e9, 1e12)) == pytest.approx(answer["pred_7e9_1e12"]["true"], abs=5e-5)
    without = next(row for row in told["sensitivity"] if row["without"].startswith("d = 1e+08"))
    assert without["beta"] < 0.46


@pytest.mark.parametrize("task", ["hellaswag_val", "arc_challenge_test", "arc_easy_test", "piqa_val", "csqa_val",
                                  "socialiqa_val", "openbookqa_test", "mmlu_test"])  # fmt: skip
def test_the_olmo_ladder_predicts_13b_as_published(task: str) -> None:
    runs: dict[tuple[float, str], list[tuple[float, float]]] = {}
    with (DATA / "olmo_ladder_last5.csv").open() as file:
        for row in csv.DictReader(file):
            if row["task"] == task:
                at = runs.setdefault((float(row["N"]), row["length"]), [])
                at.append((float(row["tokens"]), float(row["bpb"])))
    with (DATA / "olmo_ladder_step1.csv").open() as file:
        name = "mmlu_avg_test" if task == "mmlu_test" else task
        published = next(float(r["Pred"]) for r in csv.DictReader(file) if r["Task"].startswith(name))
    assert len(runs) == 16
    points = Points(
        np.array([np.mean([bpb for _, bpb in rows]) for rows in runs.values()]),
        np.array([n for n, _ in runs]),
        np.array([max(tokens for tokens, _ in rows) for rows in runs.values()]),
    )
    law = fit_law(points, CHINCHILLA)
    assert float(law.predict(13202396160, 5000088518656)) == pytest.approx(published, abs=5e-5)
    if task == "csqa_val":
        assert "E" in law.vanished


def test_the_gradient_is_exact() -> None:
    points = drawn(points=30)
    problem, _ = stated(points, CHINCHILLA, dict.fromkeys(("alpha", "beta"), EXPONENT_BOUNDS))
    y, weight = np.log(points.loss), np.random.default_rng(1).uniform(0.5, 2, 30)
    for theta in ([0.1, -0.3, 0.4, 0.2, 0.5], [1.0, 0.2, 1.2, 0.7, -3.0]):
        error = check_grad(lambda t: problem.loss(t, y, weight), lambda t: problem.gradient(t, y, weight), theta)
        assert error < 1e-6


def test_no_other_optimiser_gets_lower() -> None:
    points = drawn(3, 60)
    law = fit_law(points, CHINCHILLA)
    problem, _ = stated(points, CHINCHILLA, law.limits)
    y, scale = np.log(points.loss), 1 / (60 * 1e-3)
    rng = np.random.default_rng(0)
    for _ in range(12):
        start = law.theta + rng.normal(0, [0.5, 0.5, 0.2, 0.2, 0.3])
        found = minimize(
            lambda t: (scale * problem.loss(t, y, np.ones(60)), scale * problem.gradient(t, y, np.ones(60))),
            start, jac=True, method="L-BFGS-B", bounds=list(zip(problem.lower, problem.upper, strict=True)),
            options={"ftol": 1e-15, "gtol": 1e-11, "maxiter": 4000},
        )  # fmt: skip
        assert law.objective <= found.fun / scale * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["residual", "pairs"])
def test_refits_are_optima_too(kind: Any) -> None:
    points = drawn(2)
    law = fit_law(points, CHINCHILLA)
    refits = bootstrap(points, law, kind, count=60, seed=5)
    assert refits.failed == 0 and refits.theta.shape == (60, 5)
    problem, _ = stated(points, CHINCHILLA, law.limits)
    rng = np.random.default_rng(5)
    y, weight = np.log(points.loss), np.ones((60, 240))
    if kind == "residual":
        fit = problem.predicted(law.theta)
        y = fit + ((y - fit) * np.sqrt(240 / 235))[rng.integers(0, 240, (60, 240))]
    else:
        y, weight = np.repeat(y[None], 60, 0), rng.multinomial(240, np.full(240, 1 / 240), 60).astype(float)
    for i in range(0, 60, 12):
        mine, trust = y[i], weight[i]
        found = minimize(
            lambda t, m=mine, w=trust: (problem.loss(t, m, w) / 0.24, problem.gradient(t, m, w) / 0.24),
            refits.theta[i], jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-11, "maxiter": 4000},
        )  # fmt: skip
        assert problem.loss(refits.theta[i], mine, trust) <= found.fun * 0.24 * (1 + 1e-8)


def test_a_thousand_refits_of_240_points_are_quick() -> None:
    points = drawn()
    law = fit_law(points, CHINCHILLA)
    start = time.process_time()
    refits = bootstrap(points, law, count=1000)
    assert time.process_time() - start <= 5.0
    ci = refits.interval(refits.values()["alpha"])
    assert ci and ci[0] < 0.34 < ci[1]


def test_whole_runs_drawn_anew_widen_the_interval_where_a_run_errs_as_one() -> None:
    rng = np.random.default_rng(4)
    n = np.repeat(np.geomspace(1e7, 1e9, 16), 8)
    d = np.tile(np.geomspace(1e9, 1e11, 8), 16)
    runs = np.repeat(np.arange(16), 8)
    loss = (1.7 + 400 * n**-0.34 + 410 * d**-0.28) * np.exp(rng.normal(0, 0.02, 16)[runs] + rng.normal(0, 0.002, 128))
    points = Points(loss, n, d)
    law = fit_law(points, CHINCHILLA)
    widths = []
    for kind, among in (("residual", None), ("runs", list(runs))):
        ci = (refits := bootstrap(points, law, kind, 300, among)).interval(refits.values()["alpha"])  # type: ignore[arg-type]
        assert ci
        widths.append(ci[1] - ci[0])
    assert widths[1] > 1.3 * widths[0]
    with pytest.raises(ValueError, match="run of each point"):
        bootstrap(points, law, "runs")


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_is_recovered(name: str) -> None:
    form = FORMS[name]
    rng = np.random.default_rng(0)
    n, d = 10 ** rng.uniform(7, 9, 40), 10 ** rng.uniform(9, 11, 40)
    loss = 1.6 * form.constant + 300 * n**-0.3 * form.size + 900 * d**-0.35 * form.data
    law = fit_law(Points(loss, n if form.size else None, d if form.data else None), form)
    expected = {"E": 1.6 * form.constant}
    expected |= {"A": 300, "alpha": 0.3} if form.size else {}
    expected |= {"B": 900, "beta": 0.35} if form.data else {}
    assert law.values == pytest.approx(expected, rel=1e-5)
    assert law.agreed and law.objective < 1e-12


@pytest.mark.parametrize(
    ("loss", "n", "match"),
    [
        ([0.0, 1, 2, 3, 4, 5], [1e7, 2e7, 3e7, 4e7, 5e7, 6e7], "loss: 0 is not a finite number above 0"),
        ([float("nan"), 1, 2, 3, 4, 5], [1e7, 2e7, 3e7, 4e7, 5e7, 6e7], "loss: nan"),
        ([5, 4, 3, 2, 1, 0.5], [1e7] * 6, "n: every point has 1e"),
        ([5, 4], [1e7, 2e7], "points: 2 distinct ones for the 5 parameters"),
    ],
)
def test_points_that_fit_no_law_are_refused(loss: list[float], n: list[float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit_law(Points(np.array(loss, dtype=float), np.array(n), np.array(n) * np.arange(2, len(n) + 2)), CHINCHILLA)


@settings(max_examples=12, deadline=None)
@given(alpha=st.floats(0.15, 0.8), beta=st.floats(0.15, 0.8), e=st.floats(0.5, 3), scale=st.floats(-3, 3))
def test_units_of_n_and_d_move_a_and_b_alone(alpha: float, beta: float, e: float, scale: float) -> None:
    n, d = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 5)))
    loss = e + (n / 1e8) ** -alpha + (d / 1e10) ** -beta

    def law(factor: float) -> Law:
        return fit_law(Points(loss, n * factor, d * factor), CHINCHILLA)

    one, other = law(1.0), law(10**scale)
    for name in ("E", "alpha", "beta"):
        assert other.values[name] == pytest.approx(one.values[name], rel=1e-4)
    assert one.values["alpha"] == pytest.approx(alpha, rel=1e-4)
