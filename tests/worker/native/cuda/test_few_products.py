from __future__ import annotations

import pytest

from services.worker.native.cuda.few_products import SHARED_BYTES, Variant, shared_bytes, variant_of


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "variant"),
    [
        (2, 4096, 4096, Variant(1, 8)),
        (8, 4096, 28_672, Variant(1, 4)),
        (9, 4096, 28_672, Variant(2, 4)),
        (32, 14_336, 4096, Variant(4, 8)),
        (32, 512, 128_256, Variant(4, 4)),
        (17, 18_944, 3584, Variant(4, 4)),
        (1, 4096, 4096, None),
        (33, 4096, 4096, None),
        (4, 4096, 4100, None),
        (4, 576, 1536, None),
    ],
)
def test_the_kernel_of_a_product(rows: int, inputs: int, outputs: int, variant: Variant | None) -> None:
    assert variant_of(rows, inputs, outputs, 132) == variant


def test_two_thread_blocks_fit_a_multiprocessor_and_the_sums_fit_each() -> None:
    assert 2 * (SHARED_BYTES + 1024) <= 228 << 10
    assert shared_bytes(Variant(1, 4), 512) >= 8 * 128 * 4
