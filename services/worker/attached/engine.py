"""AttachedEngine: serves the channel with a server that runs already, on one event loop.

    commands of the shell ──▶ AttemptTable ──▶ one HTTP stream an attempt ──▶ the server
    Stepped  ◀── one report a turn of the loop ◀── lines of the streams
             ◀── EngineBlocks ◀── read_events ◀── the server's KV events, if it publishes them

Each look at the server asks for its health and load. Where it is away, another model or started again, the engine ends
with Failed; the supervisor starts it again, until the server serves.

It asks for completions of token ids, not for vLLM's `/inference/v1/generate`, which depends on how the server was
started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import Protocol, assert_never

from services.worker.attached.api import ServerLoad
from services.worker.attached.events import read_events
from services.worker.attached.server import Server
from services.worker.attached.sglang_api import SGLANG
from services.worker.attached.vllm_api import VLLM
from services.worker.config import EngineConfig, WorkerConfig
from services.worker.contracts.messages import (
    CancelAttempt,
    EncodeImage,
    EngineLoad,
    EngineOrder,
    ExplainBlock,
    Failed,
    Operate,
    Operated,
    Prefetch,
    Probed,
    ProbeDevice,
    Ready,
    Snapshot,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.engine.async_end import AsyncEnd, EngineChannel, Readable
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.one_line import one_line
from services.worker.vllm.attempts import AttemptTable
from services.worker.vllm.blocks import EngineBlocks
from shared.errors import ConfigError, InvalidRequest, Unavailable
from shared.hashing import pack_tokens
from shared.messages.frames import UNFOLLOWABLE
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared, BlockStored, KvEvent

MOST_BLOCKS_TIMES = 4
"""Times the server's blocks that its events may leave before all are forgotten: its host memory may hold some, too."""
TICK_S = 0.1
"""Seconds between two looks at deadlines."""

_log = logging.getLogger(__name__)


class AttachedChannel(EngineChannel, Readable, Protocol):
    """The engine's end of the channel, with a descriptor that is readable when commands have come."""


async def run_attached(config: EngineConfig, channel: AttachedChannel, local: Ready) -> Failed | None:
    """Serve until Shutdown, which gives None, or return why not. `local` is what the model's files say. Raise
    ChannelClosed."""
    worker = config.worker
    api = SGLANG if worker.attached.kind == "sglang" else VLLM
    server = None
    try:
        server = Server(worker.attached, api, worker.max_running + worker.max_waiting + 2)
        facts = await server.facts(local, worker, config.model_name)
        wrong_probe = worker.health.fault(vocab_size=facts.vocab_size, context_length=facts.context_length)
        if wrong_probe:
            raise ConfigError(wrong_probe)
        engine = ServerEngine(worker, server, channel, facts)
        await engine.probe()
        channel.send(facts)
        return await engine.run()
    except ChannelClosed:
        raise
    except (ConfigError, InvalidRequest) as wrong:
        return Failed(reason=str(wrong), model=True)
    except Exception as wrong:  # noqa: BLE001 - the engine's edge: the shell learns of every failure
        return Failed(reason=str(wrong) if isinstance(wrong, Unavailable) else one_line(wrong))
    finally:
        if server is not None:
            await server.close()


class ServerEngine:
    """The attempts at one server, and what its cache is known to hold."""

    def __init__(self, config: WorkerConfig, server: Server, channel: AttachedChannel, facts: Ready) -> None:
        self._config, self._server, self._channel = config, server, channel
        self._end = AsyncEnd(channel, channel, handle=self._handle, report=self._report)
        self._capacity = facts.capacity_blocks
        self._attempts = AttemptTable()
        self._block_size = facts.block_size
        self._blocks = EngineBlocks(facts.block_size, orphans=False, engine=config.attached.kind)
        self._said = False
        """True once it was said that the events are of blocks of another size."""
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._load: ServerLoad | None = None
        self._new_events: list[KvEvent] = [AllBlocksCleared()]
        self._event_sequence = -1
        self._progress = self._steps = self._looks = 0
        self._look_now = asyncio.Event()
        self._active_s = time.monotonic()

    async def run(self) -> Failed | None:
        """Serve until Shutdown, which gives None. Raise what ends the engine: ChannelClosed, ConfigError,
        Unavailable."""
        tasks = [asyncio.ensure_future(self._tick()), asyncio.ensure_future(self._look())]
        if self._config.attached.events:
            events = read_events(self._config.attached, self._server.decode_events, self._apply_events)
            tasks.append(asyncio.ensure_future(events))
        try:
            await self._end.serve_beside(*tasks)
            return None
        finally:
            tasks += self._streams.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def probe(self) -> None:
        """Have the server compute some tokens. Raise ConfigError, Unavailable."""
        health, tokens = self._config.health, 0
        sampling = Sampling(max_tokens=health.max_tokens, temperature=0.0, ignore_eos=True)
        asked = Submit("probe", 0, "", pack_tokens(health.prompt), len(health.prompt), sampling, 0.0)
        try:
            async with asyncio.timeout(health.limit_s), aclosing(self._server.generate(asked)) as outputs:
                async for output in outputs:
                    tokens += len(output.tokens)
        except TimeoutError:
            tokens = 0
        if tokens != health.max_tokens:
            url, most, limit_s = self._config.attached.url, health.max_tokens, health.limit_s
            raise Unavailable(f"attached.url: {url} did not compute {most} tokens in {limit_s:g} s")
        self._active_s = time.monotonic()

    # --- commands

    def _handle(self, command: EngineOrder) -> None:
        match command:
            case Submit():
                key = self._attempts.add(command, time.monotonic())
                task = asyncio.ensure_future(self._stream(key, command))
                self._streams[key] = task
                task.add_done_callback(lambda done: self._stream_ended(key, done))
            case CancelAttempt(request, attempt):
                key = self._attempts.find(request, attempt) or ""
                self._attempts.end(key, "cancelled")
                self._close([key])
            case TakeEngineSnapshot(ticket):
                self._report()
                self._channel.send(Snapshot(ticket, self._event_sequence, self._blocks.snapshot()))
            case ExplainBlock(ticket, name):
                self._channel.send(self._blocks.explain(name, ticket, time.monotonic()))
            case Operate(ticket, operation):
                self._channel.send(Operated(ticket, failed=f"{operation}: an attached server is not ours"))
            case Prefetch() | EncodeImage() | ProbeDevice():
                pass  # the shell sends none: no kvbm is configured for this engine, and `_look` probes the server
            case _:
                assert_never(command)

    async def _stream(self, key: str, submit: Submit) -> None:
        """Follow one attempt to its end. Raise ConfigError, which ends the engine: the shell ends its attempts then. If
        it is cancelled, the attempt has ended, or the shell ends it."""
        why, loop = "the server ended the answer without a reason", asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as open_end, aclosing(self._server.generate(submit)) as outputs:
                async for output in outputs:
                    self._active_s = time.monotonic()
                    if (output.error or output.finish) and open_end.when() is None:
                        open_end.reschedule(loop.time() + self._config.attached.limit_s)
                    if output.error:
                        why = f"the server ended the answer: {output.error}"
                    elif output.tokens or output.finish:
                        self._attempts.record_output(
                            key,
                            output.tokens,
                            finish=output.finish,
                            cached_tokens=output.cached_tokens,
                            logprobs=output.logprobs,
                        )
                        self._end.flush_soon()
        except TimeoutError:
            pass  # the answer has ended, and its connection has not
        except InvalidRequest as wrong:
            continued = len(submit.tokens) // 4 > submit.prompt_tokens  # another engine may continue a grammar
            why = f"{UNFOLLOWABLE}: {wrong}" if submit.sampling.grammar and not continued else f"refused: {wrong}"
        except Unavailable as wrong:
            why = str(wrong)
            self._look_now.set()
        self._attempts.end(key, "error", why)
        self._end.flush_soon()

    def _stream_ended(self, key: str, task: asyncio.Task[None]) -> None:
        del self._streams[key]
        if not task.cancelled() and (wrong := task.exception()) is not None:
            self._end.break_off(wrong)

    def _close(self, keys: list[str]) -> None:
        """Close the connections of attempts that have ended here; so the server ends them, too."""
        for key in keys:
            if key in self._streams:
                self._streams[key].cancel()
        self._end.flush_soon()

    # --- the server

    def _apply_events(self, events: list[KvEvent]) -> None:
        self._blocks.notes.now_s = time.monotonic()
        if not (self._said or len(self._blocks)):
            self._check_sizes({event.block_size for event in events if isinstance(event, BlockStored)})
        self._new_events.extend(self._blocks.apply(events))
        if len(self._blocks) > MOST_BLOCKS_TIMES * self._capacity:
            _log.error("attached.events: these leave more blocks than the server can have; all are forgotten")
            self._new_events.extend(self._blocks.apply([AllBlocksCleared()]))
        self._end.flush_soon()

    def _check_sizes(self, sizes: set[int]) -> None:
        if sizes and self._block_size not in sizes:
            self._said = True
            named = ", ".join(map(str, sorted(sizes)))[:64]
            what = "attached.events: blocks of %s tokens, and the server has %d: they are left out"
            _log.error(f"{what}, and nothing counts as cached", named, self._block_size)

    async def _look(self) -> None:
        """Look at the server again and again. Raise ConfigError, Unavailable if it does not serve."""
        while True:
            try:
                async with asyncio.timeout(self._config.attached.look_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()
            self._looks += 1
            load = await self._server.load()
            if load is None:  # it shows none: its answers to /health count as steps
                begun = sum(1 for key in self._streams if self._attempts.has_begun(key))
                load = ServerLoad(begun, len(self._attempts) - begun, 0.0, self._looks)
            if load != self._load:
                new = 0 if self._load is None else round(load.steps - self._load.steps)
                if new < 0:
                    raise Unavailable(f"attached.url: {self._config.attached.url} was started again")
                self._steps += new
                self._load = load
                self._report(changed=True)
            idle_s = self._config.health.idle_s
            if idle_s and not len(self._attempts) and time.monotonic() - self._active_s >= idle_s:
                begun_s = time.monotonic()
                await self.probe()
                self._channel.send(Probed(time.monotonic() - begun_s))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            late = self._attempts.expire(time.monotonic(), round((self._load or ServerLoad()).waiting))
            if late:
                self._close(late)

    # --- reports

    def _report(self, *, changed: bool = False) -> None:
        """Report everything that is new; `changed`: the load is."""
        outcome, events = self._attempts.take_outcome(), self._new_events
        if not (outcome.parts or events or changed):
            return
        self._new_events, steps, self._steps = [], self._steps, 0
        self._progress += max(1, steps)
        self._event_sequence += bool(events)
        found = self._load or ServerLoad()
        held = min(self._capacity, round(found.usage * self._capacity))
        load = EngineLoad(
            waiting=round(found.waiting),
            running=round(found.running),
            waiting_tokens=self._attempts.unbegun_tokens,
            held_blocks=held,
            cached_blocks=min(len(self._blocks), self._capacity - held),
        )
        stepped = outcome.to_stepped(
            events,
            progress=self._progress,
            event_sequence=self._event_sequence,
            digest=self._blocks.digest,
            load=load,
            steps=steps,
        )
        self._channel.send(stepped)
