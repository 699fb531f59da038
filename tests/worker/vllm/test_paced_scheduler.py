"""services/worker/vllm/paced_scheduler.py: a vLLM whose steps with prompts are bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Stepped
from shared.messages.generate import Sampling
from tests.tiny_model import write_tiny_model
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.environment import ON_DEVICE, PYTHON, needs_vllm

pytestmark = needs_vllm
BLOCK = 32
CHUNKS = 20
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


class CountedEngine(DrivenEngine):
    """An engine whose steps are counted."""

    steps = 0

    def _record_step(self, step: Stepped) -> None:
        self.steps += step.steps
        super()._record_step(step)


def prompt_of(number: int) -> list[int]:
    return [5 + (number * 37 + index * (1 + number % 5)) % 250 for index in range(CHUNKS * BLOCK)]


def config_of(directory: Path, **given: object) -> WorkerConfig:
    model = write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3)
    arguments = {"num_gpu_blocks_override": 128, "enforce_eager": True, "dtype": "float32", **ON_DEVICE, **given}
    fields = {"model": str(model), "engine": "vllm", "vllm": arguments, "vllm_python": str(PYTHON), "threads": 1}
    fields |= {"block_size": BLOCK, "step_s": 1e-6, "health": {"idle_s": 0.0}}  # no step is as short: a block each
    return msgspec.convert(fields, WorkerConfig)


async def test_a_prompt_is_computed_in_steps_that_take_no_longer_than_step_s(tmp_path: Path) -> None:
    engine = await CountedEngine.start(config_of(tmp_path))
    try:
        before = engine.steps
        alone = await engine.answer("alone", prompt_of(1), GREEDY)
        assert engine.steps - before >= CHUNKS - 2 + GREEDY.max_tokens
        again, other, third = await asyncio.gather(
            *(engine.answer(f"request {number}", prompt_of(number), GREEDY) for number in (1, 2, 3))
        )
        assert again == alone
        assert len(other) == len(third) == GREEDY.max_tokens
    finally:
        await engine.close()


async def test_a_prompt_of_which_one_token_is_left_has_room_for_its_drafts(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": BLOCK + 8, "prompt_lookup_max": 3}
    engine = await DrivenEngine.start(config_of(tmp_path, speculative_config=drafts))
    prompt = [*prompt_of(1), 7]
    try:
        first = await engine.answer("computed", prompt, GREEDY)
        assert await engine.answer("cached", prompt, GREEDY) == first
    finally:
        await engine.close()
