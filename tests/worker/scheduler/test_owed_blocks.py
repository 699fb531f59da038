"""services/worker/scheduler/owed_blocks.py: a block is owed as often as it is on its way."""

from __future__ import annotations

from services.worker.scheduler.owed_blocks import OwedBlocks
from shared.hashing import root_key


def test_a_block_is_owed_until_it_is_settled_as_often_as_it_was_on_its_way() -> None:
    key, other = root_key("a"), root_key("b")
    owed = OwedBlocks()
    owed.update([key, key])
    owed.settle(other)
    owed.settle(key)
    assert key in owed
    owed.settle(key)
    assert not owed
    owed.settle(key)
    assert not owed
