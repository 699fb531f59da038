"""What a request asks others, and how their answers come back as its events.

Ask      ─▶ a router, then others by their id        ─▶ Selected, SelectRefused, Unrouted, within SELECT_LIMIT_S
Offer    ─▶ Generate to the chosen worker            ─▶ Accepted, Refused, Unreachable, Unsendable
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TypeGuard

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.requests.inflight import Running
from services.frontend.requests.session import DispatchAttempt, Event, SelectWorker, Unreachable, Unrouted, Unsendable
from services.frontend.requests.stream import InferenceRequest
from shared import subjects
from shared.errors import PayloadTooLarge, ProtocolError, RequestTimeout, Unavailable
from shared.hashing import pack_tokens
from shared.messages import GENERATE, GENERATE_REPLY, SELECT, SELECT_REPLY, Generate, Select, SelectRefused, SelectReply
from shared.runtime.lifecycle import Runtime

STALE_ROUTER_PAUSE_S = 0.05
"""Before routers that have not heard yet of workers that are there are asked again."""
ROUTERS_TRIED = 3
"""By their id, after the queue group did not answer."""
SELECT_LIMIT_S = 5.0
"""Of one question, whoever is asked. Where routers are there but slow, all are asked again, with twice the time."""

_log = logging.getLogger(__name__)

Feed = Callable[[Running, Event], None]


class BusCalls:
    """Puts them, for all requests; `feed` gets what comes of each."""

    def __init__(self, runtime: Runtime, limits: LimitsConfig, metrics: Metrics, feed: Feed) -> None:
        self._runtime = runtime
        self._limits = limits
        self._metrics = metrics
        self._feed = feed

    async def select_worker(self, one: Running, ask: SelectWorker) -> None:
        """Who shall compute it?"""
        job = one.stream.request
        loop = asyncio.get_running_loop()
        until = min(loop.time() + SELECT_LIMIT_S, one.deadline)
        payload = SELECT.encode(
            Select(
                request=job.id,
                attempt=ask.attempt,
                frontend=self._runtime.instance,
                model=job.model,
                hashes=job.hashes,
                prompt_tokens=job.prompt_tokens + ask.produced,
                max_tokens=job.sampling.max_tokens - ask.produced,
                excluded=ask.excluded,
                session=job.affinity_key,
                # Later ones have waited already.
                wait_limit_s=self._limits.wait_s if ask.attempt == 1 and not job.is_follower else 0.0,
                time_left_s=max(0.0, one.deadline - loop.time()),
            )
        )
        timeout_s = self._limits.select_timeout_s
        behind: SelectRefused | None = None
        slow = True
        while slow or (behind is not None and loop.time() < until):
            if behind is not None:
                await asyncio.sleep(STALE_ROUTER_PAUSE_S)
            slow = False
            for tried, addressee in enumerate(self._addressees(job.model)):
                left_s = until - loop.time()
                if left_s <= 0:
                    break
                if not one.stream.session.is_choosing(ask.attempt):
                    return
                if tried or timeout_s > self._limits.select_timeout_s:
                    self._metrics.router_retries.inc()
                try:
                    reply = await self._runtime.bus.request(
                        subjects.select(self._runtime.namespace, addressee), payload, timeout_s=min(timeout_s, left_s)
                    )
                    answer = SELECT_REPLY.decode(reply.payload)
                    if self._is_behind(answer, job.model):
                        behind = answer
                        continue
                    self._feed(one, answer)
                    return
                except Unavailable as why:
                    slow = slow or isinstance(why, RequestTimeout)
                    _log.warning("request %s: router %s: %s", job.id, addressee, why)
                except ProtocolError as wrong:
                    _log.error("request %s: router %s: %s", job.id, addressee, wrong)
            timeout_s *= 2 if slow else 1
        if behind is not None:
            self._feed(one, behind)
            return
        # Routers are there and do not answer: a frozen NATS looks like that, and one that has just come back.
        connected, expected = self._runtime.bus.connected, bool(self._routers())
        reason = "no router answered" if connected else "NATS is not connected"
        self._feed(one, Unrouted(ask.attempt, reason, away=expected or not connected))

    async def dispatch(self, one: Running, offer: DispatchAttempt) -> None:
        """Will you compute it?"""
        job = one.stream.request
        now = asyncio.get_running_loop().time()
        if lacking := self._missing_feature(offer.instance, job):
            self._feed(one, Unreachable(offer.attempt, lacking))
            return
        message = Generate(
            request=job.id,
            attempt=offer.attempt,
            model=job.model,
            frontend=self._runtime.instance,
            tokens=job.prompt + pack_tokens(one.stream.session.tokens),
            prompt_tokens=job.prompt_tokens,
            sampling=job.sampling,
            time_left_s=max(0.0, one.deadline - now),
            rank=offer.rank,
            salt=job.salt,
            wait_left_s=max(0.0, one.started + offer.wait_s - now) if offer.wait_s else None,
        )
        subject = subjects.worker(self._runtime.namespace, offer.instance, "generate")
        event: Event
        try:
            reply = await self._runtime.bus.request(
                subject, GENERATE.encode(message), timeout_s=self._limits.offer_timeout_s
            )
            event = GENERATE_REPLY.decode(reply.payload)
        except PayloadTooLarge as wrong:
            event = Unsendable(offer.attempt, str(wrong))
        except (Unavailable, ProtocolError) as why:
            _log.warning("request %s: worker %s: %s", job.id, offer.instance, why)
            event = Unreachable(offer.attempt, str(why))
        self._feed(one, event)

    def _missing_feature(self, instance: str, job: InferenceRequest) -> str:
        """What of a request a worker would pass over, as one of an earlier version does; empty: nothing."""
        if not (job.sampling.grammar or job.sampling.logit_bias or job.sampling.pooling):
            return ""
        card = self._runtime.directory.cards.get((job.model, instance))
        if job.sampling.grammar and not (card is not None and card.grammars):
            return "it cannot be held to a grammar"
        if job.sampling.logit_bias and not (card is not None and card.biases):
            return "it adds no logit_bias"
        if job.sampling.pooling and not (card is not None and card.embedding_size == job.embedding_size):
            return f"it embeds nothing to {job.embedding_size} numbers"
        return ""

    def _is_behind(self, answer: SelectReply, model: str) -> TypeGuard[SelectRefused]:
        """Whether a router has not heard yet of a worker that is known here: it follows discovery by itself."""
        return (
            isinstance(answer, SelectRefused)
            and answer.code in ("unknown_model", "no_instances")
            and any(
                card.model == model and card.role == "aggregated" for card in self._runtime.directory.cards.values()
            )
        )

    def _addressees(self, model: str) -> Iterator[str]:
        yield model
        yield from self._routers()

    def _routers(self) -> list[str]:
        """A few routers, in random order: nobody knows which of them is frozen."""
        routers = [one.instance for one in self._runtime.directory.instances.values() if one.service == "router"]
        return self._runtime.draw.sample(routers, min(ROUTERS_TRIED, len(routers)))
