"""Worker: the shell, which answers the network and passes on the results of the engine process.

    NATS  generate, cancel, resend, snapshot ──▶ Attempts ──▶ EngineSupervisor ──▶ engine process
    NATS  encode                             ──▶ EncodeServer ───────▲
    NATS  operate                            ──▶ Operator ───────────▲
    NATS  step frames, load reports ◀── FrameLog ◀── Stepped ◀──────────────────────────┘
    ZMQ   KV events                 ◀────────────────┘

    starting ──Ready──▶ serving ──stopping──▶ draining ──nothing runs, or drain_s──▶ ended
       ▲                   │
       └──── engine lost ──┘ running attempts end with an error, the model card is removed, the cache counts as empty

An operator may drain a worker meanwhile, or send it to sleep (worker/operations/operations.py). The model card is
published while the worker takes requests, the address book from the first Ready until the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

import msgspec

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import PARTS, Loading, Prefetch, Ready, Stepped, Submit
from services.worker.engine.standby import Standby
from services.worker.engine.supervisor import EngineSupervisor, StartEngine
from services.worker.engine_start import start_engine
from services.worker.kv_connector.link import LinkReports
from services.worker.kv_connector.metrics import KvbmMetrics
from services.worker.metrics import WorkerMetrics
from services.worker.model.card import CardAnnouncement, card_of, served_name
from services.worker.model.sent_files import SentFiles
from services.worker.operations.operator import Operator
from services.worker.operations.room import ask_for_room
from services.worker.reports.gpus import GpuTelemetry
from services.worker.reports.observations import EngineObservations
from services.worker.reports.rank_reports import RankReports
from services.worker.requests import attempt_notes
from services.worker.requests.attempts import Attempts, Name
from services.worker.requests.frame_log import FrameLog
from services.worker.requests.frame_sender import FrameSender
from services.worker.requests.image_orders import EncodeServer
from services.worker.requests.traced_attempts import TracedAttempts
from shared import subjects
from shared.bus.contract import Message
from shared.discovery.directory import DirectoryChange, InstanceDown, InstanceUp
from shared.errors import BusDown, PayloadTooLarge, ProtocolError, Unavailable
from shared.kv_events import encode_batch, in_chunks
from shared.messages.cards import EventSource
from shared.messages.control import Note
from shared.messages.frames import RESEND_REQUEST, RESENT, SHUTTING_DOWN, Part, Resent
from shared.messages.generate import CANCEL, GENERATE, GENERATE_REPLY, Refused
from shared.messages.kv_events import SNAPSHOT_CHUNK, SNAPSHOT_REQUEST, SnapshotChunk
from shared.messages.load import LOAD_REPORT, EncoderState, LoadReport, StandbyState
from shared.runtime.runtime import Runtime
from shared.tracing.spans import SpanIds
from shared.tracing.traceparent import carried

REPORT_INTERVAL_S = 0.25
"""Seconds between load reports."""
SNAPSHOT_LIMIT_S = 10.0
"""Seconds that the engine has for a snapshot."""
EXPLAIN_LIMIT_S = 0.8
"""Seconds that the engine has to say what it knows of a block: a user waits, and others answer too."""
SNAPSHOT_CHUNK_BYTES = 1 << 18
"""Bytes of msgpack in one chunk of a snapshot; JSON takes half as much again. They are far below any payload limit, and
encoded quickly."""
SMALL_KV_TOKENS = 512
"""Tokens of KV below which the worker warns: a chat of a few turns does not fit."""
SHARES_NOTHING = (
    "it shares no blocks, and decode workers get them from the kvbm only: its memory cannot be shared with other"
    " processes; the log says why"
)
"""The note of a worker that would share blocks by its settings."""
SHARING_FAILS = (
    "it shares no blocks, and decode workers get them from the kvbm only: it could not open its socket, and tries"
    " again; the log says why"
)
"""The note of a worker that will share blocks as soon as it can."""
FLUSH_LIMIT_S = 2.0
"""Seconds for sending the last frames."""
_MAKE_SUBMIT: Callable[..., Submit] = Submit
_SUBMITTED = attrgetter(*Submit.__struct_fields__[:-2])
"""Returns the fields that a Submit copies from its Generate: all but `number` and `trace`, its last ones.
`msgspec.convert` takes four times as long, and this runs for every request."""

_log = logging.getLogger(__name__)


def _make_attempts(config: WorkerConfig) -> Attempts:
    return Attempts(
        model=served_name(config),
        most_living=config.max_running + config.max_waiting,
        most_waiting_tokens=config.max_waiting_tokens,
    )


class Worker:
    """One worker process, its engine included. `start` starts engines: in simulations they run in this process. The
    caller ends `standby`."""

    _engine_loads = False
    """Whether an engine has said that it loads, and is neither ready nor lost."""

    def __init__(
        self, runtime: Runtime, config: WorkerConfig, start: StartEngine = start_engine, standby: Standby | None = None
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._model_name = served_name(config)
        self._metrics = WorkerMetrics(runtime.registry)
        self._attempts = _make_attempts(config)
        self._tracer = runtime.tracer
        self._traced = TracedAttempts(SpanIds(runtime.draw))
        self._sender = FrameSender(runtime.bus, runtime.namespace, FrameLog(runtime.instance), self._metrics)
        self.engine = EngineSupervisor(
            config,
            self._model_name,
            runtime.instance,
            start,
            loading=self._engine_loading,
            ready=self._engine_ready,
            stepped=self._engine_stepped,
            lost=self._engine_lost,
            busy=lambda: len(self._attempts) > 0,
            kvbm=lambda report: self._kvbm.take(report),
            observed=lambda report: self._observations.record(report),
            standby=standby,
        )
        self._observations = EngineObservations(runtime.registry)
        self._gpus = GpuTelemetry(runtime.registry)
        self._notes: list[str] = []
        """What an operator should know of the settings."""
        self._kvbm_metrics = KvbmMetrics(runtime.registry, configured=bool(config.kvbm.pool))
        self._kvbm = LinkReports(
            self._kvbm_metrics, namespace=runtime.namespace, link_changed=self._kvbm_link_changed, tracer=runtime.tracer
        )
        self._publisher = runtime.events.open_publisher()
        self._announcement = CardAnnouncement(runtime, self.event_source, config.role)
        self._progress_before = 0
        """Steps of all engines that were lost."""
        self._ranks = RankReports()
        """What the engine that lives has reported."""
        self._lost_because = ""
        """Why the last engine was lost, until another one is ready."""
        self._attempts_changed = asyncio.Event()
        self._operator = Operator(
            runtime,
            self._model_name,
            self.engine,
            self._attempts,
            self._attempts_changed,
            self._announcement,
            turns=config.turns,
            drain_s=config.drain_s,
            lora_bytes=config.lora_bytes if config.engine == "native" else 0,
            link=lambda: self._kvbm.shown_link,
            hand_back=self._hand_back,
            answer=self._answer,
        )
        self._image_orders = self._make_image_orders(config)
        self._gone: set[str] = set()
        """Frontends that have gone, and for which frames are still kept."""

    def _make_image_orders(self, config: WorkerConfig) -> EncodeServer:
        def facts() -> Ready | None:
            return None if self._announcement.card is None or self._attempts.draining else self.engine.facts

        encodes = config.role == "encode"
        return EncodeServer(self._runtime, self._model_name, self._answer, facts, self.engine.encode, encodes=encodes)

    async def run(self) -> bool:
        """Serve until `runtime.stopping`, then drain. With `checkpoint.directory`, serve until the worker sleeps; its
        engine has ended then, too. Return whether it sleeps. Raise ModelError if the model cannot be served."""
        receivers = {
            "generate": self._generate,
            "prefetch": self._prefetch,
            "cancel": self._cancel,
            "resend": self._resend,
            "snapshot": self._snapshot,
            "files": SentFiles(self._announcement.known_card, self._answer).receive,
            "operate": self._operator.receive,
            "encode": self._image_orders.receive,
        }
        subscriptions = [
            await self._runtime.bus.subscribe(self._subject(operation), receive)
            for operation, receive in receivers.items()
        ]
        self._runtime.directory.subscribe(self._directory_changed)
        self._runtime.health.unready("the engine is starting")
        self._runtime.health.also = self._health_fields
        self._runtime.notes.find_block = self._find_block
        try:
            return await self._serve_and_drain()
        finally:
            # All at once: each takes seconds where NATS is frozen.
            await asyncio.gather(*(subscription.unsubscribe() for subscription in subscriptions))
            self._publisher.close()

    @property
    def event_source(self) -> EventSource | None:
        """The source of the KV events, for discovery. None if the engine knows none, because its attached server
        publishes none: then routers predict what is cached from their own choices. Pictures have no KV."""
        if self._config.engine == "diffusers":
            return None
        if self._config.engine == "attached" and not self._config.attached.events:
            return None
        return msgspec.structs.replace(self._publisher.source, epoch=True, snapshot=True, digest=True)

    async def _serve_and_drain(self) -> bool:
        failed: BaseException | None = None
        paused = False
        async with asyncio.TaskGroup() as tasks:
            engine = asyncio.ensure_future(self.engine.run())  # awaited below: its ModelError is not a crash
            stopping = tasks.create_task(self._runtime.stopping.wait())
            asleep = tasks.create_task(self._operator.asleep.wait())
            ends = (engine, stopping, *([asleep] if self._config.checkpoint.directory else []))
            others = [
                tasks.create_task(loop)
                for loop in (
                    self._announcement.entries.run(),
                    self._announcement.report_refusal(),
                    self._sender.run(),
                    self._report_load(),
                    self._kvbm.run(),
                    self._operator.run(),
                    self._gpus.run(),
                    *self._room_asks(),
                )
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                paused = asleep in ends and asleep.done() and not (stopping.done() or engine.done())
                if not (engine.done() or paused):
                    await self._drain()
            finally:
                for task in (engine, stopping, asleep, *others):
                    task.cancel()
                (failed,) = await asyncio.gather(engine, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_LIMIT_S):
                await self._sender.flush()
        self._metrics.publish()
        self._kvbm_metrics.publish()
        await self._announcement.entries.close()
        if isinstance(failed, BaseException) and not isinstance(failed, asyncio.CancelledError):
            raise failed
        return paused

    def _room_asks(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what asks for room while an engine loads, if that takes the room of other models."""
        config = self._config
        if config.turns and config.device == "cuda":
            yield ask_for_room(self._runtime, config.turns, self._model_name, lambda: self._engine_loads)

    async def _drain(self) -> None:
        """Accept no new attempts; give running ones `drain_s` to end, then end them with an error."""
        self._attempts.draining = True
        self._runtime.health.unready("draining")
        self._operator.announce()
        if not await self._operator.idle_within(self._config.drain_s):
            _log.warning("%d attempts did not end in %g s", len(self._attempts), self._config.drain_s)
            self._fail_all(SHUTTING_DOWN)
        await self._image_orders.idle_within(self._config.drain_s)

    # --- reports of the engine

    def _engine_ready(self, facts: Ready) -> None:
        self._engine_loads = False
        self._lost_because = ""
        self._notes = []
        card = card_of(  # reads some MB, once, while nothing is served
            facts,
            model=self._config.model,
            model_name=self._model_name,
            instance=self._runtime.instance,
            device=self._config.shown_device,
            chat_template=self._config.chat_template,
            sampling=self._config.sampling,
            role=self._config.role,
            max_running=self._config.places,
        )
        self._metrics.engine_started(self.engine.start_s)
        self._gpus.watch(facts.gpus)
        if facts.pictures is not None:
            _log.info("serving %s: makes %s with %s", self._model_name, facts.pictures.kind, facts.pictures.pipeline)
        _log.info("serving %s: %d blocks of %d tokens", self._model_name, facts.capacity_blocks, facts.block_size)
        tokens = facts.capacity_blocks * facts.block_size
        if tokens < SMALL_KV_TOKENS and facts.pictures is None and self._config.role != "encode":
            setting = "capacity_blocks" if self._config.capacity_blocks else "capacity_bytes"
            note = f"the KV has room for {tokens} tokens only, prompt and answer together; raise worker.{setting}"
            _log.warning("%s", note)
            self._notes.append(note)
        if self._config.engine == "native" and self._config.shares_blocks and not facts.shares_blocks:
            self._notes.append(SHARES_NOTHING)
        self._operator.engine_ready(facts, card)

    def _health_fields(self) -> dict[str, list[str]]:
        missing = self._kvbm.missing if self._config.role != "aggregated" else ""
        fields = {
            "notes": [
                *filter(None, (*self._notes, self._operator.note)),
                *self._kvbm.notes,
                *[SHARING_FAILS] * self._kvbm_metrics.sharing_fails,
            ],
            "probes": self._observations.last_probes,
            "no_hand_over": [missing] if missing else [],
        }
        return {name: lines for name, lines in fields.items() if lines}

    def _kvbm_link_changed(self) -> None:
        if self._announcement.card is not None:
            self._operator.announce()

    def _engine_loading(self, loading: Loading) -> None:
        """Show the progress at /health; log it in steps of 10 %."""
        self._engine_loads = True
        reason = f"{loading.what}: {10 * int(10 * loading.share)} %"
        if self._lost_because:
            reason += f"; the engine before this one was lost: {self._lost_because}"
        if [reason] != self._runtime.health.reasons and not self._attempts.draining:
            _log.info("%s", reason)
            self._runtime.health.unready(reason)

    def _engine_stepped(self, step: Stepped) -> None:
        self._ranks.record_step(step)
        self._runtime.health.progress = self._progress_before + step.progress
        if step.event_batch:
            batch = encode_batch(self._runtime.wall(), step.event_batch, step.rank)
            self._publisher.publish(step.event_sequence, batch)
        if len(self._attempts):  # else they were ended here, and the engine does not know yet
            self._attempts.count_tokens(step.one_token_attempts)
            if self._traced:
                for begun in step.begun:
                    self._traced.begun(begun)
            if step.begun or step.notes:
                self._note_attempts(step)
            for part in step.boundary_parts:
                self._attempts.record_part(part)
            self._send(step.encoded_parts, step.boundary_parts)
        self._kvbm_metrics.count_step(step)
        self._metrics.count_step(step, self._ranks.load, self._total_blocks)

    def _note_attempts(self, step: Stepped) -> None:
        """Note what happened in the engine to attempts, for `headrace explain`."""
        texts = [(begun.number, attempt_notes.begun(begun)) for begun in step.begun]
        texts += [(note.number, note.text) for note in step.notes]
        for number, text in texts:
            if (name := self._attempts.name_of(number)) is not None:
                self._note(name, text)

    def _note(self, name: Name, text: str) -> None:
        self._runtime.notes.requests.add(name[0], text, asyncio.get_running_loop().time(), attempt=name[1])

    async def _find_block(self, key_end: bytes) -> tuple[list[str], list[Note]]:
        """Return what all ranks know of a block. Raise Unavailable."""
        ranks = 1 if self.engine.facts is None else self.engine.facts.ranks
        asked = (self.engine.explain_block(key_end, EXPLAIN_LIMIT_S, rank) for rank in range(ranks))
        found = await asyncio.gather(*asked)
        ranked = [(f"rank {rank}: " if ranks > 1 else "", one) for rank, one in enumerate(found)]
        places = [prefix + place for prefix, one in ranked for place in one.places]
        notes = [msgspec.structs.replace(note, text=prefix + note.text) for prefix, one in ranked for note in one.notes]
        return places, sorted(notes, key=lambda note: -note.age_s)

    def _engine_lost(self, reason: str) -> None:
        self._engine_loads = False
        self._progress_before += self._ranks.progress
        self._ranks = RankReports()
        self._operator.engine_lost(reason)
        self._kvbm.engine_lost()
        self._lost_because = reason
        self._runtime.health.unready(f"the engine was lost and is starting again: {reason}")
        self._metrics.engine_lost(counts=self.engine.lost_in_a_row > 0)
        self._kvbm_metrics.engine_lost()
        self._observations.engine_lost()
        self._fail_all(f"the engine was lost: {reason}")

    def _fail_all(self, reason: str) -> None:
        failed = self._attempts.fail_all(reason)
        frames = {frontend: PARTS.encode(parts) for frontend, parts in failed.items()}
        self._send(frames, [part for parts in failed.values() for part in parts])

    def _hand_back(self, names: list[Name]) -> None:
        """Give attempts back to their frontends, which continue them elsewhere; the engine's part counts as the end."""
        parts = self._attempts.hand_back(names, SHUTTING_DOWN)
        for part in (part for each in parts.values() for part in each):
            self.engine.cancel(part.request, part.attempt)
        self._send({frontend: PARTS.encode(each) for frontend, each in parts.items()}, ())

    def _send(self, frames: Mapping[str, bytes], boundary_parts: Iterable[Part]) -> None:
        """Send each frontend its encoded parts; `boundary_parts` are the first and the last ones of attempts."""
        for part in boundary_parts:
            self._metrics.count_part(part)
            if part.finish is not None and (text := attempt_notes.ended(part)):
                self._note((part.request, part.attempt), text)
            if self._tracer is not None and self._traced:
                self._tracer.record(self._traced.part(part, self._tracer.now_ns()))
            self._attempts_changed.set()
        for frontend, parts in frames.items():
            self._sender.append(frontend, parts)

    # --- messages of frontends and routers; the subscription counts those that raise ProtocolError

    async def _generate(self, message: Message) -> None:
        try:
            generate = GENERATE.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            refused = Refused("", 0, "bad_request", str(wrong))
            self._metrics.count_reply(refused, 0)
            await self._answer(message, GENERATE_REPLY.encode(refused, message.headers))
            return
        facts = None if self._announcement.card is None else self.engine.facts
        reply, number = self._attempts.admit(generate, facts, asyncio.get_running_loop().time())
        parent = None if self._tracer is None or not (number and message.headers) else carried(message.headers)
        trace = "" if parent is None else parent.header
        if number and not self.engine.submit(_MAKE_SUBMIT(*_SUBMITTED(generate), number, trace)):
            self._attempts.forget((generate.request, generate.attempt))
            reply = Refused(generate.request, generate.attempt, "overloaded", "the engine does not read its commands")
        elif self._tracer is not None and parent is not None:
            self._traced.accepted((generate.request, generate.attempt), number, parent, self._tracer.now_ns())
        if isinstance(reply, Refused):
            self._note((generate.request, generate.attempt), attempt_notes.refused(reply))
        self._metrics.count_reply(reply, generate.prompt_tokens if number else 0)
        await self._answer(message, GENERATE_REPLY.encode(reply, message.headers))

    async def _prefetch(self, message: Message) -> None:
        """Pass on that an attempt is expected here, whose prompt another worker computes. It is advice, without an
        answer."""
        expected = GENERATE.decode(message.payload, message.headers)
        facts = None if self._announcement.card is None else self.engine.facts
        if self._config.role == "decode" and self._attempts.expects(expected, facts):
            self.engine.submit(Prefetch(_MAKE_SUBMIT(*_SUBMITTED(expected), 0), expected.prefill_by))

    async def _cancel(self, message: Message) -> None:
        cancel = CANCEL.decode(message.payload, message.headers)
        self._cancel_attempt(cancel.request, cancel.attempt)

    def _cancel_attempt(self, request: str, attempt: int) -> None:
        if self._attempts.cancel((request, attempt)) or self._config.role == "decode":  # the attempt may be expected
            self.engine.cancel(request, attempt)

    async def _resend(self, message: Message) -> None:
        asked = RESEND_REQUEST.decode(message.payload, message.headers)
        epoch, first, after = self._sender.log.rewind(asked.frontend, asked.first)
        resent = Resent(epoch, first, after, self._attempts.streams_of(asked.frontend))
        await self._answer(message, RESENT.encode(resent, message.headers))
        self._sender.wake()

    async def _snapshot(self, message: Message) -> None:
        """Send a snapshot in chunks, or nothing if there is none: the router's time-out and the missing card say
        so."""
        asked = SNAPSHOT_REQUEST.decode(message.payload, message.headers)
        epoch = self.engine.epoch
        try:
            taken = await self.engine.snapshot(SNAPSHOT_LIMIT_S, asked.rank)
        except Unavailable as wrong:
            _log.warning("%s: %s", message.subject, wrong)
            return
        chunks = in_chunks(taken.blocks, SNAPSHOT_CHUNK_BYTES)
        for number, blocks in enumerate(chunks, 1):
            last = number == len(chunks)
            chunk = SnapshotChunk(epoch=epoch, sequence=taken.event_sequence, blocks=blocks, last=last)
            if not await self._answer(message, SNAPSHOT_CHUNK.encode(chunk, message.headers), last=last):
                return  # a snapshot with a hole must not get an end

    async def _answer(self, message: Message, payload: bytes, *, last: bool = False) -> bool:
        """Send an answer in the encoding of the request. Return whether it was sent: one that was not is dropped, since
        the client will ask again, or has gone. Raise ProtocolError if the request names no subject to answer to."""
        if not message.reply:
            raise ProtocolError("no reply subject")
        try:
            await self._runtime.bus.publish(message.reply, payload, headers=message.reply_headers(last=last))
        except (BusDown, PayloadTooLarge) as wrong:
            _log.warning("%s: no answer: %s", message.subject, wrong)
            return False
        return True

    def _directory_changed(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceDown) and change.instance.service == "frontend":
            frontend = change.instance.instance
            for stream in self._attempts.streams_of(frontend):
                self._cancel_attempt(stream.request, stream.attempt)
            self._gone.add(frontend)
        elif isinstance(change, InstanceUp):
            self._gone.discard(change.instance.instance)

    def _forget_the_gone(self) -> None:
        """Drop the frames of frontends that have gone, whose attempts have ended, and that were sent every frame: only
        discovery says that they have gone."""
        log = self._sender.log
        ended = {each for each in self._gone if not self._attempts.streams_of(each) and log.next_unsent(each) is None}
        for frontend in ended:
            log.forget(frontend)
        self._gone -= ended

    # --- load reports

    async def _report_load(self) -> None:
        while True:
            try:
                await self._runtime.bus.publish(self._subject("load"), LOAD_REPORT.encode(self._load_report()))
            except BusDown:
                pass  # the next report repeats everything
            except PayloadTooLarge as wrong:
                _log.error("no load report: %s; lower max_waiting, or raise the payload limit of NATS", wrong)
            self._metrics.publish(self._attempts.oldest_unbegun_s(asyncio.get_running_loop().time()))
            self._kvbm_metrics.publish()
            self._metrics.show_standby(ready=self._standby_state == "ready", take_overs=self.engine.take_overs)
            if self.engine.facts is not None:
                self._observations.show_ranks(self._ranks.loads, self.engine.facts.capacity_blocks)
            self._forget_the_gone()
            self._sender.wake()
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _load_report(self) -> LoadReport:
        load = self._ranks.load
        return LoadReport(
            instance=self._runtime.instance,
            epoch=self._announcement.entries.epoch,
            progress=self._runtime.health.progress,
            waiting=load.waiting,
            running=load.running,
            waiting_tokens=load.waiting_tokens,
            total_blocks=self._total_blocks,
            held_blocks=load.held_blocks,
            cached_blocks=load.cached_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            step_s=load.step_s,
            kv=self._ranks.kv_states(self.engine.epoch, 1 if self.engine.facts is None else self.engine.facts.ranks),
            frames=self._sender.log.last_sequences,
            attempts=self._attempts.names,
            ranks=self._ranks.rank_loads,
            output_tokens=self._metrics.output_tokens,
            standby=self._standby_state,
            standby_bytes=self.engine.standby.own_bytes if self.engine.standby is not None else 0,
            encoder=self._encoder_state,
            losses=self.engine.losses,
            tensor_ranks=self._config.tensor_parallel,
        )

    @property
    def _encoder_state(self) -> EncoderState | None:
        state = self._ranks.encoder
        if self._config.role != "encode":
            return state
        return msgspec.structs.replace(state or EncoderState(0, 0, 0, 0), waiting=self.engine.encoding)

    @property
    def _standby_state(self) -> StandbyState:
        standby = self.engine.standby
        if standby is None or not self._config.standby:
            return ""
        if standby.ready:
            return "ready"
        return "starting" if standby.pid else "none"

    @property
    def _total_blocks(self) -> int:
        facts = self.engine.facts
        return 0 if facts is None else facts.capacity_blocks * facts.ranks

    def _subject(self, operation: str) -> str:
        return subjects.worker(self._runtime.namespace, self._runtime.instance, operation)
