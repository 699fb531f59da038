"""Which blocks of a prompt that waits other routers hear of."""

from __future__ import annotations

import msgspec
import pytest

from services.router.selection.awaited import AWAITED_BLOCKS, AWAITED_S, awaited, check_awaited
from services.router.selection.candidates import CandidateState, WorkerSpeed
from services.router.selection.load import CandidateLoad
from shared.errors import ProtocolError
from shared.hashing import pack_hashes
from shared.messages.select import Overlap, Reserved, Select

RESERVED = Reserved("r", 1, "f", "a", 0, 4, 1, "router")


def select(blocks: int) -> Select:
    return Select("r", 1, "f", "m", pack_hashes(range(1, blocks + 1)), 4 * blocks + 1, 10)


def candidate(*, queued_s: float, tokens_per_s: float = 100.0, cached: int = 0) -> CandidateState:
    load = CandidateLoad(1, int(queued_s * 100), 0)
    return CandidateState(("a", 0), Overlap(cached), load, 1000, WorkerSpeed(tokens_per_s))


def test_the_blocks_of_a_prompt_that_waits_are_those_that_its_worker_does_not_have() -> None:
    told = awaited(select(5), RESERVED, candidate(queued_s=AWAITED_S, cached=2))
    assert told == msgspec.structs.replace(RESERVED, awaited=pack_hashes([3, 4, 5]))


def test_without_a_wait_or_a_known_speed_events_say_it_soon_enough() -> None:
    assert awaited(select(5), RESERVED, candidate(queued_s=0.9 * AWAITED_S)) is None
    assert awaited(select(5), RESERVED, candidate(queued_s=60.0, tokens_per_s=0.0)) is None


def test_of_a_long_prompt_only_the_first_blocks_are_sent() -> None:
    told = awaited(select(AWAITED_BLOCKS + 1), RESERVED, candidate(queued_s=60.0))
    assert told is not None
    assert told.awaited == pack_hashes(range(1, AWAITED_BLOCKS + 1))
    check_awaited(told)


@pytest.mark.parametrize("size", [7, 8 * AWAITED_BLOCKS + 8])
def test_blocks_that_another_router_names_in_a_malformed_way_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"awaited has {size} bytes"):
        check_awaited(msgspec.structs.replace(RESERVED, awaited=bytes(size)))
