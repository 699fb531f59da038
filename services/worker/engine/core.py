"""EngineCore: one engine's life without the channel, the clock and the arithmetic. Pure.

    opening ─▶ ┌─▶ handle a command … ─▶ begin ── works ──▶ (a runner computes them) ──▶ finish ─┐
               └──────────────◀───────────┘ None: nothing to do                  ◀────────────────┘

    while a step is computed: a new attempt, what the kvbm says ─▶ handle; exchange ─▶ messages for the kvbm
    outcome of a step ─▶ reported at once, or pending ─▶ reported with later ones, or before a step that may take longer
    images ─▶ take_lookups ─▶ (looked up in the store) ─▶ looked_up; for others: due_image ─▶ (encoded) ─▶ encoded
    Operate ─▶ refused, or due at once (sleep: when no copy is under way) ──▶ (the runner does it) ──▶ operated

Between `begin` and the computation of the step, `step_connector` lets the KV connector ask the kvbm.

The core numbers the steps and the KV event batches. Batch 0 of every engine, its opening, says that its cache is empty.
The engine process drives the core with a runner and a real clock, simulated engines drive it with a model of time.

Parts are encoded here once, and the shell passes their bytes on: it knows only the first and the last part of each
attempt. Reports of steps that take less than 2 ms are joined, because each report wakes four processes, which costs
some 0.2 ms however few tokens it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeGuard, assert_never

from services.worker.config import EngineConfig
from services.worker.contracts.messages import (
    BlockExplained,
    CancelAttempt,
    EncodeImage,
    EngineCommand,
    EngineOperation,
    EngineOrder,
    ExplainBlock,
    ImageEncoded,
    KvbmLink,
    Operate,
    Operated,
    Prefetch,
    Probed,
    ProbeDevice,
    Ready,
    Snapshot,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.contracts.mover import Mover
from services.worker.contracts.runner import Drawn, Work
from services.worker.contracts.sharing import Sharer, ShareReader
from services.worker.kv_connector.connector import Attachment, ExchangeTerms, KVConnector
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmNews, KvbmReply, KvbmUp
from services.worker.kv_connector.stores import COLLECT_S
from services.worker.limits import DECODE_STEP_S, LONE_STEP_S, PREFILL_STEP_S, STEP_S, SchedulerLimits
from services.worker.scheduler.encode_orders import EncodeOrders
from services.worker.scheduler.encoder_cache import EncoderCache
from services.worker.scheduler.kv_cache_manager import KVCacheManager
from services.worker.scheduler.outcome import Outcome
from services.worker.scheduler.scheduler import Scheduler
from services.worker.scheduler.step_images import StepImages
from shared.kv_events import to_kv_events, to_snapshot
from shared.messages.kv_events import AllBlocksCleared, KvEvent
from shared.messages.kvbm import StoreLayout

REPORT_INTERVAL_S = 0.002
"""Seconds within which steps share a report, and so a frame: each frame costs the shell, NATS and the frontend some
0.2 ms together, whatever is in it. A step of a large model takes longer than this."""
MOST_EMBEDDED_BYTES = 256 << 10
"""Most bytes of embeddings in one report, so that no frame nears the least payload limit of a NATS server, 1 MB. One
embedding is at most a fraction of it."""
MOST_LOADED = 128
"""Most loaded blocks that are taken up at once while sequences decode, rounded up to batches. They take 0.6 ms, with
their KV events; a long prompt's 512 at once would be felt between two tokens."""
MOST_PENDING = 512
"""Number of pending parts at which they are reported."""


def store_layout(config: EngineConfig, facts: Ready) -> StoreLayout:
    """Return what must be the same in two engines that exchange blocks."""
    return StoreLayout(model=config.model_name, weights=facts.weights, kv=facts.kv_layout)


def comes_meanwhile(command: EngineCommand, *, after_others: bool) -> TypeGuard[EngineOrder]:
    """Whether a command is handled while a step is computed; the others are handled after it. `after_others`: some came
    before it that are not handled yet, and commands of attempts keep their order."""
    return isinstance(command, (Submit, Prefetch)) and not after_others


class EngineCore:
    """Between `begin` and `finish` a step is under way; commands come outside of it, but for new attempts and what the
    kvbm says."""

    def __init__(
        self,
        scheduler: Scheduler,
        block_size: int,
        connector: KVConnector | None = None,
        operations: Sequence[EngineOperation] = (),
    ) -> None:
        self._scheduler = scheduler
        self._operations = operations
        self._connector = connector
        self._orders = EncodeOrders(scheduler.images)
        self._block_size = block_size
        self._progress = 0
        self._event_sequence = -1
        self._reported_shared = 0
        """The shared blocks of the last report."""
        self.expected_s = 0.0
        """Seconds that the step under way will probably take. 0 if not known."""
        self._begun_s = 0.0
        self._reported_s = float("-inf")
        self._pending = Outcome()
        self._digest = scheduler.kv_cache.digest
        """Digest of the cache after the last step. Changes since then are reported with the next step."""
        self._pending_steps = 0
        self._pending_tokens = 0
        self._pending_s = 0.0
        self._operation: Operate | None = None
        """The operation that is neither refused nor done yet."""
        self._asleep = False
        self._probe_asked_s = 0.0
        """When a probe was asked for."""
        self._probed: Probed | None = None
        """Its answer, if it is not reported yet."""

    @staticmethod
    def of(
        config: EngineConfig,
        facts: Ready,
        mover: Mover | None = None,
        attachment: Attachment | None = None,
        *,
        share_reader: ShareReader | None = None,
        sharer: Callable[[KVCacheManager], Sharer] | None = None,
        encoder_cache: EncoderCache[Any] | None = None,
        looks_up: bool = False,
    ) -> EngineCore:
        """Return a core with the bounds that the settings give. With mover and attachment it exchanges blocks with a
        kvbm; with `share_reader`, or with what `sharer` makes for its blocks, also with other engines. `encoder_cache`
        is that of a runner whose model takes images; `looks_up` says whether it has a store for embeddings."""
        settings = config.worker
        step_s = settings.step_s or STEP_S[settings.device]
        limits = SchedulerLimits(
            model=config.model_name,
            context_length=facts.context_length,
            eos_token_ids=frozenset(facts.eos_token_ids),
            block_size=facts.block_size,
            capacity_blocks=facts.capacity_blocks,
            max_running=settings.max_running,
            step_s=min(step_s, PREFILL_STEP_S) if settings.role == "prefill" else step_s,
            lone_step_s=0.0 if settings.step_s or settings.role else LONE_STEP_S,
            short_step_s=DECODE_STEP_S if settings.role == "decode" else inf,
            max_step_tokens=settings.step_tokens,
            max_waiting=settings.max_running + settings.max_waiting,  # none is running yet when a burst arrives
            max_waiting_tokens=settings.max_waiting_tokens,
            overtaking=settings.overtaking,
            offload=settings.kvbm.offload,
            wait_s=settings.kvbm.wait_s,
        )
        scheduler = Scheduler(limits)
        scheduler.images = StepImages(encoder_cache, facts.image_cost, looks_up=looks_up)
        if mover is None or attachment is None:
            return EngineCore(scheduler, facts.block_size, operations=facts.operations)
        own_sharer = None if sharer is None else sharer(scheduler.kv_cache)
        if own_sharer is not None:
            scheduler.kv_cache.is_shared = own_sharer.is_shared
        terms = ExchangeTerms(
            config.instance,
            store_layout(config, facts),
            settings.kvbm.timeout_s,
            most_blocks=min(settings.kvbm.blocks_in_flight, max(1, facts.capacity_blocks // 4)),
            checksums=settings.kvbm.checksums,
            collect_s=0.0 if settings.role == "prefill" else COLLECT_S,
        )
        connector = KVConnector(scheduler.kv_cache, mover, attachment, terms, share_reader, own_sharer)
        return EngineCore(scheduler, facts.block_size, connector, facts.operations)

    def opening(self) -> Stepped:
        """Return the first report; called once."""
        assert self._event_sequence == -1
        return self._stepped(Outcome(), [AllBlocksCleared()])

    @property
    def busy(self) -> bool:
        """Whether there is something to do now: a step, or an image for other workers."""
        return self._scheduler.busy or (self._orders.busy and not self._asleep)

    def handle(
        self, command: EngineOrder | KvbmNews, now_s: float
    ) -> Sequence[Stepped | Snapshot | BlockExplained | Operated | ImageEncoded]:
        """Handle a command, or what the kvbm says; return the answers. A snapshot comes after everything that it
        contains was reported. An operation that is not refused is `due_operation` later, and a probe is answered by
        `take_probed`."""
        match command:
            case Submit():
                self._scheduler.submit(command, now_s)
            case Prefetch(expected, sharer):
                self._scheduler.prefetch(expected, sharer, now_s)
            case CancelAttempt(request, attempt):
                self._scheduler.cancel(request, attempt)
            case TakeEngineSnapshot(ticket):
                reports = self._report_all()
                blocks = to_snapshot(self._scheduler.kv_cache.snapshot())
                return [*reports, Snapshot(ticket=ticket, event_sequence=self._event_sequence, blocks=blocks)]
            case ExplainBlock(ticket, name):
                cache = self._scheduler.kv_cache
                return [BlockExplained(ticket, cache.places(name), cache.notes.find(name, now_s))]
            case Operate():
                refused = self._refusal(command)
                if refused:
                    return [Operated(command.ticket, refused)]
                self._operation = command
                if command.operation == "sleep":
                    self._scheduler.closed = "the engine is asleep"
                    if self._connector is not None:
                        self._connector.pause(now_s)
            case EncodeImage():
                return self._take_order(command, now_s)
            case ProbeDevice(prompt):
                self._probe_asked_s = now_s
                if self._asleep:
                    self._probed = Probed(0.0)
                else:
                    self._scheduler.ask_probe(prompt)
            case KvbmUp() | KvbmDown() | KvbmReply():
                if self._connector is not None:
                    self._connector.handle(command, now_s)
            case _:
                assert_never(command)
        return []

    def _take_order(self, order: EncodeImage, now_s: float) -> list[ImageEncoded]:
        """Take an image to encode for other workers. Return the answer if there is one already."""
        if self._asleep:
            return [ImageEncoded(order.ticket, "the engine is asleep")]
        self._orders.add(order, now_s)
        return []

    def _refusal(self, command: Operate) -> str:
        """Return why an operation cannot be done now. Empty if the runner can try it."""
        operation, name, scheduler = command.operation, command.name, self._scheduler
        if operation not in self._operations:
            return f"{operation}: this engine cannot do it"
        if self._operation is not None:
            return f"{operation}: {self._operation.operation} is not done yet"
        if operation == "wake":
            return "" if self._asleep else "wake: the engine is awake"
        if self._asleep:
            return f"{operation}: the engine is asleep"
        if operation == "sleep" and scheduler.living:
            return f"sleep: {scheduler.living} attempts are running"
        if operation == "load_lora" and name in scheduler.loras:
            return f"load_lora: {name} is loaded already"
        if operation == "unload_lora" and name not in scheduler.loras:
            return f"unload_lora: no LoRA {name} is loaded"
        if operation == "unload_lora" and scheduler.uses_lora(name):
            return f"unload_lora: attempts with {name} are running"
        return ""

    def due_operation(self) -> Operate | None:
        """Return the operation that the runner is to do now; `operated` gets the result. None is due before a probe has
        ended that was asked for, and sleep not while a copy reads or writes the engine's blocks."""
        operation = self._operation
        if self._scheduler.probe.asked:
            return None
        if operation is not None and operation.operation == "sleep" and self._connector is not None:
            return operation if self._connector.let_go() else None
        return operation

    def operated(self, failed: str, now_s: float) -> list[Stepped | Operated]:
        """Take note of the operation that was due: it was done, unless `failed` says why not. Return what to report."""
        command, self._operation = self._operation, None
        assert command is not None
        reports: list[Stepped] = []
        match command.operation:
            case "sleep" | "wake":
                self._asleep = (command.operation == "sleep") != bool(failed)
                if self._asleep and not failed:
                    reports = self._clear()
                elif not self._asleep:
                    self._scheduler.closed = ""
                    if self._connector is not None:
                        self._connector.resume(now_s)
            case "clear" if not failed:
                reports = self._clear()
            case "load_lora" if not failed:
                self._scheduler.loras.add(command.name)
            case "unload_lora" if not failed:
                self._scheduler.loras.remove(command.name)
            case _:
                pass
        return [*reports, Operated(command.ticket, failed)]

    def _clear(self) -> list[Stepped]:
        """Forget all cached blocks. Return what to report."""
        reports = self._report_all()
        self._scheduler.clear()
        self._digest = self._scheduler.kv_cache.digest
        return [*reports, self._stepped(Outcome(), [AllBlocksCleared()])]

    def begin(self, now_s: float) -> tuple[list[Stepped], list[Work] | None]:
        """Begin a step. Return what to report first, and what to compute now: empty if there is only something to
        report, None if there is nothing to do."""
        if self._connector is not None:
            self._connector.poll_copies(now_s, MOST_LOADED if self._scheduler.decodes else inf)
        if not self._scheduler.busy:
            due_s = self._scheduler.wait_until_s
            if due_s is None or now_s < due_s:
                return self._report_idle(), None
        works = self._scheduler.schedule(now_s)
        self._begun_s = now_s
        tokens = self._scheduler.step_tokens
        self.expected_s = self._scheduler.budget.expected_s(tokens, len(works))
        decodes = tokens == len(works)
        return ([] if decodes else self._report_pending()), works

    def take_lookups(self) -> list[bytes]:
        """Return the keys of images to look up in the store; `looked_up` gets the answers."""
        return self._scheduler.images.take_lookups()

    def looked_up(self, key: bytes, *, found: bool) -> None:
        """An image was looked up; if it was found, its embeddings are in the encoder cache now."""
        self._scheduler.images.looked_up(key)
        self._orders.looked_up(key, found=found)

    def due_image(self, now_s: float) -> EncodeImage | None:
        """Return the image that the runner is to encode for other workers now, between two steps; `encoded` follows.
        None if there is none, or the engine is asleep."""
        return None if self._asleep else self._orders.due(now_s)

    def encoded(self, order: EncodeImage) -> None:
        """Take note that the image which was due is encoded."""
        self._orders.encoded(order)

    def take_encoded(self) -> list[Stepped | ImageEncoded]:
        """Return what to report of orders that have ended: that the engine goes on, and the answers."""
        ended = self._orders.take_ended()
        if not ended:
            return []
        self._progress += 1
        return [self._stepped(Outcome(), []), *ended]

    def step_connector(self, now_s: float) -> list[KvbmAsk | KvbmLink]:
        """Return the messages for the kvbm, so that it works while the step is computed. Called once after each
        `begin`; the engine may be `busy` afterwards though `begin` gave nothing to do."""
        return [] if self._connector is None else self._connector.step(now_s)

    @property
    def exchanges(self) -> bool:
        """Whether blocks are exchanged, with a kvbm or other engines."""
        return self._connector is not None

    def exchange(self, now_s: float) -> list[KvbmAsk | KvbmLink]:
        """Exchange blocks while a step is computed; return the messages for the kvbm."""
        if self._connector is not None:
            self._connector.poll_copies(now_s, MOST_LOADED)
        return self.step_connector(now_s)

    @property
    def exchange_due_s(self) -> float | None:
        """When `exchange` has something to do without an event. None means never."""
        return None if self._connector is None else self._connector.wait_until_s

    @property
    def wait_until_s(self) -> float | None:
        """When there is something to do without a command, where the engine is not `busy`. None means never."""
        due_s = [self._scheduler.wait_until_s, self.exchange_due_s]
        return min([one_s for one_s in due_s if one_s is not None], default=None)

    def close(self) -> None:
        """Begin no further copy, and leave kvbm's pool alone when this returns."""
        if self._connector is not None:
            self._connector.close()

    def take_probed(self) -> Probed | None:
        """Return the answer to a probe that was asked for, once. None if there is none now."""
        probed, self._probed = self._probed, None
        return probed

    def finish(self, drawn: Sequence[Drawn | None], elapsed_s: float) -> list[Stepped]:
        """End the step: it was computed, with one entry of `drawn` per work. Return what to report."""
        asked = bool(self._scheduler.probe.asked)
        outcome = self._scheduler.advance(drawn, elapsed_s)
        self._digest = self._scheduler.kv_cache.digest
        if self._pending_steps:
            self._pending.extend(outcome)
        else:
            self._pending = outcome
        self._progress += 1
        self._pending_steps += 1
        self._pending_tokens += self._scheduler.step_tokens
        self._pending_s += elapsed_s
        now_s = self._begun_s + elapsed_s
        if asked and not self._scheduler.probe.asked:
            self._probed = Probed(now_s - self._probe_asked_s)
        if (
            now_s - self._reported_s < REPORT_INTERVAL_S
            and not outcome.boundary_parts
            and self._scheduler.busy
            and len(self._pending.one_token_attempts) < MOST_PENDING
        ):
            return []
        self._reported_s = now_s
        return self._report_pending()

    @property
    def steady_steps(self) -> int:
        """How many steps, the one under way included, will do nothing but draw one token for each running sequence and
        report it. 0 if that is not known. It holds while they are no shorter than REPORT_INTERVAL_S, no command comes,
        and the next step begins before `wait_until_s`."""
        if self._connector is not None or self._pending_steps or self._orders.busy or self._operation is not None:
            return 0
        return self._scheduler.steady_steps

    def pass_steps(self, drawn: Sequence[Sequence[int]], elapsed_s: Sequence[float], now_s: float) -> None:
        """Do what `finish` and `begin` would do for the step under way and those that follow, at most `steady_steps`,
        in a fraction of the time, without reports. `drawn` are the tokens of each work, `now_s` is when the last of
        them ended."""
        self._progress += len(elapsed_s)
        self._begun_s = now_s
        self._scheduler.pass_steps(drawn, elapsed_s, now_s)

    def _report_all(self) -> list[Stepped]:
        """Report everything, also attempts that have ended since the last step, and blocks evicted since for loads."""
        outcome = self._scheduler.drain()
        if outcome.parts or outcome.events:
            self._pending.extend(outcome)
            self._pending_steps += 1
            self._progress += 1
            self._digest = self._scheduler.kv_cache.digest
        return self._report_pending()

    def _report_pending(self) -> list[Stepped]:
        """Report all pending outcomes, in one report, or in several where it would be too large."""
        if not self._pending_steps:
            return []
        pending, self._pending = self._pending, Outcome()
        events = to_kv_events(pending.events, self._block_size) if pending.events else []
        first, *others = pending.split(MOST_EMBEDDED_BYTES)
        stepped = self._stepped(first, events, self._pending_steps, self._pending_tokens, self._pending_s)
        self._pending_steps = self._pending_tokens = 0
        self._pending_s = 0.0
        return [stepped, *(self._stepped(other, []) for other in others)]

    def _report_idle(self) -> list[Stepped]:
        """Report all pending outcomes, new totals of the connector, and blocks that were shared or came back, since
        there is no step to do."""
        if self._connector is None or self._pending_steps:
            return self._report_pending()
        news = self._connector.stats_changed or self._scheduler.kv_cache.shared_blocks != self._reported_shared
        return [self._stepped(Outcome(), [])] if news else []

    def _stepped(
        self, outcome: Outcome, events: list[KvEvent], steps: int = 0, tokens: int = 0, elapsed_s: float = 0.0
    ) -> Stepped:
        if events:
            self._event_sequence += 1
        load = self._scheduler.load()
        self._reported_shared = load.shared_blocks
        return outcome.to_stepped(
            events,
            progress=self._progress,
            event_sequence=self._event_sequence,
            digest=self._digest,
            load=load,
            steps=steps,
            tokens=tokens,
            elapsed_s=elapsed_s,
            exchanged=None if self._connector is None else self._connector.new_stats(),
        )

    def validate(self) -> None:
        """Raise AssertionError if the engine contradicts itself. O(everything); call it between steps."""
        self._scheduler.validate()
        assert self._progress >= self._pending_steps >= 0
        assert not self._pending_steps or self._scheduler.busy, "pending outcomes would never be reported"
        assert self._pending_steps or not self._pending.parts
        assert self._event_sequence >= -1
        self._orders.validate()
        if self._connector is not None:
            self._connector.validate()
