"""Where a gateway's requests go: the choice by routers, and the load that is reserved there until the request ends.

    choose ─▶ Select: reserved ── begin ─▶ Prefilled ── release ─▶ Finished
                                   └── another endpoint answers: Select among its instance alone, then Finished for the
                                       attempt before: the reservation has moved

An endpoint is the server that an attached worker stands for; its address is in the worker's card. What is reserved ends
(`UnreportedAttempts`) at the end of the stream, or at the request's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from msgspec import Struct

from services.frontend.config import PickerConfig
from services.frontend.metrics import Metrics
from services.frontend.picker.prompts import GatewayPrompt
from services.frontend.requests.calls import refusal_of
from services.frontend.requests.service import RequestService
from services.frontend.requests.unreported import UnreportedAttempts
from services.frontend.serving.request_context import RequestId
from shared.errors import HeadraceError, Unavailable
from shared.messages.cards import ModelCard
from shared.messages.select import Select, Selected
from shared.runtime.runtime import Runtime

UNKNOWN_INSTANCES = 3
"""How often a router may choose an instance that this process does not know yet."""
Cards = Mapping[tuple[str, str], ModelCard]


def endpoints_of(cards: Cards, model: str, subset: Collection[str] | None) -> dict[str, str]:
    """Return the address of each instance that stands for a server of the model. `subset` has the addresses that may
    be chosen. None if all may."""
    return {
        card.instance: card.address
        for card in cards.values()
        if card.model == model and card.address and card.decodes and (subset is None or card.address in subset)
    }


def any_model(cards: Cards, subset: Collection[str] | None) -> str:
    """Return a model that has an endpoint, for a request that names none that is known: the first by name. Empty if
    there is none."""
    models = (
        card.model
        for card in cards.values()
        if card.address and card.decodes and (subset is None or card.address in subset)
    )
    return min(models, default="")


class EndpointPicks(Struct, frozen=True):
    """Makes the choices of this process."""

    runtime: Runtime
    service: RequestService
    config: PickerConfig
    metrics: Metrics

    @contextmanager
    def begin(self) -> Iterator[EndpointPick]:
        """Yield what will choose for one request. Whatever it has reserved is free soon after the context is left."""
        pick = EndpointPick(self)
        try:
            yield pick
        finally:
            pick.leave()


class EndpointPick:
    """One request of a gateway. Times are seconds on the loop's clock."""

    def __init__(self, picks: EndpointPicks) -> None:
        self._picks = picks
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._request, self._model = RequestId("", ""), ""
        self._begun_s = 0.0
        self._attempts: UnreportedAttempts | None = None
        """None before a choice."""
        self._instance = ""
        """The instance at which the load is reserved."""
        self._endpoint = ""
        self._has_text = False
        self._released = False
        self._timer: asyncio.TimerHandle | None = None

    async def choose(
        self, request: RequestId, prompt: GatewayPrompt, subset: tuple[str, ...] | None
    ) -> tuple[str, ...]:
        """Return the endpoints for a request in the order in which they are to be tried, the load reserved at the
        first. Raise Unavailable, Overloaded and InvalidRequest."""
        picks = self._picks
        cards, most = picks.runtime.directory.cards, picks.config.endpoints
        allowed = None if subset is None else frozenset(subset)
        model = prompt.model or any_model(cards, allowed)
        known = endpoints_of(cards, model, allowed)
        if not known:
            among = "" if subset is None else f" among the {len(subset)} that the gateway allows"
            raise Unavailable(f"no endpoint serves the model {prompt.model or 'of this request'!r}{among}")
        self._request, self._model, self._begun_s = request, model, self._now()
        select = Select(
            request=request.unique,
            attempt=0,
            frontend=picks.runtime.instance,
            model=model,
            hashes=prompt.hashes,
            prompt_tokens=prompt.prompt_tokens,
            max_tokens=prompt.max_tokens,
            lora=prompt.lora,
            priority=prompt.priority,
            session=prompt.session,
        )
        self._attempts = UnreportedAttempts(picks.service, select, prompt.deadline)
        chosen = await self._select(self._attempts, known, first=True)
        order = [chosen.instance, *(row.instance for row in chosen.candidates)]
        endpoints = tuple(dict.fromkeys(known[each] for each in order if each in known))[:most]
        self._endpoint = endpoints[0]
        return endpoints

    async def _select(self, attempts: UnreportedAttempts, known: Mapping[str, str], *, first: bool) -> Selected:
        """Have a router reserve the next attempt at one of the known instances."""
        picks = self._picks
        cards = picks.runtime.directory.cards.values()
        excluded = {card.instance for card in cards if card.model == self._model} - known.keys()
        for _ in range(UNKNOWN_INSTANCES):
            explain = first and picks.config.endpoints > 1
            answer = await attempts.select(sorted(excluded), waits=first, explain=explain)
            if not isinstance(answer, Selected):
                raise refusal_of(answer)
            if answer.instance in known:
                self._instance = answer.instance
                return answer
            attempts.finish()
            excluded.add(answer.instance)
        raise Unavailable("routers choose instances that this frontend does not know yet")

    def begin(self, served: str, *, has_text: bool) -> None:
        """Note that the endpoint `served` answers; empty if it is not known which. With `has_text` the text is there,
        else `first_text` follows, or is assumed after `unseen_s`."""
        if self._attempts is None or self._released:
            return
        moves = bool(served) and served != self._endpoint
        if moves:
            self._move(served, self._attempts)
        if has_text and moves:
            self._has_text = True  # it is said of the attempt that is reserved then
        elif has_text:
            self.first_text()
        else:
            self._timer = self._loop.call_later(self._picks.config.unseen_s, self.first_text)

    def first_text(self) -> None:
        """Note that the first text has come. Idempotent."""
        if not (self._has_text or self._released or self._attempts is None):
            self._has_text = True
            self._attempts.mark_prefilled(self._instance, self._now() - self._begun_s)

    def _move(self, served: str, attempts: UnreportedAttempts) -> None:
        """Move the reservation to the instance that stands for `served`, or free it if there is none."""
        picks = self._picks
        picks.metrics.picker_moves.inc()
        text = f"the gateway sent it to {served}, not to {self._endpoint}"
        picks.runtime.notes.requests.add(self._request.unique, text, self._now(), attempt=attempts.latest)
        known = endpoints_of(picks.runtime.directory.cards, self._model, (served,))
        if not known:
            attempts.finish()
            return
        self._endpoint = served
        picks.runtime.tasks.create_task(self._reserve_at(known, attempts), name=f"move {self._request.unique}")

    async def _reserve_at(self, known: Mapping[str, str], attempts: UnreportedAttempts) -> None:
        former = attempts.latest
        try:
            await self._select(attempts, known, first=False)
        except HeadraceError as why:
            now = self._now()
            self._picks.runtime.notes.requests.add(self._request.unique, f"not reserved there: {why}", now)
        attempts.finish(former)
        if self._released:
            attempts.finish()
        elif self._has_text and attempts.latest > former:
            attempts.mark_prefilled(self._instance, self._now() - self._begun_s)

    def leave(self) -> None:
        """Free what is reserved, as the stream has ended: at once, or after `unseen_s` if an answer's text was to come.
        Some gateways end their stream with the answer's headers; by then the server's own counts show the request."""
        if self._timer is None or self._has_text or self._released:
            self.release()
        else:
            self._timer.cancel()
            self._timer = self._loop.call_later(self._picks.config.unseen_s, self.release)

    def release(self) -> None:
        """Free what is reserved. Idempotent."""
        self._released = True
        if self._timer is not None:
            self._timer.cancel()
        if self._attempts is not None:
            self._attempts.finish()
