from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import pytest

from services.worker.config import HealthConfig, KVConnectorConfig, WorkerConfig
from services.worker.contracts.messages import (
    KV_EVENTS,
    EngineLoad,
    KvbmLink,
    Snapshot,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.engine.process import EngineProcess
from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.errors import BusDown, ModelError, RequestTimeout
from shared.hashing import pack_tokens
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.frames import NOT_BEGUN, RESEND_REQUEST, RESENT, SHUTTING_DOWN, ResendRequest
from shared.messages.generate import GENERATE, Accepted, Refused, Sampling
from shared.messages.kv_events import (
    SNAPSHOT_CHUNK,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockStored,
    KvEvent,
    SnapshotBlock,
    SnapshotRequest,
)
from shared.messages.load import KvState, RankLoad
from tests.logged import logged
from tests.tiny_model import write_tiny_model
from tests.worker.scripted_engine import FACTS, ScriptedEngines
from tests.worker.shell import (
    EOS,
    FRONTEND,
    LIMIT_S,
    NAMESPACE,
    WORKER,
    Shell,
    endless,
    request,
    running_worker,
    write_model,
)

PROMPT = list(range(10, 50))


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        namespace=NAMESPACE,
        model=str(write_model(tmp_path / "model")),
        engine="echo",
        capacity_blocks=256,
        max_running=4,
        max_waiting=4,
        stall_s=3600.0,  # a stopped engine outlives its test
        drain_s=0.2,
    )


async def serving(shell: Shell) -> None:
    await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)


async def test_an_echoed_prompt_streams_back_and_ends(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        assert await shell.peer.generate(request("r", PROMPT)) == Accepted("r", 1)
        assert await shell.peer.ended("r") == "stop"
        assert shell.peer.tokens("r") == [*PROMPT, EOS]
        assert [frame.sequence for frame in shell.peer.frames] == list(range(len(shell.peer.frames)))


async def test_a_second_request_finds_the_first_ones_blocks(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        for name in ("first", "second"):
            await shell.peer.generate(request(name, PROMPT))
            await shell.peer.ended(name)
        assert shell.peer.parts("first")[-1].cached_tokens == 0
        assert shell.peer.parts("second")[-1].cached_tokens == 32


async def test_a_directorys_whole_name_is_the_models(config: WorkerConfig, tmp_path: Path) -> None:
    model = write_model(tmp_path / "Qwen2.5-0.5B")
    async with running_worker(msgspec.structs.replace(config, model=str(model))) as shell:
        await shell.peer.until(lambda: ("Qwen2.5-0.5B", WORKER) in shell.directory.cards)


async def test_the_card_and_the_address_book_stand_while_it_serves(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        card = shell.directory.cards["model", WORKER]
        assert (card.block_size, card.capacity_blocks, card.vocab_size) == (16, 256, 320)
        instance = shell.directory.instances[WORKER]
        assert instance.subjects["generate"] == subjects.worker(NAMESPACE, WORKER, "generate")
        assert instance.events is not None
        assert instance.events.snapshot
    assert await shell.runtime.discovery.list("/headrace/") == {}


async def test_events_begin_with_a_cleared_cache_and_equal_the_snapshot(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        await shell.peer.generate(request("r", PROMPT))
        await shell.peer.ended("r")
        sequences = [sequence for sequence, _ in shell.peer.batches]
        assert sequences == list(range(len(sequences)))
        assert shell.peer.batches[0][1].events == [AllBlocksCleared()]
        stored = [event for _, batch in shell.peer.batches for event in batch.events if isinstance(event, BlockStored)]
        hashes = [block for event in stored for block in event.block_hashes]
        blocks = await snapshot(shell)
        assert [block.hash for block in blocks] == hashes
        assert b"".join(block.tokens for block in blocks) == pack_tokens((PROMPT + PROMPT)[: 16 * len(blocks)])
        await shell.peer.until(lambda: shell.peer.reports[-1].kv[0].sequence == sequences[-1])


async def snapshot(shell: Shell, *, rank: int = 0, idle_timeout_s: float = LIMIT_S) -> list[SnapshotBlock]:
    blocks: list[SnapshotBlock] = []
    payload = SNAPSHOT_REQUEST.encode(SnapshotRequest(rank))
    async with shell.peer.bus.stream(subject_of_snapshots(), payload, idle_timeout_s=idle_timeout_s) as messages:
        async for message in messages:
            blocks += SNAPSHOT_CHUNK.decode(message.payload).blocks
    return blocks


def subject_of_snapshots() -> str:
    return subjects.worker(NAMESPACE, WORKER, "snapshot")


async def test_a_snapshot_of_a_rank_that_is_not_there_is_not_that_of_another(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        with logged("a snapshot of rank 1", "shared.rate_limited_log") as said:
            question = SNAPSHOT_REQUEST.encode(SnapshotRequest(rank=1))
            async with shell.peer.bus.stream(subject_of_snapshots(), question, idle_timeout_s=0.1) as messages:
                with pytest.raises(RequestTimeout):
                    await anext(messages)
            await said.wait()


async def test_ranks_have_attempts_events_digests_and_snapshots_of_their_own(config: WorkerConfig) -> None:
    engines = ScriptedEngines(msgspec.structs.replace(FACTS, ranks=2))
    async with running_worker(config, start_engine=engines.start) as shell:
        await serving(shell)
        [engine] = engines.all
        assert shell.directory.cards["model", WORKER].ranks == 2
        for rank, sequence in ((0, 0), (1, 1)):
            engine.report(rank_stepped(rank, sequence, 0, [AllBlocksCleared()]))
        engine.report(rank_stepped(1, 2, 42, [BlockStored([42], None, [7] * 16, 16, medium="GPU")], held_blocks=3))
        await shell.peer.until(lambda: bool(shell.peer.reports) and shell.peer.reports[-1].kv[0].sequence == 2)
        assert [(batch.data_parallel_rank, sequence) for sequence, batch in shell.peer.batches] == [
            (0, 0),
            (1, 1),
            (1, 2),
        ]
        report = shell.peer.reports[-1]
        assert report.kv == [KvState(0, 1, 2, 0), KvState(1, 1, 2, 42)]
        assert report.ranks == [RankLoad(0, 0, 0, 0, 0), RankLoad(1, 0, 0, 0, 3)]
        assert (report.held_blocks, report.total_blocks) == (3, 2 * FACTS.capacity_blocks)

        assert await shell.peer.generate(request("r", PROMPT, rank=1)) == Accepted("r", 1)
        wrong = await shell.peer.generate(request("s", PROMPT, rank=2))
        assert isinstance(wrong, Refused)
        assert wrong.reason == "rank: 2; this worker has the ranks 0 to 1"
        [submitted] = engine.told
        assert isinstance(submitted, Submit)
        assert (submitted.request, submitted.rank, submitted.number) == ("r", 1, 1)

        asked = asyncio.ensure_future(snapshot(shell, rank=1))
        await shell.peer.until(lambda: engine.told[1:] == [TakeEngineSnapshot(1, rank=1)])
        block = SnapshotBlock(42, None, pack_tokens([7] * 16))
        engine.report(Snapshot(1, 2, [block]))
        assert await asked == [block]

        engine.kill()
        await shell.peer.until(lambda: len(engines.all) == 2)
        await shell.peer.until(lambda: shell.peer.reports[-1].kv == [KvState(0, 2, -1), KvState(1, 2, -1)])
        assert shell.peer.finish("r") == "error"


def rank_stepped(rank: int, sequence: int, digest: int, events: list[KvEvent], *, held_blocks: int = 0) -> Stepped:
    load = EngineLoad(held_blocks=held_blocks)
    return Stepped(sequence + 1, {}, [], [], KV_EVENTS.encode(events), sequence, digest, load, rank=rank)


class TornBus(MemoryBus):
    """Loses NATS for the second answer of one stream."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker())
        self.answers = -1

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        no_responders: Callable[[], None] | None = None,
    ) -> None:
        if self.answers >= 0 and subject.startswith("_INBOX."):
            self.answers += 1
            if self.answers == 2:
                raise BusDown("torn")
        await super().publish(subject, payload, headers=headers, no_responders=no_responders)


async def test_a_snapshot_that_lost_a_chunk_is_given_no_end(config: WorkerConfig) -> None:
    model = write_model(Path(config.model), context_length=1 << 17)
    bus = TornBus()
    async with running_worker(msgspec.structs.replace(config, model=str(model), block_size=1 << 14), bus=bus) as shell:
        await serving(shell)
        await shell.peer.generate(request("r", [7] * (5 << 14), max_tokens=1))
        await shell.peer.ended("r")
        bus.answers = 0
        with pytest.raises(RequestTimeout):
            await snapshot(shell, idle_timeout_s=1.0)
        assert len(await snapshot(shell)) == 5


async def test_a_repeated_attempt_is_accepted_again_and_computed_once(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        for _ in range(2):
            assert await shell.peer.generate(request("r", PROMPT)) == Accepted("r", 1)
        await shell.peer.ended("r")
        assert await shell.peer.generate(request("r", PROMPT)) == Accepted("r", 1)
        await shell.peer.generate(request("other", PROMPT))
        await shell.peer.ended("other")
        assert len(shell.peer.parts("r")) == len(PROMPT) + 1


async def test_cancel_ends_an_attempt_and_frees_its_blocks(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        await shell.peer.generate(endless("r"))
        await shell.peer.until(lambda: bool(shell.peer.parts("r")))
        await shell.peer.cancel("r")
        assert await shell.peer.ended("r") in ("cancelled", "length")
        shell.peer.reports.clear()  # those that come now know of the end
        await shell.peer.until(lambda: bool(shell.peer.reports))
        assert shell.peer.reports[-1].attempts == []
        assert shell.peer.reports[-1].held_blocks == 0


async def test_load_reports_count_every_token_once(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        for name in ("r", "s"):
            await shell.peer.generate(request(name, PROMPT))
            await shell.peer.ended(name)
        drawn = sum(len(part.tokens) // 4 for name in ("r", "s") for part in shell.peer.parts(name))
        assert drawn > 2
        await shell.peer.until(lambda: shell.peer.reports[-1].output_tokens == drawn)


async def test_bad_requests_are_refused_by_name(config: WorkerConfig) -> None:
    bad = {
        "tokens: id 320": request("r", [320]),
        "tokens: 512": request("r", [1] * 512),
        "tokens: 3 bytes": request("r", [1], tokens=b"abc"),
        "prompt_tokens": request("r", [1], prompt_tokens=2),
        "time_left_s": request("r", [1], time_left_s=float("nan")),
        "wait_left_s: nan": request("r", [1], wait_left_s=float("nan")),
        "wait_left_s: -1": request("r", [1], wait_left_s=-1.0),
        "sampling.temperature": request("r", [1], sampling=Sampling(max_tokens=1, temperature=float("inf"))),
        "sampling.max_tokens": request("r", [1], sampling=Sampling(max_tokens=0)),
        "frontend": request("r", [1], frontend="a.>"),
        "rank": request("r", [1], rank=1),
    }
    async with running_worker(config) as shell:
        await serving(shell)
        for reason, generate in bad.items():
            reply = await shell.peer.generate(generate)
            assert isinstance(reply, Refused), reason
            assert reply.code == "bad_request"
            assert reply.reason.startswith(reason)
        reply = await shell.peer.generate(request("r", [1], model="another"))
        assert isinstance(reply, Refused)
        assert reply.code == "wrong_model"
        torn = await shell.peer.ask("generate", b"\xc1 not msgpack")
        assert b"bad_request" in torn.payload


async def test_an_attempt_that_could_not_begin_in_time_ends_and_is_counted(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        assert await shell.peer.generate(request("r", PROMPT, wait_left_s=0.0)) == Accepted("r", 1)
        assert await shell.peer.ended("r") == "error"
        assert shell.peer.parts("r")[-1].error.startswith(NOT_BEGUN)
        assert await shell.peer.generate(request("s", PROMPT, wait_left_s=3600.0)) == Accepted("s", 1)
        assert await shell.peer.ended("s") == "stop"
        outcomes = shell.runtime.registry.get_sample_value
        assert outcomes("headrace_requests_total", {"outcome": "not_begun"}) == 1
        assert outcomes("headrace_requests_total", {"outcome": "error"}) is None


@pytest.mark.parametrize(("blocks", "warned"), [(1, True), (31, True), (32, False)])
async def test_a_worker_whose_kv_has_room_for_few_tokens_says_so(
    config: WorkerConfig, caplog: pytest.LogCaptureFixture, blocks: int, warned: bool
) -> None:
    async with running_worker(msgspec.structs.replace(config, capacity_blocks=blocks)) as shell:
        await serving(shell)
        room = f"the KV has room for {16 * blocks} tokens only, prompt and answer together"
        notes = [f"{room}; raise worker.capacity_blocks"] if warned else []
        assert shell.runtime.health.also().get("notes", []) == notes
    assert [record.message for record in caplog.records if "room for" in record.message] == notes


async def test_unreadable_messages_are_counted_and_logged_once_a_subject(
    config: WorkerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        for operation in ("cancel", "resend", "snapshot"):
            for _ in range(3):
                await shell.peer.bus.publish(subjects.worker(NAMESPACE, WORKER, operation), b"\xc1 not msgpack")
        resend = RESEND_REQUEST.encode(ResendRequest(FRONTEND, 0))
        await shell.peer.bus.publish(subjects.worker(NAMESPACE, WORKER, "resend"), resend)
        await shell.peer.until(lambda: shell.runtime.bus.malformed == 10)
        assert await shell.peer.generate(request("r", PROMPT)) == Accepted("r", 1)
        assert await shell.peer.ended("r") == "stop"
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 3
    assert not any(record.exc_info for record in told)


async def test_a_number_that_cannot_be_passed_on_is_refused_and_the_worker_lives_on(config: WorkerConfig) -> None:
    huge = GENERATE.encode(endless("r"), JSON_HEADER).replace(b'"attempt":1', b'"attempt":%d' % (1 << 64))
    async with running_worker(config) as shell:
        await serving(shell)
        subject = subjects.worker(NAMESPACE, WORKER, "generate")
        reply = await shell.peer.bus.request(subject, huge, timeout_s=LIMIT_S, headers=JSON_HEADER)
        assert b"bad_request" in reply.payload
        reports = len(shell.peer.reports)
        await shell.peer.until(lambda: len(shell.peer.reports) > reports)
        assert shell.peer.reports[-1].attempts == []


async def test_beyond_the_bound_attempts_are_refused_as_overloaded(config: WorkerConfig) -> None:
    narrow = msgspec.structs.replace(config, max_running=1, max_waiting=1)
    async with running_worker(narrow) as shell:
        await serving(shell)
        replies = await asyncio.gather(*(shell.peer.generate(endless(name)) for name in "abcdefgh"))
        assert any(isinstance(reply, Refused) and reply.code == "overloaded" for reply in replies)
        for reply in replies:
            if isinstance(reply, Accepted):
                await shell.peer.cancel(reply.request)
                assert await shell.peer.ended(reply.request)


async def test_a_killed_engine_ends_its_attempts_and_comes_back_with_an_empty_cache(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        await shell.peer.generate(request("before", PROMPT))
        await shell.peer.ended("before")
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await shell.peer.generate(endless("r"))
        os.kill(pid, signal.SIGKILL)
        assert await shell.peer.ended("r") == "error"
        assert "engine" in shell.peer.parts("r")[-1].error
        await shell.peer.until(
            lambda: shell.peer.reports[-1].kv[0].epoch == 2 and shell.peer.reports[-1].kv[0].sequence == 0
        )
        assert shell.peer.batches[-1] == (0, shell.peer.batches[-1][1])
        assert shell.peer.batches[-1][1].events == [AllBlocksCleared()]
        await serving(shell)
        await shell.peer.generate(request("after", PROMPT))
        assert await shell.peer.ended("after") == "stop"
        assert shell.peer.parts("after")[-1].cached_tokens == 0


async def test_an_engine_that_stands_still_while_attempts_wait_is_killed_and_started_again(
    config: WorkerConfig,
) -> None:
    async with running_worker(msgspec.structs.replace(config, stall_s=10.0)) as shell:
        await serving(shell)
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await shell.peer.generate(endless("r"))
        assert await shell.peer.ended("r") == "error"
        await shell.peer.until(lambda: shell.worker.engine.facts is not None and shell.worker.engine.pid != pid)
        await serving(shell)
        await shell.peer.generate(request("after", PROMPT))
        assert await shell.peer.ended("after") == "stop"


@pytest.fixture
def idle(config: WorkerConfig, tmp_path: Path) -> WorkerConfig:
    """A native engine that is probed as soon as it has nothing to do."""
    model, cache = str(write_tiny_model(tmp_path / "tiny")), str(tmp_path / "cache")
    health = HealthConfig(idle_s=0.05, limit_s=LIMIT_S)
    return msgspec.structs.replace(
        config, model=model, model_name="model", cache=cache, engine="native", threads=1, health=health
    )


def probed(shell: Shell, outcome: str) -> float:
    name = "headrace_engine_probes_total"
    return shell.runtime.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


async def test_an_idle_native_engine_computes_tokens_that_count_for_no_client(idle: WorkerConfig) -> None:
    async with running_worker(idle) as shell:
        await serving(shell)
        await shell.peer.until(lambda: probed(shell, "ok") >= 3)
        assert probed(shell, "failed") == 0
        assert "rank 0: ok" in shell.runtime.health.also()["probes"][0]
        await shell.peer.generate(request("r", PROMPT, max_tokens=5))
        assert await shell.peer.ended("r") in ("stop", "length")
        drawn, before = len(shell.peer.tokens("r")), probed(shell, "ok")
        await shell.peer.until(lambda: probed(shell, "ok") >= before + 3)
        value, computed = shell.runtime.registry.get_sample_value, len(PROMPT) + drawn - 1
        await shell.peer.until(lambda: value("headrace_output_tokens_total") == drawn)
        assert value("headrace_computed_tokens_total") == computed
        assert value("headrace_step_seconds_count") == drawn
        events = [event for _, batch in shell.peer.batches for event in batch.events]
        assert [type(event) for event in events if not isinstance(event, BlockStored)] == [AllBlocksCleared]
        assert shell.peer.stored == computed // 16


async def test_an_idle_native_engine_that_stands_still_is_killed_and_started_again(idle: WorkerConfig) -> None:
    impatient = msgspec.structs.replace(idle, health=HealthConfig(idle_s=0.5, limit_s=2.0))
    async with running_worker(impatient) as shell:
        await serving(shell)
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await shell.peer.until(lambda: shell.worker.engine.pid not in (pid, None))
        assert probed(shell, "failed") >= 1


async def test_an_idle_engine_whose_device_fails_is_started_again(
    idle: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATAL", "1 1")
    start = partial(EngineProcess.start, module="tests.gpu.breaking_engine")
    async with running_worker(idle, start_engine=start) as shell:
        await shell.peer.until(lambda: probed(shell, "failed") >= 2)
        assert shell.worker.engine.epoch >= 2


async def test_an_idle_engine_is_left_alone(config: WorkerConfig) -> None:
    async with running_worker(msgspec.structs.replace(config, stall_s=0.2)) as shell:
        await serving(shell)
        pid = shell.worker.engine.pid
        heard = len(shell.peer.reports)
        await shell.peer.until(lambda: len(shell.peer.reports) >= heard + 4)
        assert shell.worker.engine.pid == pid


async def test_without_an_engine_generate_is_refused_as_not_ready(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await shell.peer.generate(endless("r"))
        os.kill(pid, signal.SIGKILL)
        await shell.peer.ended("r")
        reply = await shell.peer.generate(request("early", PROMPT))
        assert reply == Refused("early", 1, "not_ready", "the engine is starting")


async def test_frames_made_while_nats_is_away_come_in_order_when_it_is_back(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        bus = shell.runtime.bus
        assert isinstance(bus, MemoryBus)
        await shell.peer.generate(request("r", PROMPT))
        shell.broker.disconnect(bus)
        full = 2 * len(PROMPT) // 16  # its last block is: all tokens are drawn
        await shell.peer.until(lambda: shell.peer.stored == full)
        shell.broker.reconnect(bus)
        assert await shell.peer.ended("r") == "stop"
        assert shell.peer.tokens("r") == [*PROMPT, EOS]


async def test_frames_are_sent_again_on_request(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        for name in ("r", "s", "t"):  # of each, its first and its last part have a frame at least
            await shell.peer.generate(request(name, PROMPT))
            await shell.peer.ended(name)
        frames = list(shell.peer.frames)
        shell.peer.frames.clear()
        reply = await shell.peer.ask("resend", RESEND_REQUEST.encode(ResendRequest(FRONTEND, 3)))
        resent = RESENT.decode(reply.payload)
        assert (resent.first, resent.next, resent.streams) == (3, len(frames), [])
        await shell.peer.until(lambda: len(shell.peer.frames) == len(frames) - 3)
        assert shell.peer.frames == frames[3:]


async def test_a_frontend_that_is_gone_gets_its_attempts_cancelled(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        frontend = Instance(
            namespace=NAMESPACE,
            service="frontend",
            instance=FRONTEND,
            epoch=1,
            machine="here",
            pid=1,
            started=0.0,
            version="1",
        )
        key = subjects.instance_key(NAMESPACE, "frontend", FRONTEND)
        registration = await shell.runtime.discovery.register(lambda _: {key: INSTANCE.encode(frontend, JSON_HEADER)})
        await shell.peer.until(lambda: FRONTEND in shell.directory.instances)
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await shell.peer.generate(endless("r"))
        await registration.close()
        await shell.peer.until(lambda: FRONTEND not in shell.directory.instances)
        os.kill(pid, signal.SIGCONT)
        assert await shell.peer.ended("r") == "cancelled"
        shell.peer.reports.clear()  # those that come now know of the end
        await shell.peer.until(lambda: any(not report.frames for report in shell.peer.reports))
        assert shell.peer.reports[-1].attempts == []
        assert shell.peer.reports[-1].held_blocks == 0


async def test_a_load_report_over_the_payload_limit_is_left_out_and_the_worker_lives_on(config: WorkerConfig) -> None:
    bus = MemoryBus(MemoryBroker(), payload_limit_bytes=2000)
    async with running_worker(config, bus=bus) as shell:
        await serving(shell)
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with logged("no load report", "services.worker.service") as left_out:
            for name in "abcdefgh":
                assert await shell.peer.generate(endless(name * 256)) == Accepted(name * 256, 1)
            async with asyncio.timeout(LIMIT_S):
                await left_out.wait()
        for name in "abcdefg":
            await shell.peer.cancel(name * 256)
        shell.peer.reports.clear()
        os.kill(pid, signal.SIGCONT)
        await shell.peer.until(lambda: bool(shell.peer.reports))


async def test_the_card_names_the_kvbm_with_which_the_engine_exchanges_blocks(
    config: WorkerConfig, tmp_path: Path
) -> None:
    engines = ScriptedEngines()
    config = msgspec.structs.replace(config, kvbm=KVConnectorConfig(pool=str(tmp_path / "pool")))
    async with running_worker(config, start_engine=engines.start) as shell:

        def linked() -> tuple[str, str] | None:
            card = shell.directory.cards.get(("model", WORKER))
            return None if card is None else (card.kvbm, card.kvbm_layout)

        await shell.peer.until(lambda: linked() == ("", ""))
        [first] = engines.all
        assert first.instance == WORKER
        first.report(KvbmLink("k1", "5eed"))
        await shell.peer.until(lambda: linked() == ("k1", "5eed"))
        first.kill()
        await shell.peer.until(lambda: linked() is None)
        await shell.peer.until(lambda: linked() == ("", ""))
        _, second = engines.all
        second.report(KvbmLink("k1", "5eed"))
        await shell.peer.until(lambda: linked() == ("k1", "5eed"))


async def test_draining_refuses_new_attempts_and_ends_the_running_ones_with_an_error(config: WorkerConfig) -> None:
    async with running_worker(msgspec.structs.replace(config, drain_s=4.0)) as shell:
        await serving(shell)
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await shell.peer.generate(endless("r"))
        shell.runtime.stopping.set()
        await shell.peer.until(lambda: ("model", WORKER) not in shell.directory.cards)
        reply = await shell.peer.generate(request("late", PROMPT))
        assert isinstance(reply, Refused)
        assert reply.code == "draining"
        assert await shell.peer.ended("r") == "error"
        assert shell.peer.parts("r")[-1].error == SHUTTING_DOWN
    assert shell.worker.engine.pid is None


async def test_stopping_while_the_engine_starts_leaves_no_process(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await shell.peer.until(lambda: bool(shell.peer.reports))
    assert shell.worker.engine.pid is None


async def test_a_lost_lease_is_registered_again_under_the_next_epoch(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await serving(shell)
        shell.store.wipe()
        await shell.peer.until(lambda: shell.peer.reports[-1].epoch == 2)
        await shell.peer.until(
            lambda: WORKER in shell.directory.instances and shell.directory.instances[WORKER].epoch == 2
        )


async def test_a_model_that_cannot_be_served_ends_the_worker_naming_the_file(
    config: WorkerConfig, tmp_path: Path
) -> None:
    missing = msgspec.structs.replace(config, model=str(tmp_path / "nowhere"))
    with pytest.RaisesGroup(pytest.RaisesExc(ModelError, match="nowhere")):
        await run_for_ever(missing)


async def run_for_ever(config: WorkerConfig) -> None:
    async with running_worker(config):
        await asyncio.Event().wait()
