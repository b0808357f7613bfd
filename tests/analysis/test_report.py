import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from analysis import report
from analysis.arm_emergence import Condition
from analysis.findings import fit_study
from analysis.laws.intervals import welch
from analysis.wording import capability_text, ratio_note, ratio_text, sentences

from .conftest import FakeArm, FakeSize, Write


class Page(HTMLParser):
    """Text, and where the page reaches outside itself."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.outside: list[str] = []
        self.images = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        source = dict(attrs).get("src") or ""
        self.images += tag == "img"
        if tag in ("link", "iframe") or (source and not source.startswith("data:image/svg+xml;base64,")):
            self.outside.append(f"{tag} {source[:60]}")

    def handle_data(self, data: str) -> None:
        self.text += " " + data


def test_the_report_stands_alone_and_says_what_was_found(write_study: Write) -> None:
    root = write_study()
    path = report.write(root, "laziness")
    page = Page(path.read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", page.text)
    assert path == root / "laziness" / "report" / "report.html"
    assert page.outside == [] and page.images == 5
    assert "swa-128: 1 of 3 seeds never emerged within 1.84M tokens" in text
    assert "Key shift: every softmax layer adds" in text
    assert "3 of 15 cells are not finished" in text
    assert "loss is not finite at step 420" in text and "out of memory" in text
    for name in ("runs.csv", "emergence.csv", "speed_ratios.csv", "same_ceiling.csv"):
        assert (path.parent / name).stat().st_size > 0
    for kind in ("svg", "png", "pdf", "csv", "caption.txt"):
        assert len(list((path.parent / "figures").glob(f"*.{kind}"))) == 5
    assert "undecided" not in text.split("Choices of this study")[0]
    assert (
        "swa-128-nope, the head that retrieves most: layer" in text
        and "of its attention on the answer (seed 0)" in text
    )
    assert "T50 is known at 1 size: a law of size needs 3" in text


def test_text_of_the_study_cannot_break_the_page(write_study: Write) -> None:
    root = write_study((FakeArm("full", (0.8,), states=("failed",)),))
    study = root / "laziness" / "study.json"
    study.write_text(study.read_text().replace("Key shift:", "<script>alert(1)</script>"), encoding="utf-8")
    html = report.write(root, "laziness").read_text(encoding="utf-8")
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html


def test_certainty_follows_the_test(write_study: Write) -> None:
    arms = (
        FakeArm("full", (0.61, 0.60, 0.62, 0.59)),
        FakeArm("slow", (1.20, 1.22, 1.19, 1.23)),
        FakeArm("same", (0.60, 0.62, 0.59, 0.61)),
    )
    fit = fit_study(write_study(arms), "laziness")
    found = {
        sentence.text.split(" (")[0]: sentence.certainty for sentence in sentences(fit, Condition("recall", "tiny"))
    }
    slow = next(text for text in found if text.startswith("slow needs"))
    assert slow.endswith("the tokens of full to emerge") and found[slow] == "shown"
    same = next(text for text in found if text.startswith("same emerged with"))
    assert same.endswith("× the tokens of full") and found[same] == "measured"
    assert found["same and full end at the same level within 5 points"] == "shown"


def test_what_is_not_shown_says_how_many_seeds_would(write_study: Write) -> None:
    arms = (FakeArm("full", (0.66, 0.76)), FakeArm("near", (0.52, 0.60)), FakeArm("same", (0.66, 0.761)))
    fit = fit_study(write_study(arms, noise=0.002), "laziness")
    said = {
        row.text.split()[0]: row.text for row in sentences(fit, Condition("recall", "tiny")) if "emerged" in row.text
    }
    assert "2 seeds against 2 seeds" in said["near"]
    seeds = int(re.findall(r"About (\d+) seeds an arm would show a difference of this size", said["near"])[0])
    assert said["same"].endswith("Even 50 seeds an arm would not show a difference of this size.")
    # A study of so many seeds, drawn from what was measured, shows it four times in five.
    rng = np.random.default_rng(0)
    full, near = (np.log10([seed.curve.t50_tokens for seed in row.seeds]) for row in fit.emergence[:2])
    shown = [
        (
            welch(rng.normal(near.mean(), near.std(ddof=1), seeds), rng.normal(full.mean(), full.std(ddof=1), seeds)).p
            or 1
        )
        < 0.05 / 2
        for _ in range(1000)
    ]
    assert 0.77 < np.mean(shown) < 0.93


SIZES = (FakeSize("S1", 143_000, 1.0), FakeSize("S2", 450_000, 0.75), FakeSize("S3", 1_400_000, 0.56))


def test_several_sizes_have_a_section_of_scaling_whose_values_can_be_hovered(write_study: Write) -> None:
    arms = (FakeArm("full", (0.50, 0.55)), FakeArm("swa-8", (0.36, 0.33)))
    root = write_study(arms, sizes=SIZES, budgets=(300, 600, 900))
    path = report.write(root, "laziness")
    html = path.read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", Page(html).text)
    assert "T50 over model size" in text and "Loss of swa-8 on recall" in text
    shown = json.loads(re.findall(r"const shown = (.*);\n", html)[0])
    (law,) = (figure for name, figure in shown.items() if name == "law-full-recall")
    points = [text for trace in law["data"] if trace["mode"] == "markers" for text in trace["text"]]
    assert len(points) == 3 * 3 * 2
    assert any(
        re.match(r"<b>S2, 1.23M tokens, seed 1</b><br>1.23M: loss 2\.\d{4}<br>law 2\.\d{4}, [+-]0", p) for p in points
    )
    for name in ("t50_by_size.csv", "scaling.csv", "figures/t50-by-size.pdf", "figures/law-swa-8-recall.csv"):
        assert (path.parent / name).stat().st_size > 0


@pytest.mark.browser
def test_the_figures_are_there_in_a_browser_without_a_network(write_study: Write, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium")
    path = report.write(write_study((FakeArm("full", (0.8, 0.7)), FakeArm("swa-8", (0.6, 0.5)))), "laziness")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--virtual-time-budget=8000", "--dump-dom", path.as_uri()]  # fmt: skip
    page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    for name in ("emergence-recall-tiny", "losses-recall-tiny"):
        drawn = page.split(f'id="hover-{name}"')[1].split("<figcaption>")[0]
        assert 'class="main-svg"' in drawn and drawn.count("<path") > 8


def test_stuck_seeds_are_named_beside_the_ratio(write_study: Write) -> None:
    arms = (
        FakeArm("full", (0.61, 0.60, 0.62, 0.59)),
        FakeArm("half", (1.20, None, 1.19, None)),
        FakeArm("stuck", (None, None, None, None)),
    )
    fit = fit_study(write_study(arms), "laziness")
    found = {sentence.text: sentence.certainty for sentence in sentences(fit, Condition("recall", "tiny"))}
    half, stuck = (next(text for text in found if text.startswith(f"{arm} needs")) for arm in ("half", "stuck"))
    assert "censored lognormal model, half: 2 of 4 seeds never emerged, counted as censored" in half
    assert stuck.startswith("stuck needs more than ") and "with 95% confidence" in stuck
    assert found[half] == found[stuck] == "shown"
    rows = {row.arm: row for row in fit.speed_ratios}
    assert ratio_note(rows["half"]) == "half: 2 of 4 seeds never emerged, counted as censored"
    assert ratio_text(rows["stuck"]).startswith("over 3.0")


def test_capabilities_read_as_words() -> None:
    assert capability_text("recall/accuracy/beyond-128") == "recall accuracy beyond 128 tokens"
    assert capability_text("recall/accuracy/9-32") == "recall accuracy at 9–32 tokens"
    assert capability_text("ruler/niah") == "ruler niah"
