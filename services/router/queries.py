"""Answers queries of users, in JSON: why a candidate was chosen, and how the router is.

explain, to a model    every router receives it; one that does not know the request waits, so that another answers first
explain, to a router   answered at once, for all its models
state                  the state of each model and of each event source
heat                   the prefixes that the latest prompts share
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from services.router.config import RouterConfig
from services.router.selection.decision_log import Decision
from services.router.selection.heat import PREFIXES_MOST, hot_prefixes
from services.router.selection.left_out import LeftOutWorkers
from services.router.selection.model_router import ModelRouter
from services.router.sync.feed import EventFeed
from shared.bus.contract import Message
from shared.errors import BusDown, ProtocolError
from shared.messages.codec import JSON_HEADER
from shared.messages.people import (
    EXPLANATIONS,
    HEAT,
    ROUTER_STATE,
    Explanation,
    Explanations,
    HeatState,
    ModelState,
    PrefixHeat,
    RouterState,
)
from shared.rate_limited_log import RateLimitedLog
from shared.request_names import bare_id
from shared.runtime.runtime import Runtime

UNKNOWN_REQUEST_DELAY_S = 0.3
DELAYED_LIMIT = 64
"""Most answers delayed at once; beyond that limit, answers are sent at once."""
DECISIONS_IN_ANSWER = 20
"""Most decisions in one answer: the latest ones."""


def requested_id(payload: bytes) -> str:
    """Return the request id in a query; empty asks for the latest decisions."""
    return bare_id(payload.decode("utf-8", "replace"))


def explain(router: str, models: Iterable[ModelRouter], request: str, now_s: float) -> Explanations:
    """Return the decisions of a request, or of all requests if `request` is empty."""
    found = [
        (decision.at_s, model.model, decision)
        for model in models
        for decision in model.decisions.find(request, DECISIONS_IN_ANSWER)
    ]
    found.sort(key=lambda each: each[0])
    latest = found[-DECISIONS_IN_ANSWER:]
    return Explanations(router, [_explained(name, decision, now_s) for _, name, decision in latest])


def _explained(model: str, decision: Decision, now_s: float) -> Explanation:
    selected = decision.selected
    return Explanation(
        model=model,
        router=selected.router,
        request=selected.request,
        attempt=selected.attempt,
        age_s=round(now_s - decision.at_s, 6),
        instance=selected.instance,
        rank=selected.rank,
        reason=selected.reason,
        candidates=selected.candidates,
        prompt_tokens=decision.request.prompt_tokens,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        actual_cached_tokens=decision.actual_cached_tokens,
        first_token_s=_rounded(decision.first_token_s),
        ended_s=_rounded(decision.ended_s),
        lora=decision.request.lora,
        trace=decision.trace,
        passed_over=decision.passed_over,
        images=decision.request.images,
        image_tokens=decision.request.image_tokens,
    )


def _rounded(seconds: float | None) -> float | None:
    """Round to microseconds."""
    return None if seconds is None else round(seconds, 6)


def policy_problem(models: Iterable[ModelRouter]) -> str:
    """Return why kv made choices instead of the policy, for the worst of the models; empty if it made none."""
    guards = [model.guard for model in models]
    if any(guard.disabled for guard in guards):
        return "off: kv chooses"
    failures = sum(guard.failures for guard in guards)
    return f"failed: kv made {failures} of its choices" if failures else ""


def model_state(model: ModelRouter) -> ModelState:
    """Return the sizes of a model's state."""
    index = model.index.statistics()
    return ModelState(
        model=model.model,
        instances=len(model.cards),
        reservations=model.load.statistics().reservations,
        index_blocks=index.blocks,
        index_bytes=index.bytes,
    )


def heat(router: str, models: Mapping[str, ModelRouter], most: int, now_s: float) -> HeatState:
    """Return the hottest prefixes of all models, at most `most` of each."""
    requests, oldest_s, asked, found = 0, now_s, 0, list[PrefixHeat]()
    for name, model in models.items():
        entries = model.decisions.entries()
        prefixes, distinct = hot_prefixes(name, model.index, entries, most, now_s)
        requests += len({entry.selected.request for entry in entries})
        asked, found = asked + distinct, found + prefixes
        oldest_s = min([oldest_s, *(entry.at_s for entry in entries[:1])])
    blocks = sum(model.index.statistics().blocks for model in models.values())
    return HeatState(router, requests, round(now_s - oldest_s, 3), asked, blocks, found)


class Queries:
    """Answers queries until closed."""

    def __init__(
        self,
        runtime: Runtime,
        config: RouterConfig,
        models: Mapping[str, ModelRouter],
        feeds: Mapping[str, EventFeed],
        left_out: LeftOutWorkers,
        limited_log: RateLimitedLog,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._models = models
        self._feeds = feeds
        self._left_out = left_out
        self._limited_log = limited_log
        self._pausing: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Drop the answers that are still delayed."""
        for task in self._pausing:
            task.cancel()

    async def answer_explain(self, message: Message) -> None:
        """Answer with the decisions of all models. The payload is a request id, or empty for the latest decisions."""
        await self._answer("explain", message, EXPLANATIONS.encode(self._found(self._models, message), JSON_HEADER))

    async def answer_explain_of(self, model: str, message: Message) -> None:
        """Answer with the decisions of one model. Every router that routes the model receives this query."""
        found = self._found([model], message)
        payload = EXPLANATIONS.encode(found, JSON_HEADER)
        if found.decisions or len(self._pausing) >= DELAYED_LIMIT:
            await self._answer("explain", message, payload)
            return
        task = self._runtime.tasks.create_task(self._answer_later(message, payload))
        self._pausing.add(task)
        task.add_done_callback(self._pausing.discard)

    async def answer_state(self, message: Message) -> None:
        """Answer with the state of this router; the payload is ignored."""
        sources = [feed.status() for _, feed in sorted(self._feeds.items())]
        state = RouterState(
            self._runtime.instance,
            self._config.policy,
            [model_state(model) for model in self._models.values()],
            sources,
            policy_trouble=policy_problem(self._models.values()),
            events=self._config.events,
            left_out={each.instance: each.reason for each in self._left_out.found},
        )
        await self._answer("state", message, ROUTER_STATE.encode(state, JSON_HEADER))

    async def answer_heat(self, message: Message) -> None:
        """Answer with the prefixes that the latest prompts share; the payload is how many are wanted."""
        now_s = asyncio.get_running_loop().time()
        most = int(message.payload) if message.payload.isdigit() and len(message.payload) < 8 else PREFIXES_MOST
        await self._answer(
            "heat", message, HEAT.encode(heat(self._runtime.instance, self._models, most, now_s), JSON_HEADER)
        )

    def _found(self, names: Iterable[str], message: Message) -> Explanations:
        models = [self._models[name] for name in names if name in self._models]
        now_s = asyncio.get_running_loop().time()
        return explain(self._runtime.instance, models, requested_id(message.payload), now_s)

    async def _answer_later(self, message: Message, payload: bytes) -> None:
        await asyncio.sleep(UNKNOWN_REQUEST_DELAY_S)
        await self._answer("explain", message, payload)

    async def _answer(self, channel: str, message: Message, payload: bytes) -> None:
        if not message.reply:
            return
        try:
            await self._runtime.bus.publish(message.reply, payload, headers=JSON_HEADER)
        except (BusDown, ProtocolError) as wrong:  # too large, or an invalid reply subject
            self._limited_log.warn(channel, wrong)
