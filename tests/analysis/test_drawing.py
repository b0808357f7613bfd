import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.drawing import COLOURS, kept_apart, strokes, tokens_text


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(0, "0"), (900, "900"), (50_000, "50k"), (500_000, "0.5M"), (1_000_000, "1M"), (1_843_200, "1.84M"),
     (999_600_000, "1000M"), (12_600_000_000, "12.6B"), (1e14, "100T")],
)  # fmt: skip
def test_tokens_are_written_as_engineers_do(tokens: float, text: str) -> None:
    assert tokens_text(tokens) == text


@given(st.lists(st.floats(0, 1), max_size=12))
def test_labels_keep_apart_inside_the_range_and_in_order(places: list[float]) -> None:
    gap = 0.06
    apart = kept_apart(places, gap, 0.0, 1.0)
    assert len(apart) == len(places)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in apart)
    assert all(np.diff(sorted(apart)) >= gap - 1e-9)
    assert [apart[i] for i in np.argsort(places, kind="stable")] == sorted(apart)


def test_labels_that_do_not_touch_stay() -> None:
    assert kept_apart([0.2, 0.9, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.2, 0.9, 0.5])
    assert kept_apart([0.5, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.45, 0.55])


def test_arms_are_told_apart_by_colour_then_dash() -> None:
    style = strokes([f"arm-{i}" for i in range(10)])
    assert len({(stroke.colour, str(stroke.dash)) for stroke in style.values()}) == 10
    assert style["arm-0"].colour == style["arm-8"].colour == COLOURS[0]
