"""Asks for room on a GPU whose models take turns, while an engine loads there (native/cuda/turn_room.py waits for it).

A model that is awake has most of the GPU, and stays awake until something else is waited for. So the process that
decides hears of an engine that loads, again and again, and has others leave for it (turns/decider.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from shared import subjects
from shared.errors import ProtocolError, Unavailable
from shared.messages.turns import WANT_MODEL, WantModel
from shared.runtime.runtime import Runtime

ASK_EVERY_S = 0.5
"""Seconds between two questions, and the most for an answer."""
LOADING_LIMIT_S = 900.0
"""Seconds for which an engine may load until others need not leave for it any longer: its wait for room, and a large
model."""


async def ask_for_room(
    runtime: Runtime, device: str, model: str, loads: Callable[[], bool], limit_s: float = LOADING_LIMIT_S
) -> None:
    """Say that the model loads, as long as `loads` says so, at most for `limit_s` at a time, until cancelled."""
    now = asyncio.get_running_loop().time
    subject = subjects.turns(runtime.namespace, device)
    want = WANT_MODEL.encode(WantModel(runtime.instance, model, 0, 0.0, loads=True))
    until_s = now() + limit_s
    while True:
        if not loads():
            until_s = now() + limit_s
        elif now() < until_s:
            with suppress(Unavailable, ProtocolError):  # it is asked again
                await runtime.bus.request(subject, want, timeout_s=ASK_EVERY_S)
        await asyncio.sleep(ASK_EVERY_S)
