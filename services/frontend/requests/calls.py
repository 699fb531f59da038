"""The calls of a request to routers and workers over the bus; the answers come back as events of its session.

SelectWorker     ─▶ a router, then others by their id   ─▶ Selected, SelectRefused, Unrouted, within SELECT_LIMIT_S
DispatchAttempt  ─▶ Generate to the chosen worker       ─▶ Accepted, Refused, Unreachable, Unsendable
AnnounceAttempt  ─▶ the worker that will decode         ─▶ no answer
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TypeGuard

from msgspec.structs import replace

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.requests.actions import AnnounceAttempt, DispatchAttempt, SelectWorker
from services.frontend.requests.events import AnswerMissed, Event, Unreachable, Unrouted, Unsendable
from services.frontend.requests.stream import InferenceRequest, Stream
from shared import subjects
from shared.errors import PayloadTooLarge, ProtocolError, RequestTimeout, Unavailable
from shared.hashing import pack_tokens
from shared.messages import GENERATE, GENERATE_REPLY, SELECT, SELECT_REPLY, Generate, Select, SelectRefused, SelectReply
from shared.runtime.lifecycle import Runtime

STALE_ROUTER_PAUSE_S = 0.05
"""The pause before routers are asked again that have not yet heard of the workers that this frontend knows."""
ROUTERS_TRIED = 3
"""The number of routers that are asked by their id, after the queue group did not answer."""
SELECT_LIMIT_S = 5.0
"""The longest that choosing one worker may take, over all routers. If routers are slow, all are asked again, each with
twice the time."""

_log = logging.getLogger(__name__)

Feed = Callable[[Stream, Event], None]
"""Passes an event to the session of a stream."""


class BusCalls:
    """Makes the calls of all requests; `feed` gets the answers."""

    def __init__(self, runtime: Runtime, limits: LimitsConfig, metrics: Metrics, feed: Feed) -> None:
        self._runtime = runtime
        self._limits = limits
        self._metrics = metrics
        self._feed = feed

    async def select_worker(self, stream: Stream, action: SelectWorker) -> None:
        """Ask routers which worker computes the request."""
        request = stream.request
        loop = asyncio.get_running_loop()
        begun = loop.time()
        until = min(begun + SELECT_LIMIT_S, request.deadline)
        payload = SELECT.encode(
            Select(
                request=request.id,
                attempt=action.attempt,
                frontend=self._runtime.instance,
                model=request.model,
                # Log-probabilities of the prompt are computed, not cached: nothing is saved where the prompt lies.
                hashes=b"" if stream.session.prompt_logprobs.due else request.hashes,
                prompt_tokens=request.prompt_tokens + action.produced,
                max_tokens=request.sampling.max_tokens - action.produced,
                excluded=action.excluded,
                lora=request.lora,
                priority=request.priority,
                session=request.affinity_key,
                # Later attempts have waited already.
                wait_limit_s=self._limits.wait_s if action.attempt == 1 and not request.is_follower else 0.0,
                time_left_s=max(0.0, request.deadline - loop.time()),
                whole=bool(request.embedding_size) or request.prompt_only or request.prompt_entries is not None,
            )
        )
        headers = None if stream.spans is None else stream.spans.select_headers
        timeout_s = self._limits.select_timeout_s
        stale: SelectRefused | None = None
        slow = True
        while slow or (stale is not None and loop.time() < until):
            if stale is not None:
                await asyncio.sleep(STALE_ROUTER_PAUSE_S)
            slow = False
            for tried, addressee in enumerate(self._addressees(request.model)):
                left_s = until - loop.time()
                if left_s <= 0:
                    break
                if not stream.session.is_choosing(action.attempt):
                    return
                if tried or timeout_s > self._limits.select_timeout_s:
                    self._metrics.router_retries.inc()
                try:
                    reply = await self._runtime.bus.request(
                        subjects.select(self._runtime.namespace, addressee),
                        payload,
                        timeout_s=min(timeout_s, left_s),
                        headers=headers,
                    )
                    answer = SELECT_REPLY.decode(reply.payload)
                    if self._is_stale(answer, request):
                        stale = answer
                        continue
                    self._metrics.hops["select"].observe(loop.time() - begun)
                    self._feed(stream, answer)
                    return
                except Unavailable as why:
                    if isinstance(why, RequestTimeout):
                        slow = True
                        self._feed(stream, AnswerMissed(action.attempt))
                    _log.warning("request %s: router %s: %s", request.id, addressee, why, extra=stream.log_fields)
                except ProtocolError as wrong:
                    _log.error("request %s: router %s: %s", request.id, addressee, wrong, extra=stream.log_fields)
            timeout_s *= 2 if slow else 1
        if stale is not None:
            self._feed(stream, stale)
            return
        # Routers are registered but do not answer: NATS is frozen, or has just come back.
        connected, expected = self._runtime.bus.connected, bool(sample_routers(self._runtime, ROUTERS_TRIED))
        reason = "no router answered" if connected else "NATS is not connected"
        self._feed(stream, Unrouted(action.attempt, reason, away=expected or not connected))

    async def dispatch(self, stream: Stream, action: DispatchAttempt) -> None:
        """Send the attempt to the chosen worker."""
        request = stream.request
        now = stream.accepted = asyncio.get_running_loop().time()
        if lacking := self._missing_feature(action.instance, request):
            self._feed(stream, Unreachable(action.attempt, lacking))
            return
        message = replace(
            self._generate(stream, action, now),
            wait_left_s=max(0.0, stream.started + action.wait_s - now) if action.wait_s else None,
            prefill_only=action.prefill_only,
        )
        subject = subjects.worker(self._runtime.namespace, action.instance, "generate")
        event: Event
        try:
            reply = await self._runtime.bus.request(
                subject,
                GENERATE.encode(message),
                timeout_s=self._limits.offer_timeout_s,
                headers=None if stream.spans is None else stream.spans.attempt_headers,
            )
            event = GENERATE_REPLY.decode(reply.payload)
            stream.accepted = asyncio.get_running_loop().time()
            self._metrics.hops["offer"].observe(stream.accepted - now)
        except PayloadTooLarge as wrong:
            event = Unsendable(action.attempt, str(wrong))
        except (Unavailable, ProtocolError) as why:
            _log.warning("request %s: worker %s: %s", request.id, action.instance, why, extra=stream.log_fields)
            event = Unreachable(action.attempt, str(why))
        self._feed(stream, event)

    async def announce(self, stream: Stream, action: AnnounceAttempt) -> None:
        """Tell the worker that will decode of the attempt, if blocks are handed over within one machine's kvbm."""
        cards, model = self._runtime.directory.cards, stream.request.model
        here, there = cards.get((model, action.prefill)), cards.get((model, action.instance))
        if here is None or there is None or not here.kvbm or here.kvbm != there.kvbm:
            return
        subject = subjects.worker(self._runtime.namespace, action.instance, "prefetch")
        message = self._generate(stream, action, asyncio.get_running_loop().time())
        try:
            await self._runtime.bus.publish(subject, GENERATE.encode(message))
        except (Unavailable, PayloadTooLarge) as why:
            _log.debug("request %s: worker %s does not hear of it: %s", stream.request.id, action.instance, why)

    def _generate(self, stream: Stream, action: DispatchAttempt | AnnounceAttempt, now: float) -> Generate:
        """Return the message that an attempt begins with."""
        request, sampling = stream.request, stream.request.sampling
        if sampling.prompt_logprobs >= 0 and not stream.session.prompt_logprobs.due:  # an earlier attempt brought them
            sampling = replace(sampling, prompt_logprobs=-1)
        return Generate(
            request=request.id,
            attempt=action.attempt,
            model=request.model,
            frontend=self._runtime.instance,
            tokens=request.prompt + pack_tokens(stream.session.tokens),
            prompt_tokens=request.prompt_tokens,
            sampling=sampling,
            time_left_s=max(0.0, request.deadline - now),
            rank=action.rank,
            lora=request.lora,
            salt=request.salt,
            priority=request.priority,
            prefill_by=action.prefill if isinstance(action, AnnounceAttempt) else "",
        )

    def _missing_feature(self, instance: str, request: InferenceRequest) -> str:
        """Return the feature that the request needs and the worker lacks; empty if none. A worker of an earlier version
        would ignore the field."""
        sampling = request.sampling
        with_prompt = sampling.prompt_logprobs >= 0
        masked = sampling.grammar or sampling.allowed_tokens
        if not (masked or sampling.logit_bias or sampling.min_tokens or sampling.pooling or with_prompt):
            return ""
        card = self._runtime.directory.cards.get((request.model, instance))
        if sampling.grammar and not (card is not None and card.grammars):
            return "it does not support grammars"
        if sampling.logit_bias and not (card is not None and card.biases):
            return "it does not support logit_bias"
        if sampling.allowed_tokens and not (card is not None and card.allowed_tokens):
            return "it does not support allowed_token_ids"
        if sampling.min_tokens and not (card is not None and card.min_tokens):
            return "it does not support min_tokens"
        if with_prompt and not (card is not None and card.prompt_logprobs):
            return "it does not compute log-probabilities of the prompt"
        if sampling.pooling and not (card is not None and card.embedding_size == request.embedding_size):
            return f"it does not make embeddings of {request.embedding_size} numbers"
        return ""

    def _is_stale(self, answer: SelectReply, request: InferenceRequest) -> TypeGuard[SelectRefused]:
        """Return whether the router has not yet heard of a worker that this frontend knows, or of its LoRA. Both follow
        discovery independently."""
        return (
            isinstance(answer, SelectRefused)
            and answer.code in ("unknown_model", "no_instances")
            and any(
                card.model == request.model and card.decodes and (not request.lora or request.lora in card.lora)
                for card in self._runtime.directory.cards.values()
            )
        )

    def _addressees(self, model: str) -> Iterator[str]:
        yield model
        yield from sample_routers(self._runtime, ROUTERS_TRIED)


def sample_routers(runtime: Runtime, most: int) -> list[str]:
    """Return a few routers in random order, because any of them may be frozen."""
    routers = [one.instance for one in runtime.directory.instances.values() if one.service == "router"]
    return runtime.draw.sample(routers, min(most, len(routers)))
