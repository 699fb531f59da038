"""The first tokens of an engine, computed by a runner that notices a wrong block."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.worker.contracts.runner import Drawn, Work
from services.worker.engine.warm_up import WARM_TOKENS, warm_up
from shared.errors import ModelError
from tests.worker.fake_runner import FakeRunner


class Watched(FakeRunner):
    def __init__(self, context_length: int, *, fails_at: int = 0) -> None:
        """`fails_at`: the step in which the device fails, from 1 on."""
        super().__init__(block_size=4, capacity_blocks=-(-context_length // 4), context_length=context_length)
        self.steps: list[tuple[int, int]] = []
        self._fails_at = fails_at

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        [work] = works
        self.steps.append((work.start, work.end))
        if len(self.steps) == self._fails_at:
            raise RuntimeError("the GPU failed: an illegal address")
        return super().step(works)


@pytest.mark.parametrize(("context_length", "tokens"), [(1 << 15, 64), (65, 64), (64, 63), (40, 39), (4, 3), (2, 1)])
def test_a_prompt_and_one_token_after_it_are_computed_as_far_as_the_context_goes(
    context_length: int, tokens: int
) -> None:
    runner = Watched(context_length)
    warm_up(runner, "cpu")
    assert runner.steps == [(0, tokens), (tokens, tokens + 1)]


def test_on_a_gpu_the_prompt_is_as_long_as_the_largest_step() -> None:
    runner = Watched(1 << 15)
    warm_up(runner, "cuda")
    assert runner.steps[0] == (0, WARM_TOKENS["cuda"]) == (0, 8192)


def test_a_context_of_one_token_has_no_room_for_it() -> None:
    runner = Watched(1)
    warm_up(runner, "cpu")
    assert not runner.steps


@pytest.mark.parametrize("step", [1, 2])
def test_a_device_that_fails_is_named_with_what_was_computed(step: int) -> None:
    with pytest.raises(
        ModelError, match="the first tokens, 64 of a prompt and one after it, cannot be computed: the GPU"
    ):
        warm_up(Watched(128, fails_at=step), "cpu")
