"""Random numbers of one document: the same whatever batch, worker or order asks for it."""

from typing import Any, Literal

import numpy as np

# Spaces of random numbers that never meet: no seed trains on what another space holds out.
Space = Literal["training", "held out", "facts", "language", "needle"]
_KEYS: dict[Space, int] = {"training": 0, "held out": 1, "facts": 2, "language": 3, "needle": 4}


def generator(space: Space, seed: int, step: int = 0, row: int = 0) -> np.random.Generator:
    """Counter-based (Philox), so that step 1,000,000 is as near as step 1. All but space: 0 <= n < 2^63."""
    key, counter = np.array([seed, _KEYS[space]], np.uint64), np.array([0, row, step, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def log_uniform(uniform: Any, low: Any, high: Any) -> Any:
    """Numbers in [low, high) whose logarithm is uniform, from uniforms in [0, 1); arrays broadcast."""
    return low * (high / low) ** uniform
