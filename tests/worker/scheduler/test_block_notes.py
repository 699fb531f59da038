"""What an engine says of its blocks: where they are, and what happened to them."""

from __future__ import annotations

from services.worker.scheduler.block_notes import BLOCK_NOTES, BlockNotes
from shared.hashing import ContentKey, content_keys, pack_tokens, root_key
from tests.worker.manual_engine import Engine
from tests.worker.manual_kvbm import Kvbm

PROMPT = [1, 2, 3, 4, 1, 2, 3]


def first_key(prompt: list[int]) -> ContentKey:
    return content_keys(root_key("model"), pack_tokens(prompt), block_size=2)[0]


def texts(engine: Engine, key_end: bytes) -> list[str]:
    return [note.text for note in engine.scheduler.kv_cache.notes.find(key_end, engine.now_s)]


def test_a_block_is_computed_kept_and_evicted_for_a_request_that_is_named() -> None:
    engine = Engine(capacity_blocks=4)
    engine.submit("a", PROMPT, max_tokens=2)
    key, cache = first_key(PROMPT), engine.scheduler.kv_cache
    assert cache.places(key) == ["not on the device"]
    engine.step()
    assert cache.places(key[8:]) == ["on the device, and stays while held by 1 running or loading requests"]
    engine.run()
    assert cache.places(key)[0].startswith("on the device, cached: ")
    engine.submit("b", [4] * 7, max_tokens=1)
    engine.run()
    assert cache.places(key) == ["not on the device"]
    assert texts(engine, key[8:]) == [
        "computed for request a",
        "evicted as the least recently used, for request b",
    ]


def test_clearing_is_noted_for_every_block() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    engine.scheduler.clear()
    assert texts(engine, first_key(PROMPT))[-1].startswith("forgotten with all others")
    assert len(texts(engine, b"\0" * 8)) == 1


def test_a_block_that_is_offered_is_noted() -> None:
    kvbm = Kvbm(Engine())
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    (request,) = kvbm.poll()
    kvbm.settle(request.number)
    kvbm.engine.run()
    kvbm.engine.scheduler.kv_cache.offloading.offers(100)
    assert "offered to the kvbm" in texts(kvbm.engine, first_key(PROMPT))


def test_the_notes_are_bounded() -> None:
    notes = BlockNotes()
    for number in range(2 * BLOCK_NOTES):
        notes.add(number.to_bytes(16, "big"), "computed for request {}", "r")
    assert notes.find((0).to_bytes(16, "big"), 0.0) == []
    assert len(notes.find((2 * BLOCK_NOTES - 1).to_bytes(16, "big"), 0.0)) == 1
