"""services/worker/vllm/connector/expected.py: blocks of prompts that another engine computes come before requests."""

from __future__ import annotations

from itertools import count
from typing import cast

from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.expected import ExpectedPrompts
from services.worker.vllm.connector.pool import VllmPool
from tests.worker.vllm.connector.vllm_shaped import BLOCK, Pool, Request

TOKENS = list(range(24))


def made(blocks: int = 101, reserve: int = 4, computed: int = 4) -> tuple[ExpectedPrompts, Pool, Request]:
    """Make an expected prompt of 12 blocks, of which the device has the first two."""
    pool, request = Pool(blocks), Request("r", TOKENS, 1, "")
    expected = ExpectedPrompts(cast(VllmPool, pool), BLOCK, reserve)
    chain = TokenChain(TOKENS, BLOCK, "m")
    expected.expect("r", chain)
    expected.find(count(7), request, len(TOKENS), computed)
    [fetch], none = expected.changes()
    assert (fetch.number, fetch.keys, fetch.awaits, none) == (7, chain.keys(12)[computed // BLOCK :], True, [])
    expected.find(count(8), request, len(TOKENS), 0)
    assert expected.changes() == ([], []), "each is asked for once"
    return expected, pool, request


def test_blocks_are_cached_in_order_whatever_the_order_of_their_copies() -> None:
    expected, pool, request = made()
    assert len(expected.begin_load(7, 0, 6)) == 6
    assert len(expected.begin_load(7, 6, 4)) == 4
    expected.end_loads(7, 6, [True] * 4)
    assert expected.loaded == 0
    assert len(pool.held) == 10
    expected.end_loads(7, 0, [True] * 6)
    assert (expected.loaded, pool.held) == (10, [])
    assert all(pool.find(request.block_name(index)) for index in range(2, 12))
    expected.end_fetch(7)
    expected.forget("r")
    expected.validate()
    assert expected.changes() == ([], [])


def test_nothing_after_a_bad_block_is_cached() -> None:
    expected, pool, request = made()
    expected.begin_load(7, 0, 6)
    expected.end_loads(7, 0, [True, True, False, True, True, True])
    assert expected.loaded == 2
    expected.end_fetch(7)
    assert pool.held == []
    assert [pool.find(request.block_name(index)) is not None for index in range(2, 6)] == [True, True, False, False]


def test_loads_leave_room_for_requests_and_hold_a_quarter_of_the_device_at_most() -> None:
    expected, pool, _ = made(blocks=17)
    assert len(expected.begin_load(7, 0, 10)) == 4
    expected, pool, _ = made(blocks=101, reserve=4)
    pool.allocate(90)
    assert len(expected.begin_load(7, 0, 10)) == 6
    assert expected.begin_load(7, 6, 2) == []


def test_a_prompt_that_is_no_longer_expected_gets_no_further_blocks_and_keeps_what_it_has() -> None:
    expected, pool, request = made()
    expected.begin_load(7, 0, 3)
    expected.forget("r")
    assert not expected.is_expected("r")
    assert expected.changes() == ([], [7])
    assert expected.changes() == ([], [])
    assert expected.begin_load(7, 3, 3) == []
    expected.end_loads(7, 0, [True] * 3)
    expected.end_fetch(7)
    assert pool.held == []
    assert pool.find(request.block_name(4))
    assert expected.changes() == ([], [])


def test_a_prompt_that_the_device_has_is_not_asked_for() -> None:
    pool, request = Pool(40), Request("r", TOKENS, 1, "")
    expected = ExpectedPrompts(cast(VllmPool, pool), BLOCK, 4)
    expected.expect("r", TokenChain(TOKENS, BLOCK, "m"))
    expected.find(count(1), request, len(TOKENS), len(TOKENS))
    assert expected.changes() == ([], [])
