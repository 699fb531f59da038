"""ImagesElsewhere: has images of a request encoded by an encode worker, before another worker computes the prompt.

    Encode, one for each image ──▶ the encode worker ──▶ Encoded: the embeddings are in the kvbm
                                                    └──▶ failed, or late: the prompt's worker encodes the image

Whatever happens, the request goes on.
"""

from __future__ import annotations

import asyncio

from services.frontend.metrics import Metrics
from services.frontend.requests.actions import ImagesApart
from services.frontend.requests.stream import InferenceRequest
from shared import subjects
from shared.errors import PayloadTooLarge, ProtocolError, Unavailable
from shared.hashing import salted_image_key
from shared.messages.encode import ENCODE, ENCODED, Encode
from shared.messages.generate import Image
from shared.runtime.runtime import Runtime

WAIT_MOST_S = 10.0
"""The longest wait in seconds, whatever the router says."""


class ImagesElsewhere:
    """The orders of all requests."""

    def __init__(self, runtime: Runtime, metrics: Metrics) -> None:
        self._runtime = runtime
        self._metrics = metrics

    async def encode(self, request: InferenceRequest, attempt: int, apart: ImagesApart) -> None:
        """Wait until the images are encoded, or have failed, or their time has passed."""
        loop = asyncio.get_running_loop()
        wait_s = min(apart.wait_s, WAIT_MOST_S, request.deadline - loop.time())
        if wait_s <= 0:
            return
        images = [request.images[number] for number in apart.numbers if 0 <= number < len(request.images)]
        orders = (self._encode(request, image, apart.instance, wait_s) for image in images)
        began = loop.time()
        failed = [why for why in await asyncio.gather(*orders) if why]
        self._metrics.images_apart.labels("encoded").inc(len(images) - len(failed))
        self._metrics.images_apart.labels("failed").inc(len(failed))
        note = f"{apart.instance} had {len(images)} of its images to encode: {loop.time() - began:.2f} s"
        if failed:
            note += f"; {len(failed)} are left to its own worker: {failed[0]}"
        self._runtime.notes.requests.add(request.id, note, loop.time(), attempt=attempt)

    async def _encode(self, request: InferenceRequest, image: Image, instance: str, wait_s: float) -> str:
        """Return why the image was not encoded. Empty if it was."""
        key, size = salted_image_key(image.key, request.salt), (image.width, image.height)
        order = Encode(request.model, key, image.pixels, wait_s, *size)
        subject = subjects.worker(self._runtime.namespace, instance, "encode")
        try:
            reply = await self._runtime.bus.request(subject, ENCODE.encode(order), timeout_s=wait_s)
            return ENCODED.decode(reply.payload).failed
        except (Unavailable, PayloadTooLarge, ProtocolError) as why:
            return str(why)
