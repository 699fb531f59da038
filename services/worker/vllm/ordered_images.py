"""OrderedImages: images that a vLLM with the role encode encodes for other workers.

    EncodeImage ──▶ a request of vLLM: the image alone ──▶ our connector looks it up, or stores it ──▶ ImageEncoded

Such a vLLM has no language model and no KV, so no connector for blocks says whether there is a kvbm: this does.
"""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.worker.contracts.messages import EncodeImage, KvbmLink
from services.worker.engine.one_line import one_line
from services.worker.kv_connector.contract import KvbmDown, KvbmUp
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.scheduler.encode_orders import LATE
from services.worker.vllm.images import ImagePrompts

AT_ONCE = 4
"""The most images that vLLM has at once, half of encoder_cache/wanted.py's MOST_IMAGES: each may still be stored while
the next one is asked for."""


class OrderedImages:
    """The orders of one engine. The worker bounds how many there are."""

    def __init__(self, llm: AsyncLLM, images: ImagePrompts, pool: Path) -> None:
        """`pool` is the directory of the machine's kvbm."""
        self._llm = llm
        self._images = images
        self._kvbm = SocketClient(pool)
        self._numbers = count(1)
        self._room = asyncio.Semaphore(AT_ONCE)

    async def encode(self, order: EncodeImage) -> str:
        """Have an image encoded, and stored unless it is there already or no slot is free: the worker that asked then
        encodes it in place. Return why it was not encoded; empty if it was. Raise EngineDeadError."""
        number = next(self._numbers)
        name = f"image-{number}"
        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            async with asyncio.timeout(order.time_left_s), self._room:
                # vLLM must not take it from a cache of its own: what was stored may be gone.
                given = order.pixels, f"{order.key.hex()}.{number}", order.width, order.height
                prompt = await asyncio.to_thread(self._images.alone, *given)
                collector = await self._llm.add_request(name, prompt, params)
                while not (await collector.get()).finished:
                    pass
        except TimeoutError:
            await self._llm.abort([name])
            return LATE
        except EngineDeadError:
            raise
        except Exception as wrong:  # noqa: BLE001 - vLLM raises many kinds; this order alone fails
            return one_line(wrong)
        return ""

    def take_link(self, now_s: float) -> KvbmLink | None:
        """Return whether there is a kvbm, if that has changed since the last call."""
        link = None
        for news in self._kvbm.poll(now_s):
            if isinstance(news, KvbmUp):
                link = KvbmLink(news.kvbm, namespace=news.namespace)
            elif isinstance(news, KvbmDown):
                link = KvbmLink("", reason=news.reason)
        return link

    def close(self) -> None:
        self._kvbm.close()
