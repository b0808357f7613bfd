"""The formula of memory against what training really takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PEAK = Path(__file__).parent / "peak_memory.py"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of memory can be read here")
@pytest.mark.parametrize("setting", ["states", "activations"])
def test_the_peak_of_a_step_is_within_the_stated_tolerance(setting: str) -> None:
    """Of model states and of activations, one outweighs the other by ten times in each setting."""
    done = subprocess.run([sys.executable, PEAK, setting], capture_output=True, text=True, check=True)
    measured, predicted = map(float, done.stdout.split()[-2:])
    print(f"{setting}: {measured / 1e6:.0f} MB measured, {predicted / 1e6:.0f} MB predicted")
    assert 0.85 < measured / predicted < 1.4
