"""kvbm over its wire: real bytes through a real pool, two owners, bad input, deaths, restarts, a disk that fails."""

from __future__ import annotations

import asyncio
import shutil
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from services.kvbm.config import KvbmConfig, PoolConfig, TiersConfig
from services.kvbm.disk.segments import Segments
from services.kvbm.service import REASON_CHARS
from services.kvbm.tickets.packing import pack_slots
from services.kvbm.tickets.results import TicketLimits
from shared.blocks import Content
from shared.config import load
from shared.errors import ConfigError, NoResponders
from shared.hashing import event_hash, pack_hashes
from shared.messages import kvbm as wire
from shared.messages.cards import KvLayout
from shared.messages.codec import JSON_HEADER
from tests.kvbm.chains import chain, keys
from tests.kvbm.store_rig import (
    LAYOUT,
    LIMIT_S,
    OTHER_LAYOUT,
    SMALL_BYTES,
    World,
    kvbm_of,
    payload,
    running,
    serving,
    settings,
    until,
    worker_in,
)

QUICK = TicketLimits(store_time_s=1.5, fetch_time_s=1.5)


def refusal(reply: object) -> str:
    """Return the refusal's code."""
    assert isinstance(reply, wire.KvbmRefused), reply
    assert reply.reason
    return reply.code


# --- store and fetch


async def test_what_one_engine_stores_another_one_reads(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a, b = await store.world.attached("a"), await store.world.attached("b")
        contents = chain(1, 2, 3, 4)
        assert await a.store(contents[:3]) == 3
        assert await b.load(contents) == (3, 0)
        assert await a.load(contents[:2]) == (2, 0)
        assert await b.load(chain(9)) == (0, 0)
        layout = await store.layout()
        assert (layout.owners, layout.tickets) == (2, {"store": 0, "fetch": 0, "expired": 0})
        assert (layout.host.blocks, layout.host.hit_rate, layout.disk) == (3, 5 / 7, None)


async def test_a_block_that_two_engines_store_is_there_once_and_both_succeed(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a, b = await store.world.attached("a"), await store.world.attached("b")
        contents = chain(1, 2)
        granted = await a.grant(contents)
        assert await b.store(contents) == 0, "another one is at it"
        a.write(granted, contents)
        await a.commit(granted.ticket, granted.slots)
        assert await b.store(contents) == 0
        assert await b.load(contents) == (2, 0)
        assert store.metric("headrace_kvbm_store_blocks_total", outcome="known") == 4


async def test_what_is_not_committed_cannot_be_found(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        contents = chain(1, 2)
        granted = await a.grant(contents)
        a.write(granted, contents)
        assert await a.commit(granted.ticket, granted.slots[:4]) == wire.Settled()
        assert await a.load(contents) == (1, 0)
        granted = await a.grant(contents)
        assert granted.blocks == [1]
        assert await a.abort(granted.ticket) == wire.Settled()
        assert await a.abort(granted.ticket) == wire.Settled()
        assert await a.load(contents) == (1, 0)


async def test_a_slot_that_is_granted_again_has_another_generation(tmp_path: Path) -> None:
    async with serving(tmp_path, size_bytes=SMALL_BYTES, tiers=TiersConfig(host_policy="lru")) as store:
        a = await store.world.attached("a")
        assert a.slots is not None
        (one,) = chain(1)
        await a.store([one])
        (fetched,) = await a.fetch([one.key])
        assert isinstance(fetched, wire.Fetched)
        await a.release(fetched.ticket)
        for token in range(2, 2 + a.slots.arena.slots):
            await a.store(chain(token))
        assert a.read(fetched, [one]) == [False]


async def test_a_full_tier_gives_its_oldest_and_what_is_read_stays(tmp_path: Path) -> None:
    async with serving(tmp_path, size_bytes=SMALL_BYTES, tiers=TiersConfig(host_policy="lru")) as store:
        a = await store.world.attached("a")
        assert a.slots is not None
        (kept,) = chain(1)
        await a.store([kept])
        (held,) = await a.fetch([kept.key])
        assert isinstance(held, wire.Fetched)
        for token in range(2, 4 * a.slots.arena.slots):
            assert await a.store(chain(token)) == 1
        assert a.read(held, [kept]) == [True]
        assert await a.load([kept]) == (1, 0)
        assert await a.load(chain(2)) == (0, 0)
        assert store.metric("headrace_kvbm_evicted_blocks_total", tier="host", reason="room") > 0


# --- owners


async def test_the_slots_of_an_engine_that_died_are_free_and_nothing_of_it_is_published(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a, b = await store.world.attached("a"), await store.world.attached("b")
        contents = chain(1, 2)
        a.write(await a.grant(contents), contents)
        a.die()
        await until(lambda: store.metric("headrace_kvbm_dead_owners_total") == 1)
        assert await b.load(contents) == (0, 0)
        assert await b.store(contents) == 2
        assert (await store.layout()).owners == 1
        assert refusal(await a.try_store(contents)) == "unknown_owner"


async def test_an_engine_whose_worker_lost_its_lease_loses_its_tickets_and_its_slots_wait_for_it(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as store:
        a, b = await store.world.attached("a", worker="w1"), await store.world.attached("b", worker="w2")
        lease = await worker_in(store.world, "w1")
        await until(lambda: "w1" in store.runtime.directory.instances)
        contents = chain(1, 2)
        granted = await a.grant(contents)
        a.write(granted, contents)
        await lease.close()
        await until(lambda: store.metric("headrace_kvbm_expired_tickets_total", kind="store") == 1)
        layout = await store.layout()
        assert (layout.tickets["expired"], layout.host.reason) == (1, "2 slots wait for engines whose tickets expired")
        assert refusal(await a.commit(granted.ticket, granted.slots)) == "expired"
        assert (await store.layout()).tickets["expired"] == 0
        assert await b.load(contents) == (0, 0)
        assert await a.store(contents) == 2, "it is still attached"


async def test_a_commit_after_the_deadline_publishes_nothing_and_frees_the_slots(tmp_path: Path) -> None:
    async with serving(tmp_path, tickets=QUICK) as store:
        a = await store.world.attached("a")
        contents = chain(1, 2)
        granted = await a.grant(contents)
        a.write(granted, contents)
        await until(lambda: store.metric("headrace_kvbm_expired_tickets_total", kind="store") == 1)
        assert refusal(await a.commit(granted.ticket, granted.slots)) == "expired"
        assert refusal(await a.commit(granted.ticket, granted.slots)) == "unknown_ticket"
        assert await a.load(contents) == (0, 0)
        assert await a.store(contents) == 2


async def test_attaching_again_ends_all_that_an_engine_had(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        contents = chain(1, 2)
        granted = await a.grant(contents)
        assert await a.attach() == await a.attach()
        assert refusal(await a.commit(granted.ticket, granted.slots)) == "unknown_ticket"
        assert await a.store(contents) == 2


# --- bad input


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"owner": "../a"}, "unknown_owner"),
        ({"owner": "nobody"}, "unknown_owner"),
        ({"worker": "a worker"}, "bad_request"),
        ({"layout": msgspec.structs.replace(LAYOUT, rank=-1)}, "bad_request"),
        ({"layout": msgspec.structs.replace(LAYOUT, kv=KvLayout("int4", 1, 1, 1, 1))}, "bad_request"),
        ({"layout": msgspec.structs.replace(LAYOUT, kv=KvLayout("float32", 0, 1, 1, 1))}, "bad_request"),
        ({"layout": msgspec.structs.replace(LAYOUT, kv=KvLayout("float32", 1, 1, 1 << 21, 1))}, "bad_request"),
        ({"layout": msgspec.structs.replace(LAYOUT, kv=KvLayout("float32", 1, 1 << 10, 1 << 10, 1))}, "no_arena"),
    ],
)
async def test_an_attach_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    async with serving(tmp_path) as store:
        b = await store.world.attached("b")
        a = store.world.engine("a")
        a.hold()
        assert refusal(await a.try_attach(**changes)) == code
        assert store.metric("headrace_kvbm_refusals_total", code=code) == 1
        await a.attach()
        assert await a.store(chain(1)) == 1
        assert await b.load(chain(1)) == (1, 0)


async def test_a_second_attach_with_another_layout_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        contents = chain(1)
        granted = await a.grant(contents)
        assert refusal(await a.try_attach(layout=OTHER_LAYOUT)) == "wrong_layout"
        a.write(granted, contents)
        assert await a.commit(granted.ticket, granted.slots) == wire.Settled()
        assert await a.load(contents) == (1, 0)


async def test_a_policy_that_cannot_be_made_for_a_layout_refuses_the_attach_with_the_reason(tmp_path: Path) -> None:
    async with serving(tmp_path, tiers=TiersConfig(host_policy="tests.kvbm.store_rig:SmallOnly")) as store:
        for layout in (LAYOUT, LAYOUT, OTHER_LAYOUT):
            a = store.world.engine(f"a-{len(store.world.engines)}", layout=layout)
            a.hold()
            await until(lambda: store.service.prefault.complete)
            reply = await a.try_attach()
            assert refusal(reply) == "not_ready"
            assert "blocks are too many for me" in str(reply)
        assert (await store.state()).layouts == []


async def test_an_arena_goes_to_another_layout_only_when_no_engine_uses_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        await a.store(chain(1))
        b = store.world.engine("b", layout=OTHER_LAYOUT)
        b.hold()
        async with asyncio.timeout(60):
            while refusal(await b.try_attach()) != "no_arena":  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        a.die()
        await until(lambda: store.metric("headrace_kvbm_dead_owners_total") == 1)
        await b.attach()
        assert [one.layout for one in (await store.state()).layouts] == [OTHER_LAYOUT.digest]
        assert store.metric("headrace_kvbm_evicted_blocks_total", tier="host", reason="layout gone") == 1
        assert await b.load(chain(1)) == (0, 0)
        assert await b.store(chain(1)) == 1
        assert await b.load(chain(1)) == (1, 0)


async def test_layouts_with_arenas_of_their_own_do_not_see_each_others_blocks(tmp_path: Path) -> None:
    pool = PoolConfig(directory=str(tmp_path / "pool"), size_bytes=1 << 20, arenas=2)
    async with serving(tmp_path, pool=pool) as store:
        a, b = await store.world.attached("a"), await store.world.attached("b", layout=OTHER_LAYOUT)
        await a.store(chain(1, 2))
        assert await b.load(chain(1, 2)) == (0, 0)
        assert await b.store(chain(1)) == 1
        assert await b.load(chain(1, 2)) == (1, 0)
        assert await a.load(chain(1, 2)) == (2, 0)


async def test_bad_stores_are_refused_and_nothing_is_granted(tmp_path: Path) -> None:
    async with serving(tmp_path, tickets=TicketLimits(blocks_per_request=3, tickets_per_owner=1)) as store:
        a = await store.world.attached("a")
        (good,) = chain(1)
        bad: dict[str, list[Content]] = {
            "a short key": [msgspec.structs.replace(good, key=b"short")],
            "a long parent": [msgspec.structs.replace(good, parent=bytes(17))],
            "half a block": [msgspec.structs.replace(good, tokens=b"ab")],
            "two blocks' tokens": [msgspec.structs.replace(good, tokens=bytes(8))],
            "too many": chain(1, 2, 3, 4),
        }
        for what, contents in bad.items():
            assert refusal(await a.try_store(contents)) == "bad_request", what
        granted = await a.grant([good])
        assert refusal(await a.try_store(chain(2))) == "full"
        assert await a.abort(granted.ticket) == wire.Settled()
        assert (await store.layout()).host.blocks == 0


async def test_bad_tickets_are_refused_and_the_good_one_stays(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a, b = await store.world.attached("a"), await store.world.attached("b")
        contents = chain(1, 2)
        granted = await a.grant(contents)
        a.write(granted, contents)
        assert refusal(await b.commit(granted.ticket, granted.slots)) == "unknown_ticket"
        assert refusal(await a.commit(granted.ticket + 1, granted.slots)) == "unknown_ticket"
        assert refusal(await a.commit(granted.ticket, granted.slots + pack_slots([99]))) == "bad_request"
        assert refusal(await a.commit(granted.ticket, granted.slots + b"x")) == "bad_request"
        assert refusal(await a.release(granted.ticket)) == "bad_request"
        assert await b.abort(granted.ticket) == wire.Settled()
        assert await a.commit(granted.ticket, granted.slots) == wire.Settled()
        (fetched,) = await a.fetch(keys(contents))
        assert isinstance(fetched, wire.Fetched)
        assert refusal(await a.abort(fetched.ticket)) == "bad_request"
        assert await b.release(fetched.ticket) == wire.Settled()
        assert (await store.layout()).tickets["fetch"] == 1
        assert await a.release(fetched.ticket) == wire.Settled()


async def test_a_refusal_is_short_however_long_what_was_asked(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        granted = await a.grant(chain(1))
        assert refusal(await a.commit(granted.ticket, pack_slots(range(1 << 19)))) == "bad_request"
        a.owner = "x" * (3 << 20)
        refused = await a.commit(granted.ticket, granted.slots)
        assert refusal(refused) == "unknown_owner"
        assert isinstance(refused, wire.KvbmRefused)
        assert len(refused.reason) <= REASON_CHARS


async def test_bad_fetches_are_refused_in_one_last_reply(tmp_path: Path) -> None:
    async with serving(tmp_path, tickets=TicketLimits(blocks_per_request=3)) as store:
        a = await store.world.attached("a")
        for asked in ([b"short"], keys(chain(1, 1)[:1]) * 2, keys(chain(1, 2, 3, 4))):
            (reply,) = await a.fetch(asked)
            assert refusal(reply) == "bad_request"
        (reply,) = await store.world.engine("nobody").fetch([])
        assert refusal(reply) == "unknown_owner"
        assert await a.load([]) == (0, 0)


async def test_many_fetches_of_far_too_many_blocks_use_no_memory_afterwards(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        tracemalloc.start()
        try:
            for more in range(8):
                (reply,) = await a.fetch([bytes(16 * (100_000 + more))])
                assert refusal(reply) == "bad_request"
            left_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert left_bytes < 4 << 20, "eight formats of 100,000 keys are 25 MiB"


@pytest.mark.parametrize("operation", ["attach", "store", "commit", "abort", "fetch", "release", "discard"])
@pytest.mark.parametrize("payload", [b"", b"\xff" * 40, msgspec.msgpack.encode({"type": "hello"})])
async def test_what_cannot_be_read_is_answered(tmp_path: Path, operation: str, payload: bytes) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        answer = await a.ask(operation, payload)
        assert refusal(wire.SETTLED.decode(answer.payload)) == "bad_request"
        answer = await a.ask(operation, payload, headers=JSON_HEADER)
        assert refusal(wire.SETTLED.decode(answer.payload, JSON_HEADER)) == "bad_request"
        await store.world.bus.publish(a.subject(operation), payload)  # nobody waits for an answer
        await until(lambda: store.runtime.bus.malformed == 1)


async def test_people_may_ask_in_json(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        asked = wire.RELEASE.encode(wire.Release(a.owner, 1), JSON_HEADER)
        answer = await a.ask("release", asked, headers=JSON_HEADER)
        assert wire.SETTLED.decode(answer.payload, answer.headers) == wire.Settled()


def test_settings_that_make_no_sense_are_refused_by_name() -> None:
    needed = ["--pool-directory", "/x", "--pool-size-bytes", "1"]
    for flags in (
        [],
        ["--pool-directory", "", "--pool-size-bytes", "1"],
        [*needed, "--pool-arenas", "0"],
        [*needed, "--tickets-owner-share", "2"],
        [*needed, "--tickets-store-time-s", "0"],
        [*needed, "--disk-threads", "0"],
        [*needed, "--tiers-held-share", "0"],
        [*needed, "--statistics-window-s", "0"],
        [*needed, "--pool-mode", "1"],
    ):
        with pytest.raises(ConfigError):
            load(KvbmConfig, environ={}, flags=flags)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"pool": PoolConfig(directory="{}/pool", size_bytes=1 << 45)}, "needs"),
        ({"pool": PoolConfig(directory="{}/file/pool", size_bytes=1 << 20)}, "Not a directory"),
        ({"pool": PoolConfig(directory="{}/pool", size_bytes=1 << 20, arenas=1 << 20)}, "larger than an arena"),
        ({"tiers": TiersConfig(host_policy="best")}, "eviction policy best"),
        ({"tiers": TiersConfig(disk_policy="nowhere:Policy")}, "eviction policy nowhere:Policy"),
    ],
)
async def test_a_kvbm_that_cannot_be_says_why_and_leaves_nothing(
    tmp_path: Path, tables: dict[str, Any], words: str
) -> None:
    (tmp_path / "file").touch()
    if "pool" in tables:
        directory = tables["pool"].directory.format(tmp_path)
        tables = {"pool": msgspec.structs.replace(tables["pool"], directory=directory)}
    with pytest.raises((ConfigError, ExceptionGroup)) as told:
        async with serving(tmp_path, **tables):
            pass
    assert words in str(told.value.exceptions[0] if isinstance(told.value, ExceptionGroup) else told.value)
    async with serving(tmp_path) as store:
        await store.world.attached("a")


# --- reports to routers and people


async def test_events_snapshot_report_and_digests_agree(tmp_path: Path) -> None:
    async with serving(tmp_path, size_bytes=SMALL_BYTES, disk=True) as store:
        a = await store.world.attached("a")
        router = await store.router()
        for token in range(40):
            await a.store(chain(token, 100 + token))
            await store.spilled()
        await store.reported(lambda report: report.sequence == router.sequence)
        report = store.reports[-1].layouts[0]
        assert (report.host_digest, report.disk_digest) == (router.digest("host_pinned"), router.digest("disk"))
        sequence, tiers = await store.snapshot()
        assert sequence == router.sequence
        assert set(tiers["host"]) == router.held["host_pinned"]
        assert set(tiers["disk"]) == router.held["disk"]
        assert len(tiers["disk"]) > len(tiers["host"]) > 0
        entry = await store.entry()
        assert entry is not None
        source = entry.layouts[LAYOUT.digest]
        assert (source.epoch, source.snapshot, source.digest) == (True, True, True)


async def test_blocks_that_are_said_to_follow_one_another_in_a_circle_are_in_a_snapshot_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        a = await store.world.attached("a")
        one, two, alone = *chain(1, 2), *chain(3)
        liars = [
            msgspec.structs.replace(one, parent=two.key),
            two,
            msgspec.structs.replace(alone, parent=alone.key),
        ]
        assert await a.store(liars) == 3
        _sequence, tiers = await store.snapshot()
        assert sorted(tiers["host"]) == sorted(event_hash(block.key) for block in liars)


async def test_a_snapshot_of_a_layout_that_is_not_here_is_not_given(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        await store.world.attached("a")
        subject = f"headrace.test.kvbm.{store.runtime.instance}.snapshot"
        await store.world.bus.publish(subject, b"\x81\xa4type\xa8snapshot")
        await until(lambda: store.runtime.bus.malformed == 1)


async def test_a_kvbm_that_stops_leaves_discovery_and_answers_no_request(tmp_path: Path) -> None:
    world = World(settings(tmp_path))
    async with running(world) as store:
        a = await world.attached("a")
        await a.store(chain(1))
        assert await store.entry() is not None
        assert kvbm_of(tmp_path / "pool") == "b1"
    with pytest.raises(NoResponders):
        await a.try_attach()
    a.die()


async def test_a_disk_directory_that_is_not_there_yet_is_made_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serving(tmp_path, disk=True) as store:
        await store.world.attached("a")
        await until(lambda: "disk tier" in caplog.text)
    assert (tmp_path / "disk").is_dir()
    assert "no room" not in caplog.text


async def test_a_line_of_the_log_says_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    statistics = msgspec.structs.replace(settings(tmp_path).statistics, log_s=0.25)
    caplog.set_level("INFO")
    async with serving(tmp_path, disk=True, statistics=statistics) as store:
        a = await store.world.attached("a")
        await a.store(chain(1))
        await a.load(chain(1, 2))
        await until(lambda: "1 lookups of 2 blocks in 300 s, found 0.500 in memory, 0.000 on disk" in caplog.text)


# --- restarts


async def test_after_a_restart_nothing_is_granted_until_the_engines_of_before_have_answered_or_are_dead(
    tmp_path: Path,
) -> None:
    world = World(settings(tmp_path))
    async with running(world, "b1"):
        a, b = await world.attached("a"), await world.attached("b")
        contents = chain(1, 2)
        late = await a.grant(contents)
    async with running(world, "b2") as store:
        await b.attach()
        assert await b.store(contents) == 0, "engine a may still write"
        layout = await store.layout()
        assert (layout.host.state, layout.host.reason) == ("quarantined", "1 engines of a former kvbm may still write")
        assert refusal(await a.commit(late.ticket, late.slots)) == "unknown_owner"
        await a.attach()
        assert (await store.layout()).host.state == "on"
        assert refusal(await a.commit(late.ticket, late.slots)) == "unknown_ticket"
        assert await b.store(contents) == 2
        assert await a.load(contents) == (2, 0)
    async with running(world, "b3"):
        await a.attach()
        b.die()
        await until(lambda: "b" not in {path.name for path in (tmp_path / "pool" / "owners").iterdir()})
        assert await a.store(contents) == 2
    a.die()


async def test_blocks_on_disk_are_found_again_after_a_restart(tmp_path: Path) -> None:
    world = World(settings(tmp_path, disk=True))
    contents = chain(1, 2, 3)
    async with running(world, "b1") as store:
        a = await world.attached("a")
        await a.store(contents)
        await until(lambda: store.metric("headrace_kvbm_disk_bytes_total", operation="write") == 3 * 8000)
    async with running(world, "b2") as store:
        await a.attach()
        router = await store.router()
        await until(lambda: router.holds("disk", contents))
        assert await a.load(contents) == (3, 3)
        assert await a.load(contents) == (3, 0)
        layout = await store.layout()
        assert layout.disk is not None
        assert (layout.disk.state, layout.disk.blocks, layout.disk.hit_rate) == ("on", 3, 0.5)
        assert router.holds("host_pinned", contents)
    a.die()


# --- the disk


async def test_blocks_on_disk_come_after_the_blocks_of_their_prefix_in_memory(tmp_path: Path) -> None:
    tiers = TiersConfig(host_policy="lru", disk_sightings=1)
    async with serving(tmp_path, size_bytes=SMALL_BYTES, disk=True, tiers=tiers) as store:
        a = await store.world.attached("a")
        assert a.slots is not None
        contents = chain(1, 2, 3)
        await a.store(contents[1:])
        for token in range(10, 10 + 3 * a.slots.arena.slots):
            await a.store(chain(token))
            await store.spilled()
        await a.store(contents[:1])
        replies = await a.fetch(keys(contents))
        first = replies[0]
        assert isinstance(first, wire.Fetched)
        assert (first.first, len(first.slots), first.disk, first.found) == (0, 4, False, 3)
        for reply in replies:
            assert isinstance(reply, wire.Fetched)
            assert all(a.read(reply, contents[reply.first :][: len(reply.slots) // 4]))
            assert reply.disk == (reply is not first)
        assert sum(len(reply.slots) for reply in replies if isinstance(reply, wire.Fetched)) == 12
        await a.release(first.ticket)


async def test_a_damaged_block_ends_the_prefix_and_is_forgotten(tmp_path: Path) -> None:
    world = World(settings(tmp_path, disk=True))
    contents = chain(1, 2, 3)
    async with running(world, "b1") as store:
        a = await world.attached("a")
        await a.store(contents)
        await store.spilled()
    segment = tmp_path / "disk" / LAYOUT.digest / "segment-000000"
    stored = bytearray(segment.read_bytes())
    start = stored.index(payload(contents[1])[:64])
    stored[start] ^= 1
    segment.write_bytes(stored)
    async with running(world, "b2") as store:
        await a.attach()
        router = await store.router()
        await until(lambda: router.holds("disk", contents))
        assert await a.load(contents) == (1, 1)
        assert router.holds("disk", [contents[0], contents[2]])
        assert store.metric("headrace_kvbm_evicted_blocks_total", tier="disk", reason="lost") == 1
        assert await a.store(contents) == 1, "it alone is stored anew"
        right, _ = await a.load(contents)  # the last one was read before, unless the damaged one was seen sooner
        assert right == 3
    a.die()


async def test_a_discarded_block_is_gone_from_memory_and_disk_for_routers_and_after_a_restart(tmp_path: Path) -> None:
    world, contents = World(settings(tmp_path, disk=True)), chain(1, 2, 3)
    async with running(world) as store:
        a = await world.attached("a")
        router = await store.router()
        assert await a.store(contents) == 3
        await store.spilled()
        (fetched,) = await a.fetch(keys(contents))
        assert isinstance(fetched, wire.Fetched)
        assert await a.discard(keys(contents[1:2])) == wire.Settled()
        assert a.read(fetched, contents) == [True, False, True], "a reader sees by the generation that it is wrong"
        assert await a.load(contents) == (1, 0)
        left = [contents[0], contents[2]]
        await until(lambda: router.holds("host_pinned", left) and router.holds("disk", left))
        assert store.metric("headrace_kvbm_evicted_blocks_total", tier="host", reason="discarded") == 1
        assert store.metric("headrace_kvbm_evicted_blocks_total", tier="disk", reason="discarded") == 1
        assert await a.release(fetched.ticket) == wire.Settled()
        await until(lambda: not store.service.layouts.open[LAYOUT.digest].tiers.statistics().disk.erasing)
    a.die()
    async with running(world, "b2") as store:
        b = await world.attached("b")
        router = await store.router()
        await until(lambda: router.holds("disk", left))
        assert await b.load(contents) == (1, 1)


async def test_checksums_come_back_as_they_were_committed_and_from_disk_as_they_were_written(tmp_path: Path) -> None:
    world, contents = World(settings(tmp_path, disk=True)), chain(1, 2)
    checksums = pack_hashes(xxh3_64_intdigest(payload(content)) for content in contents)
    async with running(world) as store:
        a = await world.attached("a")
        granted = await a.grant(contents)
        a.write(granted, contents)
        assert refusal(await a.commit(granted.ticket, granted.slots, checksums[:9])) == "bad_request"
        assert await a.commit(granted.ticket, granted.slots, checksums) == wire.Settled()
        (fetched,) = await a.fetch(keys(contents))
        assert isinstance(fetched, wire.Fetched)
        assert fetched.checksums == checksums
        await a.release(fetched.ticket)
        await a.store(chain(3))
        (fetched,) = await a.fetch(keys(chain(3)))
        assert isinstance(fetched, wire.Fetched)
        assert fetched.checksums == b"", "its writer made none"
        await a.release(fetched.ticket)
        await store.spilled()
    a.die()
    async with running(world, "b2") as store:
        b = await world.attached("b")
        router = await store.router()
        await until(lambda: router.holds("disk", [*contents, *chain(3)]))
        told = [reply.checksums for reply in await b.fetch(keys(contents)) if isinstance(reply, wire.Fetched)]
        assert b"".join(told) == checksums


async def test_a_block_that_is_damaged_in_memory_does_not_go_to_disk_and_is_given_to_no_engine_after(
    tmp_path: Path,
) -> None:
    tiers = TiersConfig(disk_sightings=2, fill_disk=False)
    async with serving(tmp_path, disk=True, tiers=tiers) as store:
        a, contents = await store.world.attached("a"), chain(1)
        granted = await a.grant(contents)
        a.write(granted, contents)
        wrong = pack_hashes([xxh3_64_intdigest(payload(contents[0])) ^ 1])
        await a.commit(granted.ticket, granted.slots, wrong)
        await a.load(contents)  # seen twice
        await until(
            lambda: store.metric("headrace_kvbm_disk_lost_blocks_total", operation="write", reason="damaged") == 1
        )
        tiers_of = (await store.snapshot())[1]
        assert (tiers_of["host"], tiers_of["disk"]) == ([], [])
        assert await a.load(contents) == (0, 0)
        assert store.metric("headrace_kvbm_evicted_blocks_total", tier="host", reason="lost") == 1


async def test_a_disk_that_goes_takes_its_blocks_and_requests_go_on_until_it_is_back(tmp_path: Path) -> None:
    async with serving(tmp_path, disk=True) as store:
        a = await store.world.attached("a")
        contents = chain(1, 2)
        router = await store.router()
        await a.store(contents)
        await until(lambda: router.holds("disk", contents))
        disk = store.service.layouts.open[LAYOUT.digest].disk
        assert disk is not None
        shutil.move(tmp_path / "disk", tmp_path / "elsewhere")
        (tmp_path / "disk").touch()
        await until(lambda: disk.statistics().state == "off")
        assert await a.load(contents) == (2, 0)
        assert await a.store(chain(3)) == 1
        await until(lambda: router.holds("disk", []))
        layout = await store.layout()
        assert layout.disk is not None
        assert layout.disk.state != "on", "it is off, or tried again just now"
        assert layout.disk.reason
        (tmp_path / "disk").unlink()
        shutil.move(tmp_path / "elsewhere", tmp_path / "disk")
        await until(lambda: router.holds("disk", [*contents, *chain(3)]))


async def test_a_fetch_that_waits_for_the_disk_is_refused_when_its_ticket_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(settings(tmp_path, disk=True))
    contents = chain(1, 2)
    ended, read = threading.Event(), Segments.read

    def after_the_ticket(*record: Any) -> Any:
        assert ended.wait(LIMIT_S)
        return read(*record)

    async with running(world, "b1") as store:
        a = await world.attached("a")
        await a.store(contents)
        await store.spilled()
    async with running(world, "b2") as store:
        await a.attach()
        router = await store.router()
        await until(lambda: router.holds("disk", contents))
        monkeypatch.setattr(Segments, "read", after_the_ticket)
        asked = wire.FETCH.encode(wire.Fetch(a.owner, b"".join(keys(contents))))
        bus = store.world.bus
        try:
            async with bus.stream(a.subject("fetch"), asked, idle_timeout_s=LIMIT_S) as messages:
                replies = aiter(messages)
                first = wire.FETCH_REPLY.decode((await anext(replies)).payload)
                await a.attach()
                (last,) = [wire.FETCH_REPLY.decode(message.payload) async for message in replies]
        finally:
            ended.set()
        assert isinstance(first, wire.Fetched)
        assert (first.slots, first.found) == (b"", 2)
        assert refusal(last) == "unknown_ticket"
        assert (await store.layout()).tickets["fetch"] == 0
        await store.spilled()
    a.die()
