"""Compares products of few rows by our own kernel with those of float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.device import cupy_on_a_device

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from benchmarks.gpu.model import LLAMA_8B  # noqa: E402
from services.worker.native.cuda.early_kernel import EarlyKernel  # noqa: E402
from services.worker.native.cuda.few_products import FewProducts  # noqa: E402
from services.worker.native.cuda.hopper import is_hopper  # noqa: E402
from services.worker.native.cuda.kernels import compile_kernels  # noqa: E402


@pytest.fixture(params=["float16", "bfloat16"], scope="module")
def few(request: Any) -> tuple[str, FewProducts]:
    if not is_hopper():
        pytest.skip("the kernel needs clusters of thread blocks")
    kernels = compile_kernels(LLAMA_8B, request.param, 16)
    assert kernels.few_products is not None
    return request.param, kernels.few_products


def random(element_type: str, *shape: int) -> tuple[Any, Any]:
    """Return numbers on the device, and the same in float64."""
    numbers = cp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), cp.float32)
    if element_type == "float16":
        stored = numbers.astype(cp.float16)
        return stored.view(cp.uint16), cp.asnumpy(stored).astype(np.float64)
    stored = (numbers.view(cp.uint32) >> 16).astype(cp.uint16)
    return stored, cp.asnumpy((stored.astype(cp.uint32) << 16).view(cp.float32)).astype(np.float64)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("shape", [(512, 256), (1024, 128), (2048, 1280), (14_336, 4096)], ids=str)
def test_products_of_few_rows_are_those_of_float64(
    few: tuple[str, FewProducts], shape: tuple[int, int], early: bool
) -> None:
    element_type, products = few
    if early:
        products = products.each(EarlyKernel)
    inputs, outputs = shape
    weight, exact_weight = random(element_type, outputs, inputs)
    for rows in (2, 7, 8, 9, 16, 25, 32):
        x, exact_x = random(element_type, rows, inputs)
        expected = exact_x @ exact_weight.T
        room = cp.full((rows + 1, outputs), cp.nan, cp.float32)
        assert products.compute(room[:rows], x, weight, add=False, factor=3.0)
        found = cp.asnumpy(room)
        assert np.isnan(found[rows]).all(), "nothing is written beyond"
        error = np.linalg.norm(found[:rows] - expected) / np.linalg.norm(expected)
        assert error < 1e-6, (rows, error)
        again = cp.zeros((rows, outputs), cp.float32)
        for _ in range(20):
            assert products.compute(again, x, weight, add=False, factor=1.0)
            assert cp.array_equal(again, room[:rows]), "the order of sums is always the same"
        assert products.compute(again, x, weight, add=True, factor=0.5)
        error = np.linalg.norm(cp.asnumpy(again) - 1.5 * expected) / np.linalg.norm(expected)
        assert error < 1e-6, (rows, error)
    assert not products.compute(
        cp.empty((33, outputs), cp.float32), cp.empty((33, inputs), cp.uint16), weight, add=False, factor=1.0
    )
