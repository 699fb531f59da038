"""Prober: asks ranks of vLLM for a few tokens, when they start, wake, or were idle for long.

A core that is frozen or stuck looks to vLLM like an idle one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from services.worker.config import HealthConfig
from services.worker.contracts.messages import Probed
from services.worker.engine.one_line import one_line
from services.worker.vllm.images import ImagePrompts
from services.worker.vllm.ranks import EngineRank
from shared.errors import Unavailable
from shared.image_size import prepared_size

_PROBE_SIDE = 224
"""Pixels of a side of the picture that a vLLM which only encodes is probed with, before it is prepared."""
SALT = "headrace probe"
"""The cache salt of probes, so that they find and leave no blocks of clients."""


class Prober:
    """Probes the ranks of one AsyncLLM."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: HealthConfig,
        *,
        pooling: bool,
        report: Callable[[Probed], None],
        encodes: ImagePrompts | None = None,
    ) -> None:
        """`pooling`: the model makes embeddings. `report` gets the outcome of each probe of an idle rank. `encodes` is
        that of a vLLM that only encodes: a probe of it is an image, which is not stored."""
        self._llm = llm
        self._config = config
        self._pooling = pooling
        self._report = report
        self._encodes = encodes
        self._count = 0
        self._idle: set[int] = set()
        """The ranks that are probed because they are idle."""
        self.paused = 0
        """How many operations are under way; idle ranks are not probed meanwhile."""

    async def probe(self, limit_s: float, ranks: Iterable[EngineRank]) -> None:
        """Have these ranks compute a prefill and a decode each, with log probabilities, since vLLM compiles a kernel
        for the first ones. Raise TimeoutError, and what vLLM raises."""
        await asyncio.gather(*(self._probe(limit_s, rank, logprobs=1) for rank in ranks))

    async def probe_idle(self, rank: EngineRank) -> None:
        """Probe a rank that is idle, unless it is being probed, and report the outcome. Raise Unavailable if it
        does not answer in time or fails."""
        if self.paused or rank.number in self._idle:
            return
        self._idle.add(rank.number)
        begun_s, limit_s = time.monotonic(), self._config.limit_s
        failed = ""
        try:
            await self._probe(limit_s, rank)
        except TimeoutError:
            failed = f"the idle engine did not compute a token in {limit_s:g} s"
        except Exception as wrong:  # noqa: BLE001 - an engine that cannot compute a token is replaced
            failed = one_line(wrong)
        finally:
            self._idle.discard(rank.number)
        if self.paused and failed:  # an operation ended it, and says itself how it went
            return
        self._report(Probed(time.monotonic() - begun_s, failed, rank.number))
        if failed:
            raise Unavailable(failed)

    async def _probe(self, limit_s: float, rank: EngineRank, *, logprobs: int | None = None) -> None:
        self._count += 1
        name = f"probe-{self._count}"
        prompt: TokensInput | MultiModalInput = tokens_input(list(self._config.prompt), cache_salt=SALT)
        if self._encodes is not None:
            width, height = prepared_size(self._encodes.input, _PROBE_SIDE, _PROBE_SIDE)
            prompt = self._encodes.alone(bytes(3 * width * height), name, width, height)
        params: Any
        if self._pooling:
            params = PoolingParams(task="embed")
        else:
            params = SamplingParams(
                max_tokens=self._config.max_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        try:
            async with asyncio.timeout(limit_s):  # AsyncLLM.encode would take no rank
                collector = await self._llm.add_request(name, prompt, params, data_parallel_rank=rank.number)
                while not (await collector.get()).finished:
                    pass
        except (TimeoutError, asyncio.CancelledError):
            await self._llm.abort([name])
            raise
        finally:
            rank.active_s = time.monotonic()
