"""vLLM's scheduler, with steps that take no longer than `worker.step_s`: it has a bound of its own for each step's
tokens, and which ones they are is vLLM's choice.

The core is a process of vLLM's, which makes its scheduler of `scheduler_cls` and hands over its own configuration
alone; so the environment has the seconds.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.worker.limits import LEAST_STEP_TOKENS
from services.worker.vllm.step_pace import STEP_S, StepPace

_log = logging.getLogger(__name__)


def paced_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Any:
    """Return a scheduler for the configuration. It is vLLM's own if prompts, or images in them, cannot be split: one
    that has more tokens than a step would wait for ever."""
    config = vllm_config.scheduler_config
    own = AsyncScheduler if config.async_scheduling else Scheduler
    if not config.enable_chunked_prefill or config.disable_chunked_mm_input:
        _log.warning("step_s has no effect: vLLM does not split this model's prompts")
        return own(vllm_config=vllm_config, **arguments)
    return _paced(own)(vllm_config=vllm_config, **arguments)


def _paced(own: Any) -> Any:
    """Return a class of vLLM's schedulers with a pace."""

    class PacedScheduler(own):  # type: ignore[misc]
        max_num_scheduled_tokens: int

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._pace = StepPace(
                step_s=float(os.environ[STEP_S]),
                # vLLM schedules a request with one token left only if its drafts fit, too.
                least_tokens=max(LEAST_STEP_TOKENS, self.block_size, 1 + self.num_spec_tokens),
                most_tokens=self.max_num_scheduled_tokens,
            )

        def schedule(self, *arguments: Any, **named: Any) -> Any:
            self.max_num_scheduled_tokens = self._pace.allow_tokens(len(self.running) * (1 + self.num_spec_tokens))
            output = super().schedule(*arguments, **named)
            self._pace.scheduled(time.monotonic())
            return output

        def update_from_output(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            tokens = scheduler_output.num_scheduled_tokens
            self._pace.processed(sum(tokens.values()), len(tokens), time.monotonic())
            return super().update_from_output(scheduler_output, *arguments, **named)

    return PacedScheduler
