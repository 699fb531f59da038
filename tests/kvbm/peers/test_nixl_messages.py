"""How a read over NIXL is divided into transfers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvbm.peers.nixl_messages import plan_batches

SIZES = st.integers(1, 1 << 26)


@given(st.integers(0, 5000), SIZES, SIZES)
def test_every_block_is_in_one_batch_in_order(blocks: int, block_bytes: int, batch_bytes: int) -> None:
    batches = plan_batches(blocks, block_bytes, batch_bytes)
    assert [index for batch in batches for index in batch] == list(range(blocks))


@given(st.integers(1, 5000), SIZES, SIZES)
def test_a_batch_has_a_block_at_least_and_else_no_more_bytes_than_asked_for(
    blocks: int, block_bytes: int, batch_bytes: int
) -> None:
    for batch in plan_batches(blocks, block_bytes, batch_bytes):
        assert len(batch) >= 1
        assert len(batch) == 1 or len(batch) * block_bytes <= batch_bytes
