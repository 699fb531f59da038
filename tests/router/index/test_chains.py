"""From engine events to the index: captured sessions step by step, orphans, and events in any order."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterable
from functools import reduce
from operator import xor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.index.chains import CardMismatch, Chains
from services.router.index.index import Index
from services.router.index.kv_events import (
    ENGINE_HASH_BITS,
    CacheEvent,
    ClearedEvent,
    EngineHash,
    RemovedEvent,
    StoredEvent,
    decode,
    shortened,
)
from shared.blocks import BlockPool, Content, ContentStored, PoolEvent
from shared.hashing import content_keys, image_extras, pack_tokens, root_key, seed_of, sequence_hashes
from shared.kv_events import to_kv_events, to_snapshot
from shared.messages.kv_events import EVENT_BATCH, EventBatch, SnapshotBlock
from shared.messages.select import Overlap
from tests.router.captured import BLOCK_SIZE, SESSIONS, payloads, requests

A = ("a", 0)


def chains_of(index: Index, *, block_size: int = 2, limit: int = 1000, orphans: int = 100) -> Chains:
    return Chains(index, A, block_size=block_size, vocab_size=2000, limit_blocks=limit, orphan_limit_blocks=orphans)


def stored(
    names: list[EngineHash], parent: EngineHash | None = None, tokens: list[int] | None = None, tier: int = 0
) -> StoredEvent:
    """Blocks of two tokens; by default the tokens are made of the names."""
    if tokens is None:
        tokens = [token for name in names for token in (int.from_bytes(str(name).encode()[-1:], "big"), 1)]
    return StoredEvent(names, parent, pack_tokens(tokens), 2, tier, None, False, "", "", len(names))


def hashes(names: str) -> list[int]:
    """The sequence hashes of the chain of blocks that `stored` makes of these one-letter names."""
    return sequence_hashes(pack_tokens([token for name in names for token in (ord(name), 1)]), 2)


def letters(names: str) -> list[EngineHash]:
    return [ord(name) for name in names]


def stored_letters(names: str, parent: str = "", tier: int = 0) -> StoredEvent:
    tokens = [token for name in names for token in (ord(name), 1)]
    return stored(letters(names), ord(parent) if parent else None, tokens, tier)


@pytest.mark.parametrize("session", SESSIONS)
def test_a_captured_session_replays_to_the_exact_set_of_blocks_at_every_step(session: str) -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index, block_size=BLOCK_SIZE)
    naive: Counter[EngineHash] = Counter()
    for payload in payloads(session):
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    naive.update(shortened(event["block_hashes"]))
                case "BlockRemoved":
                    naive.subtract(shortened(event["block_hashes"]))
                case "AllBlocksCleared":
                    naive.clear()
        for applied in decode(payload).events:
            cleanup = chains.apply(applied)
            while cleanup is not None and cleanup.step(3):
                index.validate()
        chains.validate()
        index.validate()
        assert chains.blocks_in(0).keys() == (+naive).keys()
        assert index.statistics().blocks == len(+naive)


@pytest.mark.parametrize("session", SESSIONS)
def test_the_overlap_of_a_captured_request_equals_what_the_engine_found_cached(session: str) -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index, block_size=BLOCK_SIZE)
    messages = payloads(session)
    applied = 0
    for asked in requests(session):
        for payload in messages[applied : asked.events_from]:
            for event in decode(payload).events:
                chains.apply(event)
        applied = max(applied, asked.events_from)
        if asked.request == "r11-after-reset":
            continue  # the engine had cleared its cache, but reports it only with its next step
        found = sequence_hashes(pack_tokens(asked.tokens), BLOCK_SIZE, seed_of(asked.lora, asked.salt))
        overlap = index.find(found[: (len(asked.tokens) - 1) // BLOCK_SIZE]).get(A, Overlap())
        assert overlap == Overlap(asked.cached_tokens // BLOCK_SIZE), asked.request


def test_a_block_in_two_tiers_stays_until_it_is_removed_from_both() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(stored_letters("ab"))
    chains.apply(stored_letters("b", parent="a", tier=1))
    chains.apply(RemovedEvent(letters("b"), 0, None))
    assert index.find(hashes("ab")) == {A: Overlap(1, 1)}
    chains.apply(RemovedEvent(letters("b"), 1, None))
    assert index.find(hashes("ab")) == {A: Overlap(1)}


def test_orphans_are_inserted_when_their_parent_comes_at_any_depth() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(stored_letters("ef", parent="d"))
    chains.apply(stored_letters("cd", parent="b"))
    chains.validate()
    assert chains.orphan_blocks == 4
    assert index.find(hashes("abcdef")) == {}
    chains.apply(stored_letters("ab"))
    assert index.find(hashes("abcdef")) == {A: Overlap(6)}
    assert chains.orphan_blocks == 0
    chains.validate()


def test_an_orphan_removed_while_it_waits_is_not_inserted_but_its_successors_are() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(stored_letters("bc", parent="a"))
    chains.apply(stored_letters("d", parent="c"))
    chains.apply(RemovedEvent(letters("c"), 0, None))
    chains.validate()
    chains.apply(stored_letters("a"))
    assert index.find(hashes("abcd")) == {A: Overlap(2)}
    chains.apply(stored_letters("c", parent="b"))
    assert index.find(hashes("abcd")) == {A: Overlap(4)}


def test_orphans_that_are_removed_in_full_leave_no_state() -> None:
    chains = chains_of(Index(limit_bytes=1 << 30))
    chains.apply(stored_letters("bc", parent="a"))
    chains.apply(RemovedEvent(letters("bc"), 0, None))
    assert chains.orphan_blocks == 0
    chains.validate()


def test_a_run_without_blocks_leaves_no_state() -> None:
    chains = chains_of(Index(limit_bytes=1 << 20))
    chains.apply(stored([], parent=7))
    chains.validate()
    assert chains.orphan_blocks == 0


def test_at_the_limit_of_orphans_the_oldest_run_is_dropped() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index, orphans=3)
    chains.apply(stored_letters("bc", parent="a"))
    chains.apply(stored_letters("yz", parent="x"))
    chains.validate()
    assert not chains.exact
    chains.apply(stored_letters("a"))
    chains.apply(stored_letters("x"))
    assert index.find(hashes("abc")) == {A: Overlap(1)}
    assert index.find(hashes("xyz")) == {A: Overlap(3)}


def test_at_the_limit_of_known_blocks_new_ones_are_ignored() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index, limit=2)
    chains.apply(stored_letters("abc"))
    chains.validate()
    assert index.find(hashes("abc")) == {A: Overlap(2)}
    assert not chains.exact


def test_a_block_with_an_image_is_known_but_neither_it_nor_its_successors_are_found() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(msgspec.structs.replace(stored_letters("abc"), routable=1))
    chains.apply(stored_letters("d", parent="c"))
    assert index.find(hashes("abcd")) == {A: Overlap(1)}
    assert len(chains.blocks_in(0)) == 4
    chains.apply(RemovedEvent(letters("abcd"), 0, None))
    assert not chains.blocks_in(0)


def test_a_salted_chain_keeps_its_salt_in_blocks_that_come_later() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(msgspec.structs.replace(stored_letters("a"), salt="tenant"))
    chains.apply(stored_letters("b", parent="a"))
    salted = sequence_hashes(pack_tokens([ord("a"), 1, ord("b"), 1]), 2, seed_of(salt="tenant"))
    assert index.find(salted) == {A: Overlap(2)}
    assert index.find(hashes("ab")) == {}


def test_only_the_first_group_that_keeps_whole_prefixes_is_followed() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(msgspec.structs.replace(stored_letters("xy"), group=1, windowed=True))
    chains.apply(msgspec.structs.replace(stored_letters("ab"), group=0))
    chains.apply(msgspec.structs.replace(stored_letters("ab"), group=2))
    chains.apply(RemovedEvent(letters("ab"), 0, 1))
    assert index.find(hashes("ab")) == {A: Overlap(2)}
    chains.apply(RemovedEvent(letters("ab"), 0, 0))
    assert index.find(hashes("ab")) == {}


def test_another_block_size_and_tokens_outside_the_vocabulary_are_a_card_mismatch() -> None:
    chains = chains_of(Index(limit_bytes=1 << 30))
    with pytest.raises(CardMismatch, match="blocks of 3 tokens"):
        chains.apply(StoredEvent([1], None, pack_tokens([1, 2, 3]), 3, 0, None, False, "", "", 1))
    with pytest.raises(CardMismatch, match="vocabulary of 2000"):
        chains.apply(stored([1], None, [1, 2000]))


def test_a_snapshot_restores_the_same_blocks_as_events() -> None:
    streamed, restored = Index(limit_bytes=1 << 30), Index(limit_bytes=1 << 30)
    chains_of(streamed).apply(stored_letters("abc"))
    blocks = [
        SnapshotBlock(number, number - 1 or None, pack_tokens([ord(name), 1]))
        for number, name in enumerate("abc", start=1)
    ]
    chains_of(restored).restore_snapshot(blocks)
    assert restored.find(hashes("abc")) == streamed.find(hashes("abc")) == {A: Overlap(3)}


def test_clearing_hides_all_blocks_at_once_and_later_events_count() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(stored_letters("abc"))
    chains.apply(stored_letters("a"))
    cleanup = chains.apply(ClearedEvent())
    assert cleanup is not None
    assert index.find(hashes("abc")) == {}
    chains.apply(stored_letters("ab"))
    while cleanup.step(1):
        assert index.find(hashes("abc")) == {A: Overlap(2)}
        index.validate()
    assert index.statistics().blocks == 2


NAMES = "abcdefgh"
PARENT = {name: NAMES[position // 2 - 1] if position > 1 else "" for position, name in enumerate(NAMES)}
"""A small forest: every block has one place in it."""


def path(name: str) -> str:
    """The chain that ends with this block."""
    return path(PARENT[name]) + name if name else ""


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from(NAMES), st.integers(1, 3)), max_size=60))
def test_in_any_order_the_blocks_found_are_those_held_once_no_parent_is_missing(
    steps: list[tuple[bool, int, str, int]],
) -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    held: Counter[tuple[int, str]] = Counter()
    for store, tier, end, length in steps:
        names = path(end)[-length:]
        if store:
            held.update((tier, name) for name in names)
            chains.apply(stored_letters(names, parent=PARENT[names[0]], tier=tier))
        elif all(held[tier, name] for name in names):
            held.subtract((tier, name) for name in names)
            chains.apply(RemovedEvent(letters(names[::-1]), tier, None))
        chains.validate()
        index.validate()
        for tier in range(3):
            assert chains.digest(tier) == digest_of(name for at, name in +held if at == tier)
    assert chains.exact
    for name in NAMES:  # every parent comes, so no orphan is left
        held[0, name] += 1
        chains.apply(stored_letters(name, parent=PARENT[name]))
    chains.validate()
    assert chains.orphan_blocks == 0
    for tier in range(3):
        assert {*chains.blocks_in(tier)} == {ord(name) for name in NAMES if held[tier, name]}
    events: list[CacheEvent] = [RemovedEvent([ord(name)] * count, tier, None) for (tier, name), count in held.items()]
    for event in events:
        chains.apply(event)
    assert index.bytes == 0, "removal frees everything"
    assert [chains.digest(tier) for tier in range(3)] == [0, 0, 0]


def digest_of(names: Iterable[str]) -> int:
    return reduce(xor, map(ord, names), 0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 2)), max_size=40))
def test_the_digest_of_a_workers_pool_equals_that_of_its_events_at_every_step(
    steps: list[tuple[int, int, int]],
) -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    pool = BlockPool(8)
    held: list[list[int]] = []
    for kind, length, choice in steps:
        changes: list[PoolEvent] = []
        if kind and held and (kind == 3 or pool.available < length):
            for slot in reversed(held.pop(choice % len(held))):
                pool.release(slot)
        elif pool.available >= length:
            tokens = pack_tokens([choice, 7] * length)  # three chains, repeatedly
            root = root_key("m", salt="s" if choice else "")
            keys = content_keys(root, tokens, 2)
            found = [pool.acquire(key) for key in keys[: pool.longest_prefix(keys)]]
            if pool.available < length - len(found):
                held.append(found)
                continue
            blank, evicted = pool.allocate(length - len(found))
            changes += evicted
            for slot, position in zip(blank, range(len(found), length), strict=True):
                parent = keys[position - 1] if position else None
                packed = tokens[8 * position : 8 * position + 8]
                slot, stored_now = pool.store(slot, Content(keys[position], parent, packed, "", "s" if choice else ""))
                changes += stored_now
                found.append(slot)
            held.append(found)
        payload = EVENT_BATCH.encode(EventBatch(0.0, to_kv_events(changes, 2), 0))
        for event in decode(payload).events:
            chains.apply(event)
        chains.validate()
        assert chains.digest(0) == pool.digest & ENGINE_HASH_BITS
        assert len(chains.blocks_in(0)) == pool.statistics().keyed == index.statistics().blocks
    assert chains.exact


def test_a_source_whose_blocks_were_left_out_is_not_exact_until_it_is_cleared() -> None:
    def exact(chains: Chains, *events: CacheEvent) -> bool:
        for event in events:
            chains.apply(event)
        return chains.exact

    windowed = msgspec.structs.replace(stored_letters("ab"), group=1, windowed=True)
    assert not exact(chains_of(Index(limit_bytes=1 << 30)), windowed)
    assert not exact(chains_of(Index(limit_bytes=1 << 30), limit=2), stored_letters("abc"))
    orphans = chains_of(Index(limit_bytes=1 << 30), orphans=1)
    assert not exact(orphans, stored_letters("bc", parent="a"))
    assert exact(orphans, ClearedEvent(), stored_letters("b", parent="a"), stored_letters("a"))


def test_blocks_that_the_index_drops_at_its_limit_stay_in_the_digest() -> None:
    index = Index(limit_bytes=1)
    chains = chains_of(index)
    chains.apply(stored_letters("ab"))
    assert index.bytes == 0
    assert chains.exact
    assert chains.digest(0) == digest_of("ab")
    chains.apply(RemovedEvent(letters("ab"), 0, None))
    assert chains.digest(0) == 0


def test_an_engine_hash_stored_again_with_other_tokens_keeps_its_sequence_hash_and_leaves_no_state() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    chains.apply(stored([1, 2], None, [1, 1, 2, 2]))
    chains.apply(stored([1, 3, 1, 4], None, [5, 5, 3, 3, 1, 1, 4, 4]))
    chains.validate()
    assert index.statistics().blocks == 4
    chains.apply(RemovedEvent([1], 0, None))
    assert index.find(sequence_hashes(pack_tokens([1, 1]), 2)) == {A: Overlap(1)}
    chains.apply(RemovedEvent([1, 2, 1, 3, 4], 0, None))
    assert index.bytes == 0


def test_a_block_stored_a_thousand_times_is_cleared_as_one_block() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    for _ in range(1000):
        chains.apply(stored_letters("ab"))
    slot = chains.slot
    assert index.statistics().pairs["device"] == 2
    assert not chains.clear().step(2)
    assert slot.state == "freed"
    assert index.bytes == 0


def test_a_small_cleanup_is_done_in_one_step_over_all_tiers() -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index)
    for tier in range(3):
        chains.apply(stored_letters("ab", tier=tier))
    cleanup = chains.clear()
    assert cleanup.step(5)
    assert index.statistics().blocks == 1
    assert not cleanup.step(1)
    assert index.bytes == 0


class Compared(int):
    """Counts how often a number is compared with another."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def test_an_orphan_whose_blocks_were_removed_from_its_end_is_inserted_in_linear_time() -> None:
    chains = chains_of(Index(limit_bytes=1 << 30), orphans=2000)
    names: list[EngineHash] = [Compared(number) for number in range(1000, 3000)]
    chains.apply(stored(names, 1, [7] * 4000))
    chains.apply(RemovedEvent(names[:0:-1], 0, None))
    Compared.times = 0
    chains.apply(stored([1]))
    assert chains.blocks_in(0).keys() == {1, 1000}
    assert Compared.times < 20 * len(names)


def test_orphans_do_not_keep_lora_names_or_salts() -> None:
    chains = chains_of(Index(limit_bytes=1 << 30))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(100):
        waits = stored([number], 1000)
        chains.apply(msgspec.structs.replace(waits, lora=f"{number}" * 5000, salt=f"{number}" * 5000))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert chains.orphan_blocks == 100
    assert after - before < 100 * 2000


TOLD_NAMES: st.SearchStrategy[EngineHash] = st.integers(1, 11)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stored", "stored", "removed", "cleared"]),
            st.integers(0, 2),
            st.lists(st.tuples(TOLD_NAMES, st.integers(0, 2)), max_size=5),
            st.none() | TOLD_NAMES,
            st.booleans(),
            st.integers(0, 5),
        ),
        max_size=40,
    )
)
def test_a_source_that_contradicts_itself_leaves_no_state(
    steps: list[tuple[str, int, list[tuple[EngineHash, int]], EngineHash | None, bool, int]],
) -> None:
    index = Index(limit_bytes=1 << 30)
    chains = chains_of(index, block_size=1, limit=6, orphans=5)
    slots = [chains.slot]
    cleanups = []
    for kind, tier, blocks, parent, salted, routable in steps:
        names = [name for name, _ in blocks]
        tokens = pack_tokens([token for _, token in blocks])
        match kind:
            case "stored":
                salt = "s" if salted else ""
                chains.apply(
                    StoredEvent(names, parent, tokens, 1, tier, None, False, "", salt, min(routable, len(names)))
                )
            case "removed":
                chains.apply(RemovedEvent(names, tier, None))
            case _:
                cleanups.append(chains.clear())
                slots.append(chains.slot)
        chains.validate()
        index.validate()
        held = [{sequence for sequence in chains.blocks_in(each).values() if sequence is not None} for each in range(3)]
        assert index.blocks_of(chains.slot) == sum(map(len, held))
    for cleanup in [*cleanups, chains.close()]:
        while cleanup.step(2):
            index.validate()
    assert index.bytes == 0
    assert {slot.state for slot in slots} == {"freed"}


@pytest.mark.parametrize("way", ["events", "a parent that comes late", "a snapshot"])
def test_a_prompt_with_an_image_finds_its_blocks_and_no_other_images_do(way: str) -> None:
    tokens, key = pack_tokens([9, 5, 5, 5, 5, 9, 9, 9]), b"k" * 32
    extras = image_extras([(key, 1, 4)], 2)
    names = content_keys(root_key("model"), tokens, 2, extras)
    contents = [
        Content(name, names[at - 1] if at else None, tokens[8 * at : 8 * at + 8], extra=extras.get(at, b""))
        for at, name in enumerate(names)
    ]
    chains = chains_of(index := Index(limit_bytes=1 << 30))
    if way == "a snapshot":
        chains.restore_snapshot(to_snapshot(contents))
    else:
        runs = [contents] if way == "events" else [contents[1:], contents[:1]]
        for run in runs:
            events = to_kv_events([ContentStored(content) for content in run], 2)
            for event in decode(EVENT_BATCH.encode(EventBatch(1.0, events))).events:
                chains.apply(event)
    chains.validate()

    def found(extras: dict[int, bytes]) -> int:
        return index.find(sequence_hashes(tokens, 2, extras=extras)).get(A, Overlap()).device

    assert found(extras) == 4
    assert found({}) == found(image_extras([(b"o" * 32, 1, 4)], 2)) == found(image_extras([(key, 0, 4)], 2)) == 0
    assert found(image_extras([(key, 1, 4), (key, 5, 1)], 2)) == 2
