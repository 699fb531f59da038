"""services/worker/vllm/connector/blocks.py: which blocks of a request are offered, and when."""

from __future__ import annotations

from typing import cast

from services.worker.vllm.connector.blocks import VllmBlocks, VllmPool
from services.worker.vllm.connector.chain import TokenChain
from tests.worker.vllm.connector.vllm_shaped import Pool

BLOCK = 2
TOKENS = list(range(12))


def made() -> tuple[VllmBlocks, Pool]:
    pool = Pool(40)
    blocks = VllmBlocks(cast(VllmPool, pool), BLOCK, lambda: 0.0, wait_s=1.0)
    blocks.set_connected(True)
    blocks.track("r", TokenChain(TOKENS, BLOCK, "m"))
    return blocks, pool


def test_a_cached_prefix_is_offered_only_after_the_requests_own_first_step() -> None:
    """Another request may compute that prefix in the same step: vLLM caches blocks before they are computed."""
    blocks, pool = made()
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    blocks.offer_computed("r", 4, lambda: held)
    assert blocks.offers(10) == []
    blocks.offer_computed("r", 4, lambda: held)
    assert blocks.offers(10) == []
    blocks.offer_computed("r", 7, lambda: held)
    assert [content.tokens for content in blocks.offers(10)] == [
        TokenChain(TOKENS, BLOCK, "m").content(index).tokens for index in range(3)
    ]


def test_after_a_preemption_the_same_holds_again() -> None:
    blocks, pool = made()
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    blocks.offer_computed("r", 0, lambda: held)
    blocks.offer_computed("r", 4, lambda: held)
    assert len(blocks.offers(10)) == 2
    blocks.offer_computed("r", 2, lambda: held)  # scheduled again, with a cached prefix
    blocks.offer_computed("r", 2, lambda: held)
    assert blocks.offers(10) == []
    blocks.offer_computed("r", 8, lambda: held)
    assert len(blocks.offers(10)) == 2


def test_a_block_that_was_cached_again_is_not_the_one_that_was_offered() -> None:
    blocks, pool = made()
    held = pool.allocate(6)
    pool.cache(held[0], ("name", 0))
    blocks.offer_computed("r", 0, lambda: held)
    blocks.offer_computed("r", 2, lambda: held)
    [content] = blocks.offers(10)
    pool.uncache(held[0])
    pool.cache(held[0], ("name", int("0")))
    assert blocks.pin([content.key]) == [None]
