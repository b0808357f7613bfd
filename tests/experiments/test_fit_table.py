"""`gridlaw fit TABLE`: anybody's table gives a law, or one line that says what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner, Result

from experiments.command import app

DATA = Path(__file__).parents[1] / "data"
N = [1e7, 3e7, 1e8, 3e8]
GRID = [(n, d) for n in N for d in (1e9, 3e9, 1e10)]


def gridlaw(*words: str) -> Result:
    return CliRunner().invoke(app, ["fit", *words])


def told(*words: str) -> dict[str, Any]:
    result = gridlaw(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def lines(noise: float = 0.0) -> list[str]:
    away = np.random.default_rng(0).normal(0, noise, len(GRID))
    return [f"{n},{d},{(1.7 + 400 * n**-0.34 + 410 * d**-0.28) * np.exp(e)}"
            for (n, d), e in zip(GRID, away, strict=True)]  # fmt: skip


def write(folder: Path, rows: list[str], head: str = "N,D,loss") -> str:
    path = folder / "runs.csv"
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    return str(path)


def changed(row: int, text: str) -> list[str]:
    return [text if i == row else line for i, line in enumerate(lines())]


FAULTS: dict[str, tuple[list[str], list[str]]] = {
    "NaN": (changed(2, "1e7,1e10,nan"), ["loss", "row 4", "no value", "--drop-bad"]),
    "inf": (changed(2, "1e7,1e10,inf"), ["loss", "row 4", "not finite"]),
    "MLflow's infinity": (changed(2, "1e7,1e10,1.797e308"), ["loss", "row 4", "stands for infinity"]),
    "loss of 0": (changed(0, "1e7,1e9,0"), ["loss", "row 2", "not above 0"]),
    "text": (changed(1, "1e7,many,3.1"), ["D", "row 3", "many", "not a number"]),
    "one size": ([*lines()[:3], "1e7,3e10,2.9", "1e7,1e11,2.8"], ["n", "every point has 1e+07"]),
    "repeated rows": ([*lines(), lines()[3]], ["row 14", "repeats", "--drop-bad"]),
    "two units": ([*lines(), "100,2e9,3.0", "300,2e9,2.9"], ["N", "two units"]),
    "two points": (lines()[:1] + lines()[-1:], ["2 distinct", "5 parameters"]),
    "no rows": ([], ["no rows"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_table_gets_one_line(tmp_path: Path, fault: str) -> None:
    rows, words = FAULTS[fault]
    assert_one_line(gridlaw(write(tmp_path, rows), "--d", "D", "--n", "N", "--loss", "loss"), *words)


def assert_one_line(result: Result, *words: str) -> None:
    line = result.stderr.strip()
    assert result.exit_code == 2, (line, result.exception)
    assert "\n" not in line and line.startswith("gridlaw: "), line
    assert all(word in line for word in words), line
    assert result.stdout == ""


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, lines())
    assert_one_line(gridlaw(path, "--loss", "bits"), "--loss", "'bits'", "N, D, loss")
    assert_one_line(gridlaw(write(tmp_path, lines(), "x,y,z")), "--n", "usual name", "x, y, z")
    assert_one_line(gridlaw(str(tmp_path / "absent.csv")), "absent.csv", "no such file")
    write(tmp_path, lines())
    assert_one_line(gridlaw(path, "--exclude", "D ~ 3"), "D ~ 3", "no condition")
    assert_one_line(gridlaw(path, "--holdout", "N > 1"), "--holdout", "12 of 12")
    assert_one_line(gridlaw(path, "--bootstrap", "runs"), "--bootstrap runs", "--run")
    assert_one_line(gridlaw(path, "--alpha", "3,1"), "--alpha", "3,1")


def test_perplexity_of_one_has_no_logarithm_to_fit(tmp_path: Path) -> None:
    rows = [f"{n},{d},{ppl}" for (n, d), ppl in zip(GRID, [1.0, 1.05, *np.linspace(2, 4, 10)], strict=True)]
    path = write(tmp_path, rows, "N,D,longppl")
    assert_one_line(gridlaw(path, "--log"), "longppl", "row 2", "logarithm 0 is not above 0")


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    found = told(write(tmp_path, [*lines(1e-3), "1e9,1e10,nan", lines(1e-3)[0]]), "--drop-bad", "--replicates", "0")
    assert found["excluded"] == {"bad": 1, "repeated": 1} and found["n"] == 12


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
def test_every_kind_of_table_gives_the_same_law(tmp_path: Path, kind: str) -> None:
    frame = pl.DataFrame([tuple(map(float, line.split(","))) for line in lines()],
                         schema=["params", "train_tokens", "val_loss"], orient="row")  # fmt: skip
    path = tmp_path / f"runs.{kind}"
    if kind == "parquet":
        frame.write_parquet(path)
    elif kind == "jsonl":
        frame.write_ndjson(path)
    else:
        frame.write_csv(path, separator="\t" if kind == "tsv" else ",")
    result = gridlaw(str(path), "--json", "--replicates", "0")
    found = json.loads(result.stdout)
    assert (found["alpha"], found["beta"], found["E"]) == pytest.approx((0.34, 0.28, 1.7), rel=1e-4)
    assert "n is read from column 'params'" in result.stderr and "val_loss" in result.stderr


def test_the_hybrid_papers_file_as_it_is() -> None:
    found = told(
        str(DATA / "hybrid_longppl.tsv"), "--law", "no-constant", "--n", "n", "--d", "token_multiplier", "--loss",
        "loss", "--log", "--holdout", "model_size == S4", "--replicates", "50",
    )  # fmt: skip
    assert found["objective"] == pytest.approx(1.95155162e-4, rel=1e-7)
    assert found["excluded"] == {"holdout": 6} and found["holdout"]["r2"] == pytest.approx(0.979, abs=5e-4)


def test_rows_are_excluded_by_condition(tmp_path: Path) -> None:
    found = told(write(tmp_path, lines()), "--exclude", "D < 3B", "--law", "no-constant", "--replicates", "0")
    assert found["excluded"] == {"D < 3B": 4} and found["n"] == 8


def test_groups_have_a_law_each_and_one_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = {
        name: [f"{name},{n},{d},{(1.7 + a * n**-0.34 + 410 * d**-beta) * np.exp(rng.normal(0, 1e-3))}"
               for n in np.geomspace(1e7, 1e9, 5) for d in np.geomspace(1e9, 1e11, 5)]
        for name, a, beta in (("one", 400, 0.28), ("two", 500, 0.28), ("three", 400, 0.38))
    }  # fmt: skip

    def fit(*names: str) -> dict[str, Any]:
        path = write(tmp_path, [row for name in names for row in rows[name]], "arm,N,D,loss")
        return told(path, "--group", "arm", "--replicates", "100")

    same, apart = fit("one", "two"), fit("one", "three")
    assert [group["group"] for group in same["groups"]] == ["one", "two"]
    assert same["joint"]["better"] == "joint" and same["joint"]["p"] > 0.05
    assert same["joint"]["exponents"] == pytest.approx({"alpha": 0.34, "beta": 0.28}, rel=0.05)
    assert apart["joint"]["better"] == "apart" and apart["joint"]["p"] < 0.02


def test_isoflop_minima_and_exponents(tmp_path: Path) -> None:
    rows = []
    for c in np.geomspace(1e18, 1e21, 5):
        best = 0.1 * c**0.46
        rows += [f"{n},{c},{2 + 50 * c**-0.1 + 0.08 * np.log(n / best) ** 2}" for n in best * np.geomspace(0.2, 4, 7)]
    found = told(write(tmp_path, rows, "N,flops,loss"), "--law", "isoflop", "--flops", "flops")
    assert found["a"] == pytest.approx(0.46, abs=1e-6) and found["b"] == pytest.approx(0.54, abs=1e-6)
    assert all(row["inside"] for row in found["minima"])
    outside = [row for row in rows if float(row.split(",")[0]) > 0.12 * float(row.split(",")[1]) ** 0.46]
    flags = told(write(tmp_path, outside, "N,flops,loss"), "--law", "isoflop", "--flops", "flops")["flags"]
    assert sum("outside the sizes trained" in flag for flag in flags) == 5


def test_pythia_emerges_by_size_with_its_spread_over_forms() -> None:
    found = told(
        str(DATA / "pythia_lambada_all.csv"), "--law", "emergence", "--tokens", "tokens", "--value", "accuracy",
        "--group", "model", "--chance", "0", "--level", "0.13",
    )  # fmt: skip
    rows = {row["group"]: row for row in found["emergence"]}
    assert len(rows) == 16
    small = rows["pythia-70m-deduped"]
    assert small["t50_tokens"] is None and any(flag.startswith("non-monotone") for flag in small["flags"])
    t50 = [rows[f"pythia-{size}"]["t50_tokens"] for size in ("410m", "1.4b", "2.8b", "6.9b", "12b")]
    assert all(t is not None for t in t50)
    assert rows["pythia-1.4b"]["t50_tokens"] == pytest.approx(5.8e9, rel=0.05)
    spreads = [row["form_spread"] for row in rows.values() if row["form_spread"] is not None]
    assert len(spreads) >= 8 and min(spreads) > 1.0 and max(spreads) < 2


def test_figures_and_tables_lie_beside_their_numbers(tmp_path: Path) -> None:
    found = told(write(tmp_path, lines(3e-3)), "--figures", str(tmp_path / "out"), "--replicates", "60")
    for name in ("law.png", "law.svg", "law.pdf", "law.csv", "law.caption.txt", "laws.tex", "laws.md", "laws.csv"):
        assert name in found["figures"] and (tmp_path / "out" / name).stat().st_size > 0
    assert "95% bootstrap interval (residual, 60 refits)" in (tmp_path / "out" / "law.caption.txt").read_text()
    assert r"\begin{tabular}{lrrrrrrr}" in (tmp_path / "out" / "laws.tex").read_text()


def test_t50_over_size_is_predicted_and_drawn(tmp_path: Path) -> None:
    rows = []
    for n in (1e7, 3e7, 1e8, 3e8):
        for seed in range(2):
            middle = np.log10(2e9 * (n / 1e7) ** -0.3) + 0.02 * (-1) ** seed
            for t in np.geomspace(1e8, 1e11, 16):
                p = 0.05 + 0.85 / (1 + np.exp(-6 * (np.log10(t) - middle)))
                rows.append(f"{n},{seed},{t},{p},{6 * n * t},{3 - 0.2 * np.log10(t / 1e8)}")
    path = write(tmp_path, rows, "N,seed,tokens,accuracy,flops,loss")
    found = told(
        path, "--law", "emergence", "--n", "N", "--seed", "seed", "--flops", "flops", "--loss", "loss",
        "--chance", "0.05", "--answers", "500", "--predict", "1e9", "--figures", str(tmp_path / "out"),
    )  # fmt: skip
    (law,) = found["t50_by_size"]
    assert law["b"] == pytest.approx(-0.3, abs=0.01) and law["prediction"]["n"] == 1e9
    assert law["prediction"]["ci"][0] < 2e9 * 100**-0.3 < law["prediction"]["ci"][1]
    small = found["emergence"][0]
    assert small["n"] == 1e7 and small["t50_flops"] == pytest.approx(6e7 * small["t50_tokens"])
    assert small["t50_loss"] == pytest.approx(3 - 0.2 * np.log10(20), abs=0.01)
    assert small["dispersion"] is not None and small["dispersion"] < 1e-3, "points on a curve have no dispersion"
    for name in ("emergence.pdf", "emergence.csv", "t50-by-size.png", "t50-by-size.svg", "t50-by-size.csv"):
        assert name in found["figures"] and (tmp_path / "out" / name).stat().st_size > 0
    few = told(path, "--law", "emergence", "--n", "N", "--seed", "seed", "--chance", "0.05", "--exclude", "N > 5e7")
    assert few["t50_by_size"][0]["b"] is None
    assert few["t50_by_size"][0]["flags"] == ["T50 is known at 2 sizes: a law of size needs 3"]
