"""The choice between the two ways to multiply."""

from __future__ import annotations

import numpy as np

from services.worker.native.calibration import calibrate_linear


def test_calibration_chooses_a_way_that_multiplies() -> None:
    weights = [np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32) for seed in range(3)]
    linear = calibrate_linear(weights)
    assert 0 <= linear.dot_rows <= 8
    x = np.ones((2, 64), np.float32)
    np.testing.assert_allclose(linear(x, weights[0]), x @ weights[0].T, atol=1e-4)
