"""x · Wᵀ by both ways."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.native.linear import Linear, calibrate_linear

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 17])
@pytest.mark.parametrize("dot_rows", [0, 1, 4, 64])
def test_every_way_gives_the_product_in_contiguous_rows(rows: int, dot_rows: int) -> None:
    x = RANDOM.normal(size=(rows, 48)).astype(np.float32)
    weight = RANDOM.normal(size=(96, 48)).astype(np.float32)
    product = Linear(dot_rows)(x, weight)
    assert product.flags.c_contiguous
    assert product.dtype == np.float32
    np.testing.assert_allclose(product, x @ weight.T, atol=1e-4)


def test_calibration_chooses_a_way_that_multiplies() -> None:
    weights = [np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32) for seed in range(3)]
    linear = calibrate_linear(weights)
    assert 0 <= linear.dot_rows <= 8
    x = np.ones((2, 64), np.float32)
    np.testing.assert_allclose(linear(x, weights[0]), x @ weights[0].T, atol=1e-4)


def test_a_program_that_disturbs_one_number_of_rows_does_not_end_the_calibration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [np.ones((4, 4), np.float32)]
    ticks = list[float]()
    for rows in (1, 2, 4, 6, 8):
        for dots_s, matrices_s in [(9.0 if rows == 2 else 1.0 if rows < 8 else 3.0, 2.0)] * 3:
            ticks += [0.0, dots_s, 0.0, matrices_s]
    with monkeypatch.context() as patched:
        patched.setattr("services.worker.native.linear.time.perf_counter", iter(ticks).__next__)
        linear = calibrate_linear(weights)
    assert linear.dot_rows == 6
