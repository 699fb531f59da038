"""How many blocks one Store has; the rest of it is tested through the connector."""

from __future__ import annotations

from itertools import count

import pytest

from services.worker.kv_connector import stores
from services.worker.kv_connector.contract import KvbmAsk
from services.worker.kv_connector.stores import COLLECT_S, Stores
from shared.messages.kvbm import STORE, Granted, StoreBlock
from shared.pool.socket_frames import Asked, encode_frame
from tests.worker.manual_engine import Engine


def computed(*, block_size: int, blocks: int, salt: str = "") -> Engine:
    """Return an engine that has computed this many blocks, all to be offered."""
    tokens = block_size * blocks
    engine = Engine(
        block_size=block_size, capacity_blocks=blocks + 1, context_length=tokens + 2, step_tokens=tokens + 1
    )
    engine.scheduler.kv_cache.set_connected(True)
    compute(engine, "a", [1] * (tokens + 1), salt)
    return engine


def compute(engine: Engine, request: str, prompt: list[int], salt: str = "") -> None:
    """Compute a prompt of which a kvbm has nothing."""
    engine.submit(request, prompt, max_tokens=1, salt=salt)
    for fetch in engine.scheduler.kv_cache.fetch_changes()[0]:
        engine.scheduler.kv_cache.end_fetch(fetch.number, 0.0)
    engine.run()


def opened(engine: Engine, *, most_blocks: int) -> Stores:
    made = Stores(engine.scheduler.kv_cache, count(1), count(1), most_blocks)
    made.open("owner", 1 << 10, 1 << 12)
    return made


def asked(of: Stores, now_s: float) -> list[KvbmAsk]:
    actions = of.step(now_s)
    of.validate()
    return [action for action in actions if isinstance(action, KvbmAsk)]


@pytest.mark.parametrize("most_blocks", [40, 64])
def test_stores_of_large_blocks_fit_frames(most_blocks: int) -> None:
    """The size is in the salt, as fast as in tokens."""
    of = opened(computed(block_size=2, blocks=60, salt="\N{WATER WAVE}" * 5000), most_blocks=most_blocks)
    blocks: list[StoreBlock] = []
    for step in range(20):
        for ask in asked(of, step * COLLECT_S):
            encode_frame(Asked(2**63, ask.operation, ask.payload, "t" * 55))
            blocks += STORE.decode(ask.payload).blocks
            of.granted(ask.number, Granted(0, 1.0, [], b""))
    assert len({block.key for block in blocks}) == len(blocks) == 60


def test_no_more_blocks_are_asked_for_than_may_be_though_a_store_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BATCH_BYTES", 3 * 72)
    of = opened(computed(block_size=2, blocks=12), most_blocks=8)
    asks = [ask for step in range(9) for ask in asked(of, step * COLLECT_S)]
    assert [len(STORE.decode(ask.payload).blocks) for ask in asks] == [3, 3, 2]


def test_a_block_that_no_store_can_have_is_not_asked_for_and_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = computed(block_size=2, blocks=2, salt="s" * 200)
    of = opened(engine, most_blocks=8)
    monkeypatch.setattr(stores, "BATCH_BYTES", 200)
    assert [ask for step in range(9) for ask in asked(of, step * COLLECT_S)] == []
    assert not of.collecting
    compute(engine, "b", [2] * 3)
    assert len([ask for step in range(9, 18) for ask in asked(of, step * COLLECT_S)]) == 1
