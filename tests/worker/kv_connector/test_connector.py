"""Engines and a kvbm in a drawer: whatever befalls either of them, bytes are those of the key, and nothing leaks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import pytest

from services.worker.contracts.messages import Snapshot, Stepped, TakeEngineSnapshot
from services.worker.contracts.mover import Copy
from services.worker.engine import core
from services.worker.kv_connector import fetches, stores
from services.worker.kv_connector.connector import BACK_OFF_FIRST_S, BACK_OFF_MOST_S, REASON_CHARS
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmReply, KvbmUp
from services.worker.kv_connector.stores import MOST_TRIES
from services.worker.sharing.shares import SharingLimits
from services.worker.transfer.errors import DeviceFailed
from services.worker.transfer.host_copier import FinishedCopies, HostCopier
from shared.hashing import content_keys, pack_tokens, root_key
from shared.messages import kvbm as wire
from shared.messages.kv_events import BlockRemoved
from shared.pool.lock import OWNERS
from tests.worker.hand_sharing import LIMITS
from tests.worker.kvbm_world import BOUNDS, Engine, World

PROMPT = [1, 1, 2, 2, 1, 1, 2, 2]
REUSABLE_TOKENS = 6
"""Tokens of it that can be reused: its last token is always computed, with its block."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield from lived(World(tmp_path / "pool", Random(0)))


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[World]:
    yield from lived(World(tmp_path / "pool", Random(0), threads=True))


def lived(world: World) -> Iterator[World]:
    """A kvbm and two engines that are attached to it; asking is always worth it."""
    world.step_s = 3.0
    world.waits_s, world.offloads = (100.0,), ("filled",)
    world.open_kvbm()
    for _ in range(2):
        world.start_engine()
    world.settle()
    yield world
    world.settle()
    world.nothing_is_left()
    world.close()


def compute(world: World, engine: Engine) -> None:
    """The engine answers the prompt, and its blocks are stored."""
    engine.submit("first", PROMPT, 1)
    world.settle()
    assert engine.exchanged.saved_blocks == len(PROMPT) // 2


def until(world: World, engine: Engine, operation: str) -> KvbmAsk:
    """Goes on until this is the engine's next question to the kvbm."""
    for _ in range(100):
        world.now_s += 0.05
        engine.step()
        while engine.asks:
            if engine.asks[0].operation == operation:
                return engine.asks[0]
            engine.carry("")
        while any(engine.replies.values()):
            engine.deliver(0)
        if operation == "commit":
            engine.copy(1)
    raise AssertionError(f"no {operation} was asked")


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_bytes_are_right_and_nothing_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(fetches, "BATCH_BLOCKS", 1 + seed % 3)
    monkeypatch.setattr(stores, "BATCH_BYTES", 100 * (1 + seed % 4))
    monkeypatch.setattr(core, "MOST_LOADED", 1 + seed % 4)
    live(World(tmp_path / "pool", Random(seed)))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_exchanged_while_a_step_is_computed_bytes_are_right_and_nothing_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(fetches, "BATCH_BLOCKS", 1 + seed % 3)
    monkeypatch.setattr(stores, "BATCH_BYTES", 100 * (1 + seed % 4))
    monkeypatch.setattr(core, "MOST_LOADED", 1 + seed % 4)
    world = World(tmp_path / "pool", Random(seed), threads=seed % 6 == 0)
    world.overlaps = True
    live(world)


@pytest.mark.parametrize("seed", range(10))
def test_bytes_are_right_where_threads_copy(tmp_path: Path, seed: int) -> None:
    live(World(tmp_path / "pool", Random(seed), threads=True))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_lora_computes_with_blocks_of_another(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path / "pool", Random(seed), threads=seed % 4 == 0)
    world.loras = ("", "poet@1", "poet@2")
    live(world)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_blocks_are_damaged_all_answers_are_right_and_nothing_leaks(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path / "pool", Random(seed))
    world.damaged_pool = True
    live(world)


def live(world: World) -> None:
    """All that can happen, then all is well again."""
    world.open_kvbm()
    for _ in range(2):
        world.start_engine()
    trouble = world.draw.choice((0.0, 0.02, 0.1))
    for _ in range(600):
        world.anything(trouble)
    world.settle()
    world.nothing_is_left()
    world.close()


# --- what it is for


def test_what_one_engine_computed_another_one_loads(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    second.submit("again", PROMPT, 1)
    world.settle()
    assert (second.host_tokens, second.disk_tokens) == (REUSABLE_TOKENS, 0)
    assert second.runner.computed_tokens == len(PROMPT) - REUSABLE_TOKENS
    assert second.exchanged.loaded_blocks == REUSABLE_TOKENS // 2


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is a batch of its own, and each step that only decodes takes up one batch."""
    monkeypatch.setattr(fetches, "BATCH_BLOCKS", 1)
    monkeypatch.setattr(core, "MOST_LOADED", 1)


def load_all(world: World, others: Sequence[str]) -> Engine:
    """Return an engine to which all blocks of a prompt have just been copied, while it decodes others."""
    first, second = world.engines
    compute(world, first)
    world.step_s = 0.01
    for other in others:
        second.submit(other, [5], 14)
    second.submit("again", PROMPT, 1)
    until(world, second, "fetch")
    second.carry("")
    while any(second.replies.values()):
        second.deliver(0)
    second.copied()
    return second


def blocks_left(engine: Engine) -> int:
    """Make a step; return how many of the blocks were not taken up before it."""
    engine.step()
    return engine.scheduler.kv_cache.statistics().loading


@pytest.mark.usefixtures("one_by_one")
def test_while_others_decode_each_step_takes_up_some_of_the_blocks_that_ended_together(world: World) -> None:
    engine = load_all(world, ["stream"])
    assert [blocks_left(engine) for _ in range(4)] == [2, 1, 0, 0]
    assert "stream" in engine.living
    world.settle()
    assert engine.host_tokens == REUSABLE_TOKENS


@pytest.mark.usefixtures("one_by_one")
def test_where_no_sequence_decodes_all_blocks_that_ended_are_taken_up_at_once(world: World) -> None:
    assert blocks_left(load_all(world, [])) == 0


@pytest.mark.usefixtures("one_by_one")
def test_an_engine_whose_last_stream_was_cancelled_does_not_sleep_before_it_took_up_all_blocks(world: World) -> None:
    engine = load_all(world, ["stream"])
    assert blocks_left(engine) == 2
    engine.cancel(sorted(engine.living).index("stream"))
    assert engine.core.wait_until_s == 0.0, "it sleeps"
    assert blocks_left(engine) == 0


@pytest.mark.usefixtures("one_by_one")
def test_blocks_that_end_while_a_step_is_computed_are_taken_up_meanwhile(world: World) -> None:
    engine = load_all(world, ["stream"])
    _, works = engine.core.begin(world.now_s)
    assert engine.scheduler.kv_cache.statistics().loading == 2
    for left in (1, 0):
        assert engine.core.exchange_due_s == 0.0, "it would not go on"
        engine.tell(engine.core.exchange(world.now_s))
        assert engine.scheduler.kv_cache.statistics().loading == left
    assert works is not None
    engine.hear(engine.core.finish(engine.runner.step(works), world.step_s))
    world.settle()
    assert engine.host_tokens == REUSABLE_TOKENS


def test_what_a_lora_computed_is_loaded_for_that_lora_alone(world: World) -> None:
    first, second = world.engines
    for engine in world.engines:
        engine.scheduler.loras.update(("poet@1", "poet@2"))
    first.submit("first", PROMPT, 1, "poet@1")
    world.settle()
    for other in ("", "poet@2"):
        second.submit(f"of {other}", PROMPT, 1, other)
        world.settle()
        assert (second.host_tokens, second.exchanged.loaded_blocks) == (0, 0)
    second.submit("the same", PROMPT, 1, "poet@1")
    world.settle()
    assert second.host_tokens == REUSABLE_TOKENS


EXPECTED = PROMPT[:4]
"""A prompt that is no longer than prefetches may be."""


def test_blocks_that_another_engine_computes_are_copied_from_it_and_not_from_the_kvbm(world: World) -> None:
    first, second = world.engines
    second.expect("r", EXPECTED, "", first.name)
    second.step()
    assert not second.asks, "the kvbm is not asked"
    compute(world, first)
    assert second.reader.copied_blocks == second.exchanged.loaded_blocks == 2
    assert first.sharer.sharing.blocks == 0, "the share is returned"
    assert max(first.told_shared) == 2
    assert first.told_shared[-1] == 0, "it is said, too, though the engine has nothing to do"
    second.submit("r", PROMPT, 1)
    second.step()
    world.settle()
    assert second.reader.copied_blocks == 2


def test_a_prompt_that_was_shared_whole_before_its_last_token_is_computed_is_handed_over_with_its_first_token(
    world: World,
) -> None:
    first, second = world.engines
    compute(world, first)
    second.expect("r", EXPECTED, "", first.name)
    second.step()
    first.step()
    world.settle()
    assert second.reader.copied_blocks == 2
    first.submit("r", EXPECTED, 8, prefill_only=True)
    until(world, first, "store")
    assert len(first.answers["r"]) == 1
    assert "r" not in first.living, "it waits for the kvbm, to which its blocks are offered once more"
    world.settle()
    world.nothing_is_left()


def test_an_engine_that_sleeps_wakes_when_nothing_more_is_awaited_of_a_share(world: World) -> None:
    second = world.engines[1]
    assert second.core.wait_until_s is None
    second.reader.wait_until_s = world.now_s + 5.0
    assert second.core.wait_until_s == world.now_s + 5.0
    second.reader.wait_until_s = None


@pytest.mark.parametrize("limit", [0, LIMITS.blocks])
def test_where_nothing_is_shared_the_kvbm_is_asked(world: World, limit: int) -> None:
    first, second = world.engines
    first.sharer.sharing.limits = SharingLimits(blocks=limit)
    second.expect("r", EXPECTED, "", first.name if limit == 0 else "nobody")
    second.step()
    second.step()
    assert [ask.operation for ask in second.asks] == ["fetch"]
    compute(world, first)
    assert second.reader.copied_blocks == 0
    assert second.exchanged.loaded_blocks == 2


def test_a_fetch_in_place_of_a_share_keeps_the_bound_of_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "MOST_ASKED", 1)
    second = world.engines[1]
    second.expect("r", EXPECTED, "", "nobody")
    second.submit("q", PROMPT[::-1], 1)
    second.step()
    second.step()
    assert [ask.operation for ask in second.asks] == ["fetch"]


@pytest.mark.parametrize("lost", ["sharer", "sharer sleeps", "reader sleeps", "kvbm"])
def test_whatever_is_lost_while_shared_blocks_are_copied_nothing_wrong_is_used_and_nothing_is_left(
    world: World, lost: str
) -> None:
    first, second = world.engines
    second.expect("r", EXPECTED, "", first.name)
    second.step()
    first.submit("first", EXPECTED, 1)
    until(world, first, "fetch")
    first.carry("")
    first.deliver(0)
    for _ in range(100):
        if not second.reader.idle:
            break
        first.step()
        second.step()
    assert not second.reader.idle, "nothing is being copied"
    second.reader.go_on(0)
    match lost:
        case "sharer":
            world.kill_engine(first)
        case "sharer sleeps":
            first.cancel(0)
            first.operate("sleep")
            first.step()
        case "reader sleeps":
            second.operate("sleep")
        case _:
            world.kill_kvbm()
    world.settle()
    second.submit("r", EXPECTED, 1)
    world.settle()
    world.nothing_is_left()


@pytest.mark.parametrize("lost", ["the engine", "its sleep"])
def test_a_sharer_that_is_lost_before_it_has_stored_what_it_shared_leaves_that_to_the_reader(
    world: World, lost: str
) -> None:
    first, second = world.engines
    second.expect("r", EXPECTED, "", first.name)
    second.step()
    first.submit("first", EXPECTED, 1)
    until(world, first, "store")
    for _ in range(100):
        first.step()
        second.step()
        second.copied()
    assert second.reader.copied_blocks == 2
    assert second.scheduler.load().offered_blocks == 0, "the sharer stores them"
    first.asks.clear()
    if lost == "the engine":
        world.kill_engine(first)
    else:
        first.operate("sleep")
        first.step()
    second.submit("r", PROMPT, 1)
    world.settle()
    assert second.exchanged.saved_blocks == len(PROMPT) // 2
    third = world.start_engine()
    world.settle()
    third.submit("again", PROMPT, 1)
    world.settle()
    assert third.host_tokens == REUSABLE_TOKENS
    world.nothing_is_left()


def test_the_first_copies_begin_before_there_is_room_for_the_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "BATCH_BLOCKS", 1)
    first, second = world.engines
    compute(world, first)
    hand = second.hand
    assert hand is not None
    load, held_blocks = hand.load, list[int]()

    def loads(batch: int, copies: Sequence[Copy]) -> None:
        held_blocks.append(second.scheduler.load().held_blocks)
        load(batch, copies)

    monkeypatch.setattr(hand, "load", loads)
    second.submit("again", PROMPT, 1)
    world.settle()
    assert held_blocks == [1, 2, 3]
    assert second.host_tokens == REUSABLE_TOKENS


def test_blocks_that_have_come_can_be_found_before_the_last_ones_have(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "BATCH_BLOCKS", 1)
    first, second = world.engines
    compute(world, first)
    second.submit("again", PROMPT, 1)
    until(world, second, "fetch")
    second.carry("")
    second.deliver(0)
    assert second.hand is not None
    for _ in range(2):
        second.hand.go_on(0)  # two halves of the first block
    second.step()
    assert len(second.scheduler.kv_cache.snapshot()) == 1
    assert second.scheduler.load().waiting == 1
    world.settle()
    assert second.host_tokens == REUSABLE_TOKENS


def test_what_a_dead_engine_computed_another_one_loads(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    world.kill_engine(first)
    second.submit("again", PROMPT, 1)
    world.settle()
    assert second.host_tokens == REUSABLE_TOKENS


def test_after_a_restart_of_the_kvbm_blocks_come_from_disk(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    assert world.drawer is not None
    world.drawer.spill(99)
    world.kill_engine(first)  # it would offer them anew
    world.kill_kvbm()
    world.settle()
    second.submit("again", PROMPT, 1)
    world.settle()
    assert (second.host_tokens, second.disk_tokens) == (0, REUSABLE_TOKENS)
    assert second.link.kvbm == world.drawer.name


def test_what_an_engine_loaded_it_does_not_offer_again(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    second.submit("again", PROMPT, 1)
    world.settle()
    assert second.exchanged.saved_blocks == 0


def test_a_snapshot_is_what_was_reported_though_blocks_were_just_evicted_for_loads(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    for number in range(2):
        second.submit(f"other{number}", [3 + number] * len(PROMPT), 1)
        world.settle()
    second.submit("again", PROMPT, 1)
    until(world, second, "fetch")
    second.carry("")
    second.deliver(0)
    told, snapshot = second.core.handle(TakeEngineSnapshot(1), world.now_s)
    assert isinstance(told, Stepped)
    assert isinstance(snapshot, Snapshot)
    assert [type(event) for event in told.events] == [BlockRemoved]
    assert snapshot.event_sequence == told.event_sequence
    digest = 0
    for block in snapshot.blocks:
        digest ^= block.hash
    assert digest == told.digest


# --- what goes wrong


def test_a_slot_that_is_granted_again_while_it_is_copied_from_is_not_used(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    second.submit("again", PROMPT, 1)
    until(world, second, "fetch")
    second.carry("")
    second.deliver(0)
    second.copy(1)
    world.now_s += BOUNDS.fetch_time_s  # the kvbm waits no longer; its slots go to others
    for number in range(8):
        first.submit(f"other{number}", [number + 3, 3, 3, 3, 3, 3, 3, 3], 1)
        while not world.go_on(first):
            pass
    world.settle()
    assert second.exchanged.bad_blocks > 0
    assert second.host_tokens < REUSABLE_TOKENS


def test_a_block_that_is_damaged_in_the_pool_is_computed_once_more_and_leaves_the_kvbm(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    assert world.drawer is not None
    world.drawer.damage(Random(0))
    second.runner.suspects = True
    second.submit("again", PROMPT, 1)
    world.settle()
    assert second.answers["again"] == first.answers["first"]
    assert second.exchanged.discarded_blocks > 0
    assert (second.scheduler.load().recomputed, second.scheduler.load().not_finite) == (1, 0)
    assert second.runner.computed_tokens >= len(PROMPT), "it is computed from its tokens alone"
    third = world.start_engine()  # whose runner fails the test where it meets wrong bytes
    world.settle()
    third.submit("and again", PROMPT, 1)
    world.settle()
    assert third.answers["and again"] == first.answers["first"]


def test_a_block_that_has_not_its_checksum_is_computed_and_leaves_the_kvbm_before_anything_is_computed_with_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "pool", Random(0), threads=True)
    world.checks = True
    for _ in lived(world):
        first, second = world.engines
        compute(world, first)
        assert world.drawer is not None
        world.drawer.damage(Random(0))
        (damaged,) = world.damaged
        second.submit("again", PROMPT, 1)  # its runner fails the test where it meets wrong bytes
        world.settle()
        assert second.answers["again"] == first.answers["first"]
        assert (second.exchanged.damaged_blocks, second.exchanged.discarded_blocks) == (1, 1)
        assert second.scheduler.load().recomputed == 0
        assert second.host_tokens < REUSABLE_TOKENS
        third = world.start_engine()
        world.settle()
        third.submit("and again", PROMPT, 1)
        world.settle()
        assert third.exchanged.damaged_blocks == 0
        assert damaged in {content.key for content in second.scheduler.kv_cache.snapshot()}


def test_what_is_stored_without_checksums_is_loaded_by_an_engine_that_compares_them(tmp_path: Path) -> None:
    world = World(tmp_path / "pool", Random(0), threads=True)
    for _ in lived(world):
        first, _ = world.engines
        compute(world, first)
        world.checks = True
        third = world.start_engine()
        world.settle()
        third.submit("again", PROMPT, 1)
        world.settle()
        assert (third.host_tokens, third.exchanged.damaged_blocks) == (REUSABLE_TOKENS, 0)


def test_a_kvbm_that_does_not_know_discards_is_not_asked_for_one(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    world.kill_kvbm()
    world.open_kvbm()
    assert world.drawer is not None
    world.drawer.takes_discards = False
    world.settle()
    world.drawer.damage(Random(0))
    second.runner.suspects = True
    second.submit("again", PROMPT, 1)
    world.settle()
    assert second.answers["again"] == first.answers["first"]
    assert second.exchanged.discarded_blocks == 0
    assert second.link.kvbm == world.drawer.name


def test_a_block_that_changes_on_its_way_to_the_device_is_found_and_computed_with_those_after_it(
    threaded: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = 1  # slots are granted in order: the prompt's second block
    begin = HostCopier.begin

    def damaging(copier: HostCopier, copies: Sequence[Copy], *, loads: bool) -> FinishedCopies:
        pending = begin(copier, copies, loads=loads)
        for copy in copies:
            if loads and copy.pool_slot == damaged:
                at = copier.shape.regions[0] + copy.device_slot * copier.shape.stride_bytes
                ctypes.c_ubyte.from_address(at).value ^= 1
        return pending

    monkeypatch.setattr(HostCopier, "begin", damaging)
    threaded.damages = True
    first, second = threaded.engines
    compute(threaded, first)
    second.submit("again", PROMPT, 1)
    threaded.settle()
    assert second.exchanged.differing_blocks == 1
    assert second.host_tokens == 2


def test_a_cancelled_request_copies_no_further_and_its_ticket_is_released(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    second.submit("again", PROMPT, 1)
    until(world, second, "fetch")
    second.carry("")
    second.deliver(0)
    second.copy(1)
    second.cancel(0)
    second.step()
    assert second.scheduler.load().held_blocks > 0, "a copy still writes"
    second.copy(1)
    second.copy(1)
    assert second.hand is not None
    assert second.hand.idle
    second.step()
    assert [ask.operation for ask in second.asks] == ["release"]
    assert second.scheduler.load().held_blocks == 0
    assert world.drawer is not None
    second.carry("")
    assert world.drawer.tickets.statistics().fetches == 0


@pytest.mark.parametrize("operation", ["store", "commit"])
@pytest.mark.parametrize("lost", ["question", "answer"])
def test_blocks_whose_store_or_commit_is_not_answered_are_stored_by_the_next_link(
    world: World, operation: str, lost: str
) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    first.submit("r", PROMPT, 1)
    until(world, first, operation)
    first.carry(lost)
    while any(first.replies.values()):
        first.deliver(0)
    first.step()
    assert first.link.kvbm == ""
    assert operation in first.link.reason
    assert first.connector.unsettled
    world.settle()
    assert first.link.kvbm
    assert world.drawer.tickets.statistics().tiers.host.ready == len(PROMPT) // 2


def test_a_fetch_that_is_not_answered_costs_the_link_nothing(world: World) -> None:
    first, second = world.engines
    compute(world, first)
    second.submit("again", PROMPT, 1)
    until(world, second, "fetch")
    second.carry("answer")
    world.settle()
    assert second.host_tokens == 0
    assert second.link.kvbm


@pytest.mark.parametrize("answer", ["none", "refused"])
def test_what_a_fetch_cost_is_known_though_nothing_came_of_it(world: World, answer: str) -> None:
    """Else a kvbm that only hesitates would keep every request waiting, each as long as its computing would take."""
    world.waits_s = (0.0,)
    first, second = world.engines[0], world.start_engine()
    world.settle()
    compute(world, first)
    second.submit("how slow steps are", [3, 3, 3, 3], 1)
    world.settle()
    second.submit("again", PROMPT, 1)
    ask = until(world, second, "fetch")
    second.asks.remove(ask)
    world.now_s += 60.0
    refused = wire.FETCH_REPLY.encode(wire.KvbmRefused("bad_request", "not now"))
    second.handle(KvbmReply(ask.number, b"", failed="late") if answer == "none" else KvbmReply(ask.number, refused))
    world.settle()
    second.submit("once more", [2, 2, *PROMPT], 1)
    while second.step():
        assert "fetch" not in [ask.operation for ask in second.asks]


def test_an_owner_that_the_kvbm_has_forgotten_attaches_again(world: World) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    world.drawer.tickets.owner_dead(first.attachment.hold())
    first.submit("r", PROMPT, 1)
    until(world, first, "attach")
    assert "not attached" in first.link.reason


def test_an_attach_says_how_long_the_engine_waits_for_each_reply(world: World) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    world.drawer.tickets.owner_dead(first.attachment.hold())
    first.submit("r", PROMPT, 1)
    ask = until(world, first, "attach")
    assert wire.ATTACH.decode(ask.payload).reply_s == ask.timeout_s > 0


def test_a_deleted_lock_is_made_again_under_another_name(world: World) -> None:
    first, _ = world.engines
    before = first.attachment.hold()
    (world.directory / "owners" / before).unlink()
    world.kill_kvbm()
    world.settle()
    assert first.attachment.hold() != before


def late_save(world: World, engine: Engine) -> None:
    """The engine stores blocks, and the ticket's time is over before their copies are."""
    until(world, engine, "store")
    engine.carry("")
    while any(engine.replies.values()):
        engine.deliver(0)
    engine.copy(1)
    world.now_s += BOUNDS.store_time_s
    assert engine.copied()
    engine.step()


def test_a_save_that_lasts_too_long_is_aborted_and_its_blocks_are_asked_for_again(world: World) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    first.submit("r", PROMPT, 1)
    late_save(world, first)
    assert [ask.operation for ask in first.asks] == ["abort", "store"]
    world.settle()
    assert first.exchanged.bad_blocks > 0
    assert world.drawer.tickets.statistics().tiers.host.ready == len(PROMPT) // 2


def test_blocks_that_are_always_late_are_given_up(world: World) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    first.submit("r", PROMPT, 1)
    for _ in range(MOST_TRIES):
        late_save(world, first)
    assert [ask.operation for ask in first.asks] == ["abort"]
    world.settle()
    assert world.drawer.tickets.statistics().tiers.host.ready == 0


def test_while_copies_are_too_slow_nothing_is_asked_for_again(world: World) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    first.submit("r", PROMPT, 1)
    for _ in range(MOST_TRIES):
        late_save(world, first)
    first.submit("of others", [2, 2, *PROMPT], 1)
    late_save(world, first)
    assert [ask.operation for ask in first.asks] == ["abort"]
    first.submit("of others yet", [3, 3, *PROMPT], 1)
    world.settle()
    stored = world.drawer.tickets.statistics().tiers.host.ready
    assert stored > 0
    first.submit("of others again", [4, 4, *PROMPT], 1)
    late_save(world, first)
    assert [ask.operation for ask in first.asks] == ["abort", "store"]
    world.settle()
    assert world.drawer.tickets.statistics().tiers.host.ready > stored


def test_blocks_whose_commit_came_too_late_are_asked_for_again(world: World) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    first.submit("r", PROMPT, 1)
    until(world, first, "commit")
    world.now_s += BOUNDS.store_time_s
    world.settle()
    assert first.link.kvbm
    assert world.drawer.tickets.statistics().tiers.host.ready == len(PROMPT) // 2


def test_a_prompt_whose_blocks_are_asked_for_again_is_not_handed_over_before_they_are_copied(world: World) -> None:
    first, _ = world.engines
    cache, keys = first.scheduler.kv_cache, content_keys(root_key("model"), pack_tokens(PROMPT), 2)
    first.submit("r", PROMPT, 1)
    for _ in range(MOST_TRIES - 1):
        late_save(world, first)
        assert not cache.are_handed_over(keys)
    world.settle()
    assert cache.are_handed_over(keys)


def test_a_prompt_whose_blocks_are_given_up_is_handed_over(world: World) -> None:
    first, _ = world.engines
    first.submit("r", PROMPT, 1)
    for _ in range(MOST_TRIES):
        late_save(world, first)
    assert first.scheduler.kv_cache.are_handed_over(content_keys(root_key("model"), pack_tokens(PROMPT), 2))


def test_while_a_commit_is_not_answered_an_engine_need_not_step(world: World) -> None:
    first, _ = world.engines
    first.submit("r", PROMPT, 1)
    until(world, first, "commit")
    assert not first.connector.unsettled


@pytest.mark.parametrize("operation", ["store", "fetch"])
def test_copies_that_fail_end_the_link_and_are_reported(world: World, operation: str) -> None:
    first, second = world.engines
    if operation == "fetch":
        compute(world, first)
    second.submit("again", PROMPT, 1)
    until(world, second, operation)
    second.carry("")
    second.deliver(0)
    assert second.hand is not None
    second.hand.trouble = "out of order"
    second.copy(1)
    second.step()
    assert second.link.reason == "copying failed: out of order"
    world.settle()
    assert second.link.kvbm
    assert second.exchanged.bad_blocks > 0


def test_slots_whose_save_failed_stay_in_nobodys_hands_until_some_time_has_passed(world: World) -> None:
    """A GPU that is lost tells so before it has stopped to write."""
    first, _ = world.engines
    first.submit("r", PROMPT, 1)
    until(world, first, "store")
    first.carry("")
    first.deliver(0)
    assert first.hand is not None
    first.hand.trouble = "lost"
    first.copy(1)
    failed_s = world.now_s
    first.step()
    assert not first.asks
    assert until(world, first, "attach")
    assert world.now_s >= failed_s + BACK_OFF_FIRST_S


def test_a_copy_that_fails_while_there_is_no_link_puts_off_the_next_one(world: World) -> None:
    first, _ = world.engines
    first.submit("r", PROMPT, 1)
    until(world, first, "store")
    first.carry("")
    first.deliver(0)
    assert world.drawer is not None
    name = world.drawer.name
    first.handle(KvbmDown("away"))
    first.handle(KvbmUp(name))
    while first.step():
        pass
    assert first.hand is not None
    first.hand.trouble = "lost"
    first.copy(1)
    failed_s = world.now_s
    assert until(world, first, "attach")
    assert world.now_s >= failed_s + BACK_OFF_FIRST_S


def test_a_mover_that_cannot_tell_whether_its_copies_have_ended_keeps_the_lock_for_the_processs_life(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = world.engines
    lock = first.attachment.hold()
    assert first.hand is not None

    def lost() -> None:
        raise DeviceFailed("cudaErrorIllegalAddress: copies may be under way")

    with monkeypatch.context() as patched:
        patched.setattr(first.hand, "close", lost)
        with pytest.raises(DeviceFailed):
            first.core.close()
    assert (world.directory / OWNERS / lock).exists()
    assert first.attachment.hold() == lock


Change = Callable[[bytes], bytes]


def other_kvbm(reply: bytes) -> bytes:
    return wire.ATTACH_REPLY.encode(msgspec.structs.replace(wire.ATTACH_REPLY.decode(reply), kvbm="k99"))


def small_slots(reply: bytes) -> bytes:
    return wire.ATTACH_REPLY.encode(msgspec.structs.replace(wire.ATTACH_REPLY.decode(reply), slot_bytes=1))


def other_file(reply: bytes) -> bytes:
    return wire.ATTACH_REPLY.encode(msgspec.structs.replace(wire.ATTACH_REPLY.decode(reply), pool_bytes=1 << 30))


def other_place(reply: bytes) -> bytes:
    return wire.ATTACH_REPLY.encode(msgspec.structs.replace(wire.ATTACH_REPLY.decode(reply), offset=1 << 40))


def no_such_slot(reply: bytes) -> bytes:
    slots = pack_tokens([900, 901, 902, 903])
    return wire.STORE_REPLY.encode(msgspec.structs.replace(wire.STORE_REPLY.decode(reply), slots=slots))


def one_slot_twice(reply: bytes) -> bytes:
    slots = pack_tokens([1, 1, 2, 3])
    return wire.STORE_REPLY.encode(msgspec.structs.replace(wire.STORE_REPLY.decode(reply), slots=slots))


def no_such_block(reply: bytes) -> bytes:
    return wire.STORE_REPLY.encode(msgspec.structs.replace(wire.STORE_REPLY.decode(reply), blocks=[0, 1, 2, 9]))


def one_block_twice(reply: bytes) -> bytes:
    return wire.STORE_REPLY.encode(msgspec.structs.replace(wire.STORE_REPLY.decode(reply), blocks=[0, 1, 2, 2]))


def very_many_slots(reply: bytes) -> bytes:
    slots = pack_tokens(range(100_000))
    return wire.STORE_REPLY.encode(msgspec.structs.replace(wire.STORE_REPLY.decode(reply), slots=slots))


def half_a_slot(reply: bytes) -> bytes:
    return wire.FETCH_REPLY.encode(msgspec.structs.replace(wire.FETCH_REPLY.decode(reply), slots=b"123"))


def too_few_generations(reply: bytes) -> bytes:
    return wire.FETCH_REPLY.encode(msgspec.structs.replace(wire.FETCH_REPLY.decode(reply), generations=bytes(8)))


def out_of_order(reply: bytes) -> bytes:
    return wire.FETCH_REPLY.encode(msgspec.structs.replace(wire.FETCH_REPLY.decode(reply), first=2))


def nothing_readable(_: bytes) -> bytes:
    return b"\xc1"


@pytest.mark.parametrize(
    ("operation", "change"),
    [
        ("attach", other_kvbm),
        ("attach", small_slots),
        ("attach", other_file),
        ("attach", other_place),
        ("attach", nothing_readable),
        ("store", no_such_slot),
        ("store", one_slot_twice),
        ("store", no_such_block),
        ("store", one_block_twice),
        ("store", very_many_slots),
        ("store", nothing_readable),
        ("commit", nothing_readable),
        ("fetch", half_a_slot),
        ("fetch", too_few_generations),
        ("fetch", out_of_order),
        ("fetch", nothing_readable),
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_link_which_begins_again(
    world: World, operation: str, change: Change
) -> None:
    first, second = world.engines
    if operation == "attach":
        assert world.drawer is not None
        second.handle(KvbmDown("for a moment"))
        second.handle(KvbmUp(world.drawer.name))
    elif operation == "fetch":
        compute(world, first)
    second.submit("again", PROMPT, 1)
    number = until(world, second, operation).number
    second.carry("")
    reply = second.replies[number].popleft()
    second.handle(KvbmReply(number, change(reply.payload), last=reply.last))
    second.step()
    assert second.link.kvbm == ""
    assert second.link.reason.startswith(f"{operation}: ")
    assert len(second.link.reason) <= REASON_CHARS
    world.settle()
    assert second.link.kvbm


# --- back-off, bounds


def test_a_kvbm_that_does_not_answer_is_asked_ever_more_seldom(tmp_path: Path) -> None:
    world = World(tmp_path / "pool", Random(0))
    world.open_kvbm()
    world.kill_kvbm()
    engine = world.start_engine()
    engine.handle(KvbmUp("k9"))
    asked_s: list[float] = []
    while len(asked_s) < 9:
        engine.step()
        if engine.asks:
            asked_s.append(world.now_s)
            engine.carry("")
            engine.deliver(0)
            engine.step()
        until_s = engine.core.wait_until_s
        assert until_s is not None
        world.now_s = until_s
    gaps_s = [later - earlier for earlier, later in pairwise(asked_s)]
    assert gaps_s == [min(BACK_OFF_FIRST_S * 2**n, BACK_OFF_MOST_S) for n in range(8)]
    assert engine.link.reason == "attach: lost"
    engine.handle(KvbmDown("gone"))
    assert not engine.step()
    assert engine.core.wait_until_s is None
    world.close()


def test_after_a_link_is_lost_an_engine_steps_on_until_the_first_try_to_attach_is_over(world: World) -> None:
    first, _ = world.engines
    assert not first.connector.unsettled
    first.submit("r", PROMPT, 1)
    for operation in ("store", "attach"):
        ask = until(world, first, operation)
        assert first.connector.unsettled
        first.carry("question")
        while any(first.replies.values()):
            first.deliver(0)
        first.step()
        assert first.link.reason.startswith(ask.operation)
    assert not first.connector.unsettled


def lose_link(world: World, engine: Engine) -> None:
    """A Store is not answered."""
    until(world, engine, "store")
    engine.carry("question")
    while any(engine.replies.values()):
        engine.deliver(0)
    engine.step()
    assert engine.link.kvbm == ""


def test_after_two_links_that_stored_nothing_an_engine_need_not_step(world: World) -> None:
    first, _ = world.engines
    first.submit("r", PROMPT, 1)
    lose_link(world, first)
    assert first.connector.unsettled
    lose_link(world, first)
    assert not first.connector.unsettled


def test_after_a_link_is_lost_and_its_kvbm_has_gone_an_engine_need_not_step(world: World) -> None:
    first, _ = world.engines
    assert world.drawer is not None
    first.submit("r", PROMPT, 1)
    lose_link(world, first)
    assert first.connector.unsettled
    first.handle(KvbmDown("gone"))
    assert not first.connector.unsettled
    first.handle(KvbmUp(world.drawer.name))


def test_who_only_keeps_the_link_asks_for_no_blocks(world: World) -> None:
    first, _ = world.engines
    first.submit("r", PROMPT, 1)
    assert until(world, first, "store")
    first.carry("question")
    while any(first.replies.values()):
        first.deliver(0)
    for _ in range(8):  # its blocks wait to be offered to the next link
        world.now_s += BACK_OFF_MOST_S
        for message in first.connector.step(world.now_s, exchanges=False):
            assert not isinstance(message, KvbmAsk) or message.operation == "attach"
            first.tell([message])
        while first.asks:
            first.carry("")
        while any(first.replies.values()):
            first.deliver(0)
    assert first.connector.attached


def test_without_a_kvbm_nothing_is_asked_and_nothing_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path / "pool", Random(0))
    engine = world.start_engine()
    engine.submit("r", PROMPT, 1)
    while engine.step():
        assert not engine.asks
    assert not engine.living
    assert engine.core.wait_until_s is None
    world.close()


def test_a_directory_that_is_no_pool_s_is_named(tmp_path: Path) -> None:
    world = World(tmp_path / "nowhere", Random(0))
    engine = world.start_engine()
    engine.handle(KvbmUp("k1"))
    engine.step()
    assert "nowhere" in engine.link.reason
    assert not engine.asks
    world.close()


def test_no_more_blocks_are_under_way_than_may_be(world: World) -> None:
    world.waits_s = (0.1,)
    first = world.start_engine()
    world.settle()
    for number in range(4):
        first.submit(f"r{number}", [number + 3, 3, 3, 3, 3, 3], 1)
    for _ in range(50):  # nothing is answered
        world.now_s += 0.05
        first.step()
    stores = [wire.STORE.decode(ask.payload) for ask in first.asks if ask.operation == "store"]
    assert sum(len(store.blocks) for store in stores) == 6
