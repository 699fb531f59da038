"""x · Wᵀ by both ways."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.native.linear import Linear

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
