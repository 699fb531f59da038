"""The reservations that others made before this router came: asked for by one that starts, told by one that runs.

    hears the model's load events ─▶ asks the oldest other router ─▶ merges ─▶ answers questions
                                        └─ gone, silent, senseless: the next one, ROUTERS_ASKED in all, then without

What is told meanwhile comes by the load events; `Load` ignores the reservation of an attempt whose end it has heard.
Without an answer the workers' own reports say what runs there.
"""

from __future__ import annotations

import asyncio
import logging

from services.router.metrics import RouterMetrics
from services.router.selection.model_router import ModelRouter
from shared import subjects
from shared.bus.contract import Message
from shared.errors import ProtocolError, Unavailable
from shared.messages import (
    RESERVATIONS,
    RESERVATIONS_REQUEST,
    Reservations,
    ReservationsRequest,
)
from shared.runtime.lifecycle import Runtime

ROUTERS_ASKED = 3
ANSWER_TIMEOUT_S = 1.0
"""After that without a message, a router is given up."""
RESERVATIONS_PER_MESSAGE = 1000
"""Far below the payload limit, whatever the ids, and a few milliseconds of work."""

_log = logging.getLogger(__name__)


async def fetch_reservations(runtime: Runtime, model: ModelRouter, metrics: RouterMetrics) -> None:
    """Take on the living reservations of a model from another router, if there is one."""
    others = [
        each
        for each in runtime.directory.instances.values()
        if each.service == "router" and each.instance != runtime.instance
    ]
    failures: list[str] = []
    for router in sorted(others, key=lambda each: each.started)[:ROUTERS_ASKED]:
        try:
            taken = await _fetch_from(runtime, model, router.instance)
        except (Unavailable, ProtocolError) as wrong:
            failures.append(f"{router.instance}: {wrong}")
            continue
        metrics.joins.labels("told").inc()
        _log.info("model %s: %d reservations from router %s", model.model, taken, router.instance)
        return
    if failures:
        metrics.joins.labels("failed").inc()
        _log.error("model %s: no router told its reservations: %s", model.model, "; ".join(failures))
    else:
        metrics.joins.labels("alone").inc()


async def _fetch_from(runtime: Runtime, model: ModelRouter, router: str) -> int:
    """How many came. Raises Unavailable or ProtocolError; what came until then is kept."""
    taken = 0
    now = asyncio.get_running_loop().time
    subject = subjects.reservations(runtime.namespace, router)
    request = RESERVATIONS_REQUEST.encode(ReservationsRequest(model.model))
    async with runtime.bus.stream(subject, request, idle_timeout_s=ANSWER_TIMEOUT_S) as answers:
        async for message in answers:
            part = RESERVATIONS.decode(message.payload)
            for reserved in part.reserved:
                model.apply_load_event(reserved, now())
            for attempt in part.prefilled:
                model.load.mark_prefilled(attempt)
            taken += len(part.reserved)
    return taken


async def send_reservations(runtime: Runtime, message: Message, model: ModelRouter | None, name: str) -> None:
    """Answer with all reservations of a model, or with none where it is not known. Raises BusDown."""
    living = [] if model is None else model.load.reservations()
    for start in range(0, max(len(living), 1), RESERVATIONS_PER_MESSAGE):
        part = living[start : start + RESERVATIONS_PER_MESSAGE]
        answer = Reservations(
            name,
            [each.reserved for each in part],
            [(each.reserved.request, each.reserved.attempt) for each in part if each.prefilled],
        )
        last = start + RESERVATIONS_PER_MESSAGE >= len(living)
        headers = {**(JSON_HEADER if is_json(message.headers) else {}), **({LAST_HEADER: "true"} if last else {})}
        await runtime.bus.publish(message.reply, RESERVATIONS.encode(answer, headers), headers=headers)
        await asyncio.sleep(0)
