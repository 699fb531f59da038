"""The calls of a request to routers and workers over the bus.

SelectWorker     ─▶ turn_waits.py, if the model sleeps, also as routers say it before discovery does  ─▶ TurnWaited
                 ─▶ routers, as router_tries.py says    ─▶ Selected, SelectRefused, Unrouted, within SELECT_LIMIT_S
DispatchAttempt  ─▶ images_apart.py, if images are encoded elsewhere first
                 ─▶ Generate to the chosen worker       ─▶ Accepted, Refused, Unreachable, Unsendable
AnnounceAttempt  ─▶ the worker that will decode         ─▶ no answer
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.requests.actions import AnnounceAttempt, DispatchAttempt, SelectWorker
from services.frontend.requests.events import AnswerMissed, Event, TurnWaited, Unreachable, Unrouted, Unsendable
from services.frontend.requests.images_apart import ImagesElsewhere
from services.frontend.requests.router_tries import RouterTries, some_card_serves
from services.frontend.requests.stream import InferenceRequest, Stream
from services.frontend.requests.turn_waits import TurnWaits
from shared import subjects
from shared.errors import (
    HeadraceError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    RequestTimeout,
    Unavailable,
)
from shared.hashing import pack_tokens, salted_image_key
from shared.messages.generate import GENERATE, GENERATE_REPLY, Generate
from shared.messages.select import SELECT, SELECT_REPLY, Select, SelectRefused, SelectReply
from shared.runtime.runtime import Runtime

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
        self._images_apart = ImagesElsewhere(runtime, metrics)
        self._turn_waits = TurnWaits(runtime, limits.asleep_s, metrics)

    async def select_worker(self, stream: Stream, action: SelectWorker) -> None:
        """Ask routers which worker computes the request, or wait until its model is awake."""
        if self._turn_waits.is_asleep(stream.request.model):
            await self._wait_awake(stream, action)
            return
        select = self._select(stream, action, asyncio.get_running_loop().time())
        session = stream.session
        answer = await self.ask_routers(
            select,
            stream.request.deadline,
            is_wanted=lambda: session.is_choosing(action.attempt),
            missed=lambda: self._feed(stream, AnswerMissed(action.attempt)),
            headers=None if stream.spans is None else stream.spans.select_headers,
            log_fields=stream.log_fields,
        )
        if answer is None:
            return
        if self._lost_its_turn(stream, answer):
            await self._wait_awake(stream, action)
        else:
            self._feed(stream, answer)

    def _lost_its_turn(self, stream: Stream, answer: SelectReply | Unrouted) -> bool:
        """Return whether routers know no worker because its model falls asleep, or has just woken: routers and this
        frontend follow discovery independently."""
        request = stream.request
        if not isinstance(answer, SelectRefused) or answer.code not in ("no_instances", "unknown_model"):
            return False
        if not self._turn_waits.takes_turns(request.model):
            return False
        cards = self._runtime.directory.cards.values()
        return self._turn_waits.is_asleep(request.model) or some_card_serves(cards, request.model, request.lora)

    async def _wait_awake(self, stream: Stream, action: SelectWorker) -> None:
        now, session = asyncio.get_running_loop().time, stream.session
        began_s = now()
        attempt, since_s = stream.turn_wait
        if attempt != action.attempt:  # else it goes on: its model has been awake meanwhile, without this attempt
            since_s = began_s
            stream.turn_wait = action.attempt, began_s
        is_wanted = partial(session.is_choosing, action.attempt)
        why = await self._turn_waits.wait_awake(stream.request.model, since_s, is_wanted)
        slept_s = now() - began_s
        stream.slept_s += slept_s
        note = f"its model slept; it waited {slept_s:.1f} s for the model's turn"
        self._runtime.notes.requests.add(stream.request.id, note, now(), attempt=action.attempt)
        self._feed(stream, TurnWaited(action.attempt, why))

    async def ask_routers(
        self,
        select: Select,
        deadline: float,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        missed: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
        log_fields: Mapping[str, str] | None = None,
    ) -> SelectReply | Unrouted | None:
        """Ask one router after another until one answers, or for SELECT_LIMIT_S. Return None once the answer is no
        longer wanted. `missed` is called for each answer that is too late."""
        runtime, loop = self._runtime, asyncio.get_running_loop()
        begun = loop.time()
        payload = SELECT.encode(select)
        routers = partial(sample_routers, runtime)
        until_s = min(begun + SELECT_LIMIT_S, deadline)
        tries = RouterTries(select.model, select.lora, self._limits.select_timeout_s, until_s, routers)
        while (asked := tries.next_try(loop.time())) is not None:
            if asked.pause_s:
                await asyncio.sleep(asked.pause_s)
            if not is_wanted():
                return None
            if asked.is_retry:
                self._metrics.router_retries.inc()
            subject = subjects.select(runtime.namespace, asked.addressee)
            try:
                reply = await runtime.bus.request(subject, payload, timeout_s=asked.timeout_s, headers=headers)
                answer = SELECT_REPLY.decode(reply.payload)
            except (Unavailable, ProtocolError) as why:
                if isinstance(why, RequestTimeout):
                    tries.record_timeout()
                    missed()
                level = logging.ERROR if isinstance(why, ProtocolError) else logging.WARNING
                _log.log(level, "request %s: router %s: %s", select.request, asked.addressee, why, extra=log_fields)
                continue
            if tries.accepts(answer, runtime.directory.cards.values()):
                self._metrics.hops["select"].observe(loop.time() - begun)
                return answer
        return tries.stale or self._unrouted(select.attempt)

    def _unrouted(self, attempt: int) -> Unrouted:
        """Return why no router answered. Routers that are registered but do not answer will be back: NATS is frozen, or
        has just come back."""
        connected, expected = self._runtime.bus.connected, bool(sample_routers(self._runtime, 1))
        reason = "no router answered" if connected else "NATS is not connected"
        return Unrouted(attempt, reason, away=expected or not connected)

    def _select(self, stream: Stream, action: SelectWorker, now: float) -> Select:
        """Return the question to the routers."""
        request = stream.request
        return Select(
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
            wait_limit_s=0.0 if action.attempt > 1 or request.waits else self._limits.wait_s,
            time_left_s=max(0.0, request.deadline - now),
            whole=bool(request.embedding_size)
            or request.picture is not None
            or request.prompt_only
            or request.prompt_entries is not None
            or self._is_forgotten(request),
            images=len(request.images),
            image_tokens=sum(image.tokens for image in request.images),
            image_hashes=b"".join(salted_image_key(image.key, request.salt)[:8] for image in request.images),
            image_ends=tuple(image.start + image.tokens for image in request.images),
        )

    def _is_forgotten(self, request: InferenceRequest) -> bool:
        """Return whether the answer depends on its first token in a way that a worker which continues it forgets."""
        sampling = request.sampling
        if not (sampling.grammar or sampling.presence_penalty or sampling.frequency_penalty):
            return False
        cards = self._runtime.directory.cards
        return any(card.forgets_output for (model, _), card in cards.items() if model == request.model)

    async def dispatch(self, stream: Stream, action: DispatchAttempt) -> None:
        """Send the attempt to the chosen worker."""
        request = stream.request
        if action.images is not None:
            await self._images_apart.encode(request, action.attempt, action.images)
            if not stream.session.is_offered(action.attempt):
                return  # it is over, or its worker is lost
        now = stream.accepted = asyncio.get_running_loop().time()
        if lacking := self._missing_feature(action.instance, request):
            self._feed(stream, Unreachable(action.attempt, lacking))
            return
        message = replace(
            self._generate(stream, action, now),
            wait_left_s=max(0.0, stream.started + stream.slept_s + action.wait_s - now) if action.wait_s else None,
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
            images=request.images,
            picture=request.picture,
            prefill_by=action.prefill if isinstance(action, AnnounceAttempt) else "",
        )

    def _missing_feature(self, instance: str, request: InferenceRequest) -> str:
        """Return the feature that the request needs and the worker lacks; empty if none. A worker of an earlier version
        would ignore the field."""
        sampling = request.sampling
        with_prompt = sampling.prompt_logprobs >= 0
        masked = sampling.grammar or sampling.allowed_tokens
        more = sampling.logit_bias or sampling.min_tokens or sampling.pooling or request.images or request.picture
        if not (masked or with_prompt or more):
            return ""
        card = self._runtime.directory.cards.get((request.model, instance))
        if request.images and not (card is not None and card.images == request.image_input):
            return "it does not take images that are prepared in this way"
        if (picture := request.picture) is not None:
            makes = None if card is None else card.pictures
            if makes is None or (picture.images and makes.edit_of(masked=bool(picture.mask)) is None):
                return f"it does not make pictures{' from such images' if picture.images else ''}"
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


def refusal_of(answer: SelectRefused | Unrouted) -> HeadraceError:
    """Return the error that a router's refusal is for a request that no worker computes."""
    if isinstance(answer, Unrouted):
        return Unavailable(answer.reason)
    if answer.code == "overloaded":
        return Overloaded(answer.reason, retry_after_s=answer.retry_after_s)
    if answer.code == "bad_request":
        return InvalidRequest(answer.reason)
    return Unavailable(answer.reason, retry_after_s=answer.retry_after_s)


def sample_routers(runtime: Runtime, most: int) -> list[str]:
    """Return a few routers in random order, because any of them may be frozen."""
    routers = [one.instance for one in runtime.directory.instances.values() if one.service == "router"]
    return runtime.draw.sample(routers, min(most, len(routers)))
