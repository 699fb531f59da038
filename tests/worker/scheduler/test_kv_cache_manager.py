"""The KV cache manager between scheduler and connector; the rest of it is tested through them."""

from __future__ import annotations

from shared.blocks import ContentEvicted, ContentStored
from tests.worker.manual_engine import Engine
from tests.worker.manual_kvbm import Kvbm

PROMPT = [1, 2, 3, 4, 1, 2, 3]


def test_a_scheduler_that_could_compute_nothing_goes_on_only_after_a_change_by_the_connector() -> None:
    kvbm = Kvbm(Engine())
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    (request,) = kvbm.poll()
    assert kvbm.engine.step() == []
    changes = kvbm.engine.scheduler.kv_cache.changes
    kvbm.poll()
    assert kvbm.engine.scheduler.kv_cache.changes == changes
    assert not kvbm.engine.scheduler.busy
    kvbm.settle(request.number)
    assert kvbm.engine.scheduler.kv_cache.changes > changes
    assert kvbm.engine.scheduler.busy


def test_one_block_stays_available_for_each_sequence_that_holds_blocks() -> None:
    engine = Engine(capacity_blocks=5)
    engine.submit("a", PROMPT, max_tokens=4)
    engine.step()
    assert engine.scheduler.kv_cache.statistics().held == 4
    engine.submit("b", [4], max_tokens=1)
    engine.step()
    assert (engine.scheduler.load().running, engine.scheduler.load().waiting) == (1, 1), (
        "the last block is the first sequence's to grow into"
    )


def test_blocks_that_are_stored_and_evicted_are_drained_once_in_order() -> None:
    engine = Engine(capacity_blocks=4)
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    engine.submit("b", [4, 4, 4, 4, 4, 4, 4], max_tokens=1)
    outcome = engine.scheduler.advance(engine.runner.step(engine.scheduler.schedule(0.0)), 0.01)
    kinds = [type(event) for event in outcome.events]
    assert kinds == [*[ContentEvicted] * kinds.count(ContentEvicted), *[ContentStored] * kinds.count(ContentStored)]
    assert kinds.count(ContentEvicted) == kinds.count(ContentStored) == 3
    assert not engine.scheduler.kv_cache.has_events
    assert engine.scheduler.kv_cache.drain_events() == []
