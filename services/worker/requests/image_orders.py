"""EncodeServer: answers frontends that want an image encoded for other workers.

    Encode ──▶ checked, bounded ──▶ the engine looks it up, or encodes and stores it ──▶ Encoded

Only a worker with the role encode takes such orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.worker.contracts.messages import Ready
from services.worker.requests.validation import IMAGE_KEY_BYTES
from shared.bus.contract import Message
from shared.errors import ProtocolError, Unavailable
from shared.image_size import count_tokens
from shared.messages.encode import ENCODE, ENCODED, Encode, Encoded
from shared.runtime.runtime import Runtime

MOST_ORDERS = 64
"""The most images that wait at once. Each has its pixels in memory twice."""
MOST_TIME_S = 60.0
"""The longest time in seconds that a frontend may wait."""


class EncodeServer:
    """The orders of one worker."""

    def __init__(
        self,
        runtime: Runtime,
        model: str,
        answer: Callable[[Message, bytes], Awaitable[bool]],
        facts: Callable[[], Ready | None],
        encode: Callable[[Encode], Awaitable[str]],
        *,
        encodes: bool,
    ) -> None:
        """`facts` are None while the worker takes no orders. `encode` returns why the image was not encoded, or
        raises Unavailable. `encodes` says whether the worker has the role."""
        self._runtime = runtime
        self._model = model
        self._answer = answer
        self._facts = facts
        self._encode = encode
        self._encodes = encodes
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each order."""

    async def receive(self, message: Message) -> None:
        """Take an order, or refuse it. Raise ProtocolError for a message that has no subject for the answer."""
        if not message.reply:
            raise ProtocolError("no reply subject")
        try:
            order = ENCODE.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            await self._answer(message, ENCODED.encode(Encoded(str(wrong)), message.headers))
            return
        if refused := self._refusal(order):
            await self._answer(message, ENCODED.encode(Encoded(refused), message.headers))
            return
        task = self._runtime.tasks.create_task(self._carry_out(message, order), name="encode")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle_within(self, limit_s: float) -> None:
        """Wait until no order is left, for `limit_s` seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    def _refusal(self, order: Encode) -> str:
        """Return why an order is not taken. Empty if it is."""
        facts = self._facts()
        if not self._encodes:
            return "this worker does not have the role encode"
        if facts is None:
            return "this worker takes no orders now"
        if len(self._tasks) >= MOST_ORDERS:
            return f"{MOST_ORDERS} images wait already"
        return _fault(order, self._model, facts)

    async def _carry_out(self, message: Message, order: Encode) -> None:
        try:
            failed = await self._encode(order)
        except Unavailable as wrong:
            failed = str(wrong)
        await self._answer(message, ENCODED.encode(Encoded(failed), message.headers))


def _fault(order: Encode, model: str, facts: Ready) -> str:
    """Return what is wrong with an order, beginning with the field. Empty if nothing is."""
    if facts.images is None:
        return "this engine takes no images"
    takes = facts.images
    width, height = (order.width, order.height) if takes.unit else (takes.width, takes.height)
    if order.model != model:
        return f"model: {order.model[:256]}; this worker serves {model}"
    if len(order.key) != IMAGE_KEY_BYTES:
        return f"key: {len(order.key)} bytes, not {IMAGE_KEY_BYTES}"
    if not count_tokens(takes, width, height) or (takes.unit and width * height > takes.most_pixels):
        return f"width, height: {width}, {height}; no prepared image has this size"
    if len(order.pixels) != 3 * width * height:
        return f"pixels: {len(order.pixels)} bytes, not {3 * width * height}"
    if not 0.0 < order.time_left_s <= MOST_TIME_S:
        return f"time_left_s: {order.time_left_s:g}; it is above 0, and {MOST_TIME_S:g} at most"
    return ""
