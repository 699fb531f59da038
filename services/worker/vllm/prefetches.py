"""Prefetches: prompts that another worker computes, and that vLLM keeps a request for while our connector loads them.

Prefetch ──begin──▶ a request that vLLM keeps waiting ──▶ aborted: the attempt itself has come, was cancelled, or has
                                                           not come in time
"""

from __future__ import annotations

from itertools import count
from typing import Any

from vllm.inputs import MultiModalInput, TokensInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from services.worker.contracts.device_blocks import PREFETCHES
from services.worker.contracts.messages import Submit
from services.worker.vllm.kv_transfer import expected_params

PREFETCH_S = 15.0
"""Seconds after which a prompt is no longer expected."""
Name = tuple[str, int]
"""An attempt's name: (request, attempt)."""


class Prefetches:
    """The expected prompts of one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._numbers = count(1)
        self._keys: dict[Name, tuple[str, int, float]] = {}
        """Attempt → vLLM's name of its request, its rank, and when it is given up."""

    def at(self, rank: int) -> int:
        """Return how many requests stand for expected prompts at a rank."""
        return sum(number == rank for _, number, _ in self._keys.values())

    def accept(self, expected: Submit, now_s: float) -> str:
        """Return vLLM's name for an expected prompt. Empty if there are enough of them, or it is there already."""
        name = (expected.request, expected.attempt)
        if len(self._keys) >= PREFETCHES or name in self._keys:
            return ""
        key = f"expected-{next(self._numbers)}"
        self._keys[name] = key, expected.rank, now_s + min(expected.time_left_s, PREFETCH_S)
        return key

    async def begin(
        self, key: str, expected: Submit, prompt: TokensInput | MultiModalInput, lora: LoRARequest | None
    ) -> None:
        """Have vLLM keep a request for an accepted prompt. Raise what vLLM raises."""
        params = SamplingParams(
            max_tokens=1,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
            extra_args={"kv_transfer_params": expected_params()},
        )
        collector = await self._llm.add_request(
            key, prompt, params, lora_request=lora, data_parallel_rank=expected.rank
        )
        collector.put = _ignore
        if not any(key == kept for kept, _, _ in self._keys.values()):  # it ended meanwhile
            await self._llm.abort([key])

    def pop(self, name: Name) -> list[str]:
        """An attempt has come, or was cancelled. Return what vLLM is to abort."""
        key, _, _ = self._keys.pop(name, ("", 0, 0.0))
        return [key] if key else []

    def expire(self, now_s: float) -> list[str]:
        """Return what vLLM is to abort since the attempts did not come in time."""
        late = [name for name, (_, _, until_s) in self._keys.items() if until_s <= now_s]
        return [key for name in late for key in self.pop(name)]

    def clear(self) -> list[str]:
        """Return all that vLLM is to abort: nothing is expected any longer."""
        return [key for name in list(self._keys) for key in self.pop(name)]


def _ignore(_output: Any) -> None:
    """A request that stands for an expected prompt has no output but its abort."""
