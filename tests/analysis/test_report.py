import re
from html.parser import HTMLParser

from analysis import report
from analysis.arm_emergence import Condition
from analysis.findings import fit_study
from analysis.wording import capability_text, ratio_note, ratio_text, sentences

from .conftest import FakeArm, Write


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
        if tag in ("script", "link", "iframe") or (source and not source.startswith("data:image/svg+xml;base64,")):
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
    for kind in ("svg", "png", "csv"):
        assert len(list((path.parent / "figures").glob(f"*.{kind}"))) == 5


def test_text_of_the_study_cannot_break_the_page(write_study: Write) -> None:
    root = write_study((FakeArm("full", (0.8,), states=("failed",)),))
    study = root / "laziness" / "study.json"
    study.write_text(study.read_text().replace("Key shift:", "<script>alert(1)</script>"), encoding="utf-8")
    html = report.write(root, "laziness").read_text(encoding="utf-8")
    assert "<script>" not in html and "&lt;script&gt;" in html


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
    assert found["same against full, tokens to emerge: undecided"] == "undecided"
    assert found["same and full end at the same level within 5 points"] == "shown"


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
