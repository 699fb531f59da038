"""VllmEngine: serves the channel with vLLM's AsyncLLM, on one event loop.

    commands of the shell ──▶ EngineRanks ──▶ AsyncLLM.add_request ──▶ vLLM's core of each rank, a process of its own
    Stepped  ◀── one report a turn of the loop and rank ◀── outputs, all that one step of vLLM brought
             ◀── EngineBlocks ◀── EventReader ◀── the KV events of a rank

vLLM hands each output to a collector of its request, for one task a request to wait at. Here the collector's `put` is
this object's own, so that a step costs one wake-up and not one for each request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.exceptions import GenerationError, VLLMClientError
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.worker.config import EngineConfig
from services.worker.contracts.messages import (
    CancelAttempt,
    EncodeImage,
    EngineOrder,
    ExplainBlock,
    Failed,
    ImageEncoded,
    KvbmLink,
    Operate,
    Operated,
    OwnMetrics,
    Prefetch,
    ProbeDevice,
    Snapshot,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.engine.async_end import AsyncEnd
from services.worker.engine.channel import ChannelClosed, EngineEnd
from services.worker.engine.one_line import one_line
from services.worker.vllm.events import EventReader
from services.worker.vllm.images import ImagePrompts
from services.worker.vllm.kv_transfer import connector_stats, hand_over_params, image_counts
from services.worker.vllm.loras import EngineLoras
from services.worker.vllm.ordered_images import OrderedImages
from services.worker.vllm.outputs import logprob_entries, pack_embedding
from services.worker.vllm.own_metrics import MOST_BYTES
from services.worker.vllm.prefetches import Prefetches
from services.worker.vllm.probe import Prober
from services.worker.vllm.prompt_logprobs import prompt_pieces
from services.worker.vllm.ranks import MOST_EMBEDDED_BYTES, EngineRank, EngineRanks
from services.worker.vllm.sampling import first_token, to_pooling_params, to_sampling_params
from services.worker.vllm.weights import LoadedWeights
from shared.errors import Unavailable
from shared.hashing import token_array
from shared.messages.frames import UNFOLLOWABLE
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared, KvEvent
from shared.model_files.config_json import token_ids
from shared.model_files.special_tokens import read_tokenizer_ends

TICK_S = 0.1
"""Seconds between two looks at deadlines, the engine's health, and its idleness."""
CLEAR_LIMIT_S = 30.0
"""Seconds within which vLLM reports that its cache was cleared."""
CLEAR_TRIES, CLEAR_RETRY_S = 20, 0.05
"""How often, and after how many seconds, vLLM is asked again to clear its cache while copies hold blocks of it."""
METRICS_S = 5.0
"""Seconds between two reports of vLLM's own metrics."""

_log = logging.getLogger(__name__)


class VllmEngine:
    """One AsyncLLM, and what its attempts and its cache are."""

    def __init__(
        self,
        config: EngineConfig,
        llm: AsyncLLM,
        channel: EngineEnd,
        connection: socket.socket,
        readers: Sequence[EventReader],
        metrics: Callable[[], str],
        images: ImagePrompts | None,
        weights: LoadedWeights,
    ) -> None:
        """`readers` read the events of each rank; `metrics` returns vLLM's own metrics as text; `images` is None if the
        model takes none."""
        self._config = config.worker
        self._llm = llm
        self._channel = channel
        self._end = AsyncEnd(channel, connection, handle=self._handle, report=self._report)
        self._readers = readers
        vllm_config: VllmConfig = llm.vllm_config
        self._pooling = vllm_config.model_config.runner_type == "pooling"
        self._ends = eos_token_ids(vllm_config)
        self._context_length = vllm_config.model_config.max_model_len
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        self._ranks = EngineRanks(
            len(readers),
            block_size=vllm_config.cache_config.block_size,
            capacity_blocks=vllm_config.cache_config.num_gpu_blocks // len(readers),  # of all ranks together
            now_s=time.monotonic(),
        )
        self._cleared = [asyncio.Event() for _ in readers]
        """Set for each rank when its cache was cleared."""
        for rank, reader, cleared in zip(self._ranks.all, readers, self._cleared, strict=True):
            reader.apply = partial(self._apply_events, rank, cleared)
        self._loras = EngineLoras(llm)
        self._links: dict[int, KvbmLink] = {}
        """Rank → its link to the kvbm."""
        self._shown_link = KvbmLink(kvbm="")
        self._sleep_level = 0
        """Level at which the engine sleeps. 0 if it is awake."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefetches = Prefetches(llm)
        self._images = images
        self._weights = weights
        encodes = images if self._config.role == "encode" else None
        self._ordered = None if encodes is None else OrderedImages(llm, encodes, Path(self._config.kvbm.pool))
        """None without the role encode."""
        health = self._config.health
        self._prober = Prober(llm, health, pooling=self._pooling, report=channel.send, encodes=encodes)
        self._metrics = metrics
        self._sent_metrics = ""
        self._metrics_due_s = 0.0

    async def run(self) -> Failed | None:
        """Serve until Shutdown, which gives None, or until the engine fails. Raise ChannelClosed."""
        ended = self._end.ended
        reading = [asyncio.create_task(reader.run()) for reader in self._readers]
        ticking = asyncio.create_task(self._tick())
        try:
            with self._end.receiving():
                ends: list[asyncio.Future[Any]] = [ended, ticking, *reading]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            broken = [task.exception() for task in reading if task.done()]
            if broken and not ended.done():
                return Failed(reason=one_line(broken[0]))
            if ticking.done() and not ended.done():
                ticking.result()
            return ended.result()
        finally:
            if self._ordered is not None:
                self._ordered.close()
            for task in (ticking, *reading, *self._tasks):
                task.cancel()
            await asyncio.gather(ticking, *reading, *self._tasks, return_exceptions=True)

    async def probe(self, limit_s: float) -> None:
        """Have all ranks compute one prefill and one decode. Raise TimeoutError, and what vLLM raises."""
        await self._prober.probe(limit_s, self._ranks.all)

    # --- commands

    def _handle(self, command: EngineOrder) -> None:
        match command:
            case Submit():
                self._submit(command)
            case CancelAttempt(request, attempt):
                self._abort(self._prefetches.pop((request, attempt)))
                found = self._ranks.find(request, attempt)
                if found is not None:
                    rank, key = found
                    rank.attempts.end(key, "cancelled")
                    self._abort([key])
            case TakeEngineSnapshot(ticket, number):
                self._report()
                blocks = self._ranks.all[number].blocks.snapshot()
                self._channel.send(Snapshot(ticket, self._ranks.event_sequence, blocks))
            case ExplainBlock(ticket, name, number):
                self._channel.send(self._ranks.all[number].blocks.explain(name, ticket, time.monotonic()))
            case Operate():
                self._start(self._operate(command))
            case Prefetch(expected):
                self._expect(expected)
            case EncodeImage():
                self._start(self._encode(command))
            case ProbeDevice():
                pass  # `_tick` probes each rank
            case _:
                assert_never(command)

    async def _encode(self, order: EncodeImage) -> None:
        assert self._ordered is not None, "only a worker with the role encode takes orders"
        failed = await self._ordered.encode(order)
        self._report()
        self._channel.send(ImageEncoded(order.ticket, failed))

    def _expect(self, expected: Submit) -> None:
        """Load the blocks of a prompt that another worker computes. It is advice: whatever fails, the attempt loads or
        computes them."""
        able = not self._sleep_level and (not expected.lora or expected.lora in self._loras)
        if able and (key := self._prefetches.accept(expected, time.monotonic())):
            self._start(self._begin_prefetch(key, expected))

    async def _begin_prefetch(self, key: str, expected: Submit) -> None:
        try:
            prompt = await self._prompt_of(expected)
            await self._prefetches.begin(key, expected, prompt, self._loras.find(expected.lora))
        except EngineDeadError:
            raise
        except Exception as wrong:  # noqa: BLE001 - vLLM's validation raises many kinds; the attempt itself will say so
            self._prefetches.pop((expected.request, expected.attempt))
            _log.debug("an expected prompt is not loaded: %s", one_line(wrong))

    def _submit(self, submit: Submit) -> None:
        self._abort(self._prefetches.pop((submit.request, submit.attempt)))
        rank = self._ranks.all[submit.rank]
        if submit.prefill_only and not goes_on(submit, self._context_length):
            submit = replace(submit, prefill_only=False)
        key = rank.add(submit, time.monotonic())
        fail = partial(self._fail, rank, key)
        if self._sleep_level:
            fail("the engine is asleep")
        elif submit.lora and submit.lora not in self._loras:
            fail(f"no LoRA {submit.lora} is loaded")
        elif bool(submit.sampling.pooling) != self._pooling:
            fail("this model makes embeddings only" if self._pooling else "this model makes no embeddings")
        else:
            rank.stats.begin(time.monotonic())
            self._start(self._add(rank, key, submit))

    async def _add(self, rank: EngineRank, key: str, submit: Submit) -> None:
        continued = len(submit.tokens) // 4 - submit.prompt_tokens
        sampling = submit.sampling
        try:
            prompt = await self._prompt_of(submit)
            params: Any
            if self._pooling:
                params = to_pooling_params(sampling)
            elif submit.prefill_only:
                params = to_sampling_params(first_token(sampling, continued), continued=continued, ends=self._ends)
                params.extra_args = {"kv_transfer_params": hand_over_params(key)}
            else:
                params = to_sampling_params(sampling, continued=continued, ends=self._ends)
            collector = await self._llm.add_request(
                key,
                prompt,
                params,
                lora_request=self._loras.find(submit.lora),
                trace_headers={"traceparent": submit.trace} if submit.trace else None,
                priority=-submit.priority if self._by_priority else 0,
                data_parallel_rank=rank.number,
            )
            early = collector.get_nowait()
        except EngineDeadError:
            raise
        except Exception as wrong:  # noqa: BLE001 - vLLM's validation raises many kinds; the request alone fails
            self._refused(rank, key, sampling, wrong, continued=bool(continued))
            return

        def put(output: RequestOutput | PoolingRequestOutput | Exception) -> None:
            self._record(rank, key, sampling, output)

        collector.put = put
        if early is not None:
            put(early)
        if rank.attempts.find(submit.request, submit.attempt) != key:  # it ended meanwhile
            self._abort([key])

    async def _prompt_of(self, submit: Submit) -> TokensInput | MultiModalInput:
        if self._images is None or not submit.images:
            return _tokens_of(submit)
        return await asyncio.to_thread(self._images.prompt, submit)

    def _refused(
        self, rank: EngineRank, key: str, sampling: Sampling, wrong: Exception, *, continued: bool = False
    ) -> None:
        text = one_line(wrong)
        unfollowable = sampling.grammar and not continued  # another engine may continue it
        self._fail(rank, key, f"{UNFOLLOWABLE}: {text}" if unfollowable else f"vLLM refuses the request: {text}")

    def _fail(self, rank: EngineRank, key: str, reason: str) -> None:
        rank.attempts.end(key, "error", reason)
        self._end.flush_soon()

    def _abort(self, keys: list[str]) -> None:
        if keys:
            self._start(self._llm.abort(keys))
            self._end.flush_soon()

    async def _operate(self, command: Operate) -> None:
        self._prober.paused += 1
        broken: Exception | None = None
        try:
            failed = await self._do(command)
        except Exception as wrong:  # noqa: BLE001 - whatever vLLM raises is the answer
            failed = f"{command.operation}: {one_line(wrong)}"
            broken = wrong
        finally:
            self._prober.paused -= 1
            for rank in self._ranks.all:  # the operation may have held its core up
                rank.active_s = time.monotonic()
        self._report()
        self._channel.send(Operated(command.ticket, failed=failed))
        if broken is not None and command.operation in ("sleep", "wake"):
            self._give_up(broken)  # whether it sleeps is not known

    async def _do(self, command: Operate) -> str:
        """Do an operation. Return why it was not done. Raise what vLLM raises."""
        match command.operation:
            case "clear":
                return await self._clear()
            case "sleep":
                if self._sleep_level:
                    return "sleep: the engine sleeps already"
                if self._ranks.living:
                    return f"sleep: {self._ranks.living} attempts are running"
                self._abort(self._prefetches.clear())
                failed = await self._clear()
                if failed:
                    return failed
                self._sleep_level = command.level
                await self._llm.sleep(command.level)
            case "wake":
                if not self._sleep_level:
                    return "wake: the engine is awake"
                if self._sleep_level == 2 and (fault := self._weights.fault()):
                    return f"wake: {fault}"
                await self._llm.wake_up()
                if self._sleep_level == 2:
                    await self._llm.collective_rpc("reload_weights")
                self._sleep_level = 0
                await self.probe(self._config.stall_s)
            case "load_lora":
                return await self._loras.load(command.name, command.path)
            case "unload_lora":
                if self._ranks.uses_lora(command.name):
                    return f"unload_lora: attempts with {command.name} are running"
                return await self._loras.unload(command.name)
            case _:
                assert_never(command.operation)
        return ""

    async def _clear(self) -> str:
        """Clear the cache of all ranks. vLLM reports that with a rank's next step; so one is made."""
        for cleared in self._cleared:
            cleared.clear()
        if failed := await self._reset_cache():
            return failed
        await self.probe(CLEAR_LIMIT_S)
        async with asyncio.timeout(CLEAR_LIMIT_S):
            for cleared in self._cleared:
                await cleared.wait()
        return ""

    async def _reset_cache(self) -> str:
        """Have vLLM forget its blocks. Return why it did not. Copies to the kvbm may hold some for a moment, at which
        vLLM raises."""
        for turn in range(CLEAR_TRIES):
            try:
                if await self._llm.reset_prefix_cache(reset_running_requests=True):
                    return ""
            except EngineDeadError:
                raise
            except Exception as wrong:  # vLLM raises a RuntimeError, which its client passes on as a bare Exception
                if turn == CLEAR_TRIES - 1 or "reset KV cache" not in str(wrong):
                    raise
            await asyncio.sleep(CLEAR_RETRY_S)
        return "clear: vLLM still uses blocks of its cache"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._give_up(task.exception())

    # --- what vLLM says

    def _apply_events(self, rank: EngineRank, cleared: asyncio.Event, events: list[KvEvent]) -> None:
        if any(isinstance(event, AllBlocksCleared) for event in events):
            cleared.set()
        rank.blocks.notes.now_s = time.monotonic()
        rank.apply_events(events)
        self._end.flush_soon()

    def record_step(self, number: int, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Record vLLM's statistics of one step of a rank."""
        if scheduler_stats is None:
            return
        rank = self._ranks.all[number]
        prompt = None if iteration_stats is None else iteration_stats.prompt_token_stats
        waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        rank.stats.record_step(
            time.monotonic(),
            running=scheduler_stats.num_running_reqs,
            waiting=max(0, waiting - self._prefetches.at(number)),
            usage=scheduler_stats.kv_cache_usage,
            prefilled_tokens=0 if prompt is None else prompt.computed,
            decoded_tokens=0 if iteration_stats is None else iteration_stats.num_generation_tokens,
            preempted=0 if iteration_stats is None else iteration_stats.num_preempted_reqs,
            queried_tokens=scheduler_stats.prefix_cache_stats.queries,
            found_tokens=scheduler_stats.prefix_cache_stats.hits,
        )
        rank.active_s = time.monotonic()
        if said := connector_stats(scheduler_stats.kv_connector_stats):
            self._ranks.record_exchanged(number, said.exchanged)
            self._take_link(number, said.link)
            rank.stats.prefetched_blocks = said.prefetched_blocks
            rank.attempts.hand_over(said.stored if said.link.kvbm else rank.attempts.storing)
        rank.stats.images = image_counts(scheduler_stats.ec_connector_stats) or rank.stats.images
        self._end.flush_soon()

    def _take_link(self, number: int, link: KvbmLink) -> None:
        """A rank has said whether it exchanges blocks. The worker does where all its ranks do."""
        self._links[number] = link
        links = [self._links.get(rank.number, KvbmLink(kvbm="")) for rank in self._ranks.all]
        shown = next((each for each in links if not each.kvbm), links[0])
        if shown != self._shown_link:
            self._shown_link = shown
            try:
                self._channel.send(shown)
            except ChannelClosed as wrong:
                self._end.break_off(wrong)

    def _record(
        self, rank: EngineRank, key: str, sampling: Sampling, output: RequestOutput | PoolingRequestOutput | Exception
    ) -> None:
        logprobs = sampling.logprobs
        if isinstance(output, Exception):
            if is_refusal(output):
                self._refused(rank, key, sampling, output)
            else:
                self._give_up(output)
        elif isinstance(output, RequestOutput):
            one = output.outputs[0]
            if sampling.prompt_logprobs >= 0 and output.prompt_logprobs:
                self._send_prompt(rank, key, output.prompt_token_ids, output.prompt_logprobs, sampling.prompt_logprobs)
            rank.attempts.record_output(
                key,
                one.token_ids,
                finish=one.finish_reason,
                cached_tokens=output.num_cached_tokens or 0,
                logprobs=None if logprobs < 0 else logprob_entries(one.token_ids, one.logprobs, logprobs),
                waited_s=_waited_s(output.metrics),
                now_s=time.monotonic() if one.finish_reason else 0.0,
            )
            if one.finish_reason and (rank.number not in self._links or not self._links[rank.number].kvbm):
                rank.attempts.hand_over([key])  # nothing is stored
        elif output.finished:
            rank.attempts.record_output(key, (), finish="stop", embedding=pack_embedding(output.outputs.data.tolist()))
        self._end.flush_soon()

    def _send_prompt(
        self, rank: EngineRank, key: str, tokens: Sequence[int], positions: Sequence[Any], count: int
    ) -> None:
        """Send the log probabilities of a prompt, in reports of their own, each of which fits into a message."""
        try:
            self._report()  # what happened before them
            for piece in prompt_pieces(tokens, positions, count, MOST_EMBEDDED_BYTES):
                self._channel.send(self._ranks.report(rank, rank.attempts.prompt_part(key, piece)))
        except ChannelClosed as wrong:
            self._end.break_off(wrong)

    def _give_up(self, wrong: BaseException | None) -> None:
        self._end.end(Failed(reason=one_line(wrong)))

    # --- reports

    def _report(self) -> None:
        """Report everything that is new. vLLM hands out all outputs of a step in one turn of the loop."""
        for report in self._ranks.take_reports():
            self._channel.send(report)

    async def _tick(self) -> None:
        """End attempts that are too late, notice a dead core, probe idle ranks, and send metrics. Raise
        ChannelClosed."""
        idle_s = self._config.health.idle_s
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for rank in self._ranks.all:
                self._abort(rank.attempts.expire(now_s, rank.stats.waiting))
            self._abort(self._prefetches.expire(now_s))
            if self._llm.errored:
                self._give_up(self._llm.dead_error)
                return
            if self._ordered is not None and (link := self._ordered.take_link(now_s)) is not None:
                self._take_link(0, link)
            stalled = self._ranks.stalled(now_s, self._config.stall_s)
            if stalled is not None and not self._prober.paused:  # the shell sees only that all ranks stand still
                reason = f"rank {stalled.number} computed nothing for {self._config.stall_s:g} s while requests wait"
                self._give_up(Unavailable(reason))
                return
            if idle_s and not self._sleep_level:
                for rank in self._ranks.idle(now_s, idle_s):
                    self._start(self._prober.probe_idle(rank))
            if now_s >= self._metrics_due_s:
                self._metrics_due_s = now_s + METRICS_S
                self._send_metrics()

    def _send_metrics(self) -> None:
        """Send vLLM's own metrics, unless they are as they were."""
        try:
            text = self._metrics()
            size_bytes = len(text.encode())
            if size_bytes > MOST_BYTES:
                raise ValueError(f"they have {size_bytes} bytes, more than {MOST_BYTES}; name fewer in engine_metrics")
        except Exception as wrong:  # noqa: BLE001 - whatever a collector raises costs the metrics, not the engine
            _log.error("vLLM's own metrics are not shown any longer: %s", one_line(wrong))
            self._metrics_due_s = math.inf
            text = ""
        if text == self._sent_metrics:
            return
        self._sent_metrics = text
        self._channel.send(OwnMetrics(text))


def is_refusal(wrong: Exception) -> bool:
    """Return whether an exception that vLLM hands to a request ends this request alone, such as a grammar that its
    backend does not compile: from vLLM 0.33 on. Any other one ends the engine."""
    return isinstance(wrong, VLLMClientError | GenerationError)


def eos_token_ids(config: VllmConfig) -> tuple[int, ...]:
    """Return the ids of all tokens that end an answer: those of the model's configuration as vLLM has it, with its
    overrides, and those of the tokenizer's files."""
    model = config.model_config
    of_model = getattr(model.hf_text_config, "eos_token_id", None)
    of_generation = model.try_get_generation_config().get("eos_token_id")
    ids = [*token_ids(of_model, "eos_token_id", model.model), *token_ids(of_generation, "eos_token_id", model.model)]
    return tuple(dict.fromkeys((*ids, *read_tokenizer_ends(Path(model.tokenizer), model.get_vocab_size()))))


def goes_on(submit: Submit, context_length: int) -> bool:
    """Return whether an attempt has room for more than its first token."""
    length = len(submit.tokens) // 4
    return length - submit.prompt_tokens + 1 < submit.sampling.max_tokens and length + 1 < context_length


def _tokens_of(submit: Submit) -> TokensInput:
    return tokens_input(token_array(submit.tokens).tolist(), cache_salt=submit.salt or None)


def _waited_s(metrics: Any) -> tuple[float, float] | None:
    """Return the seconds that a request waited, and from there to its first token, once it has one."""
    if metrics is None or not metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts:
        return None
    return metrics.scheduled_ts - metrics.queued_ts, metrics.first_token_ts - metrics.scheduled_ts
