"""Copies the reservations of another router to a router that starts.

    subscribes to the model's load events ─▶ asks the oldest other router ─▶ merges its answer ─▶ answers Selects
                                                └─ gone, silent or invalid: asks the next one, ROUTERS_ASKED in all,
                                                   then starts without reservations

Changes in the meantime come as load events; the tracker ignores the reservation of an attempt whose end it has
received. Without an answer, the workers' own load reports show what runs there.

docs/decisions/0014 gives the reasons.
"""

from __future__ import annotations

import asyncio
import logging

from services.router.metrics import RouterMetrics
from services.router.selection.model_router import ModelRouter
from shared import subjects
from shared.bus.contract import Message
from shared.errors import ProtocolError, Unavailable
from shared.messages.select import RESERVATIONS, RESERVATIONS_REQUEST, Reservations, ReservationsRequest
from shared.runtime.runtime import Runtime

ROUTERS_ASKED = 3
ANSWER_TIMEOUT_S = 1.0
"""Seconds without a message after which a router's answer is given up."""
RESERVATIONS_PER_MESSAGE = 1000
"""Reservations in one message: far below the payload limit, however long the ids, and a few milliseconds of work."""

_log = logging.getLogger(__name__)


async def fetch_reservations(runtime: Runtime, model: ModelRouter, metrics: RouterMetrics) -> None:
    """Copy the living reservations of a model from another router, if there is one."""
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
        _log.info("model %s: copied %d reservations from router %s", model.model, taken, router.instance)
        return
    if failures:
        metrics.joins.labels("failed").inc()
        _log.error(
            "model %s: no router sent its reservations; starting without them: %s", model.model, "; ".join(failures)
        )
    else:
        metrics.joins.labels("alone").inc()


async def _fetch_from(runtime: Runtime, model: ModelRouter, router: str) -> int:
    """Return the number of reservations received. Raise Unavailable or ProtocolError; reservations that came before
    that are kept."""
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
    """Answer with all reservations of a model, or with none if the model is unknown. Raise BusDown."""
    living = [] if model is None else model.load.reservations()
    for start in range(0, max(len(living), 1), RESERVATIONS_PER_MESSAGE):
        part = living[start : start + RESERVATIONS_PER_MESSAGE]
        answer = Reservations(
            name,
            [each.reserved for each in part],
            [(each.reserved.request, each.reserved.attempt) for each in part if each.prefilled],
        )
        last = start + RESERVATIONS_PER_MESSAGE >= len(living)
        headers = message.reply_headers(last=last)
        await runtime.bus.publish(message.reply, RESERVATIONS.encode(answer, headers), headers=headers)
        await asyncio.sleep(0)
