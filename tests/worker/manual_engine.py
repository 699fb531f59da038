"""A scheduler and a fake runner, stepped by hand."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import add

import msgspec

from services.worker.config import Offload
from services.worker.contracts.messages import AttemptNote, Begun, Submit
from services.worker.contracts.runner import Drawn, Work
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.outcome import Outcome
from services.worker.scheduler.scheduler import Scheduler
from shared.hashing import pack_tokens, unpack_tokens
from shared.kv_events import to_kv_events, to_snapshot
from shared.messages.frames import NOT_FINITE, Part, PromptLogprobs
from shared.messages.generate import Sampling
from shared.messages.kv_events import BlockRemoved, BlockStored
from tests.worker.fake_runner import EOS, FakeRunner

PIECE_BYTES = 48
"""The most bytes of log-probabilities of a prompt in a part."""


class Engine:
    """Checks both, and the events, after every step."""

    def __init__(
        self,
        *,
        block_size: int = 2,
        capacity_blocks: int = 16,
        context_length: int = 64,
        max_running: int = 8,
        max_waiting: int = 64,
        max_waiting_tokens: int = 1 << 20,
        step_tokens: int = 8,
        first_tokens_per_s: float = 1e6,
        offload: Offload = "filled",
        offers_limit: int = 64,
        wait_s: float = 0.0,
        overtaking: float = 0.0,
        lone_step_s: float = 0.0,
    ) -> None:
        self.runner = FakeRunner(block_size=block_size, capacity_blocks=capacity_blocks, context_length=context_length)
        self.scheduler = Scheduler(
            SchedulerLimits(
                model="model",
                context_length=context_length,
                eos_token_ids=frozenset((EOS,)),
                block_size=block_size,
                capacity_blocks=capacity_blocks,
                max_running=max_running,
                max_waiting=max_waiting,
                max_waiting_tokens=max_waiting_tokens,
                max_step_tokens=step_tokens,
                first_tokens_per_s=first_tokens_per_s,
                offload=offload,
                offers_limit=offers_limit,
                wait_s=wait_s,
                overtaking=overtaking,
                lone_step_s=lone_step_s,
            )
        )
        self.now_s = 0.0
        self.copies = False
        """Copies read the device: a block may outlive its parent then."""
        self.cached: set[int | bytes] = set()
        self.parts: dict[tuple[str, int], list[Part]] = defaultdict(list)
        self.begun: list[Begun] = []
        self.notes: list[AttemptNote] = []

    def submit(
        self,
        request: str,
        prompt: Sequence[int],
        *,
        attempt: int = 1,
        produced: Sequence[int] = (),
        sampling: Sampling | None = None,
        max_tokens: int = 8,
        time_left_s: float = 1e9,
        wait_left_s: float | None = None,
        priority: int = 0,
        salt: str = "",
        prefill_only: bool = False,
    ) -> None:
        self.scheduler.submit(
            Submit(
                request=request,
                attempt=attempt,
                frontend="frontend",
                tokens=pack_tokens((*prompt, *produced)),
                prompt_tokens=len(prompt),
                sampling=sampling or Sampling(max_tokens=max_tokens),
                time_left_s=time_left_s,
                wait_left_s=wait_left_s,
                salt=salt,
                priority=priority,
                prefill_only=prefill_only,
            ),
            self.now_s,
        )

    def expect(self, request: str, prompt: Sequence[int], *, time_left_s: float = 1e9) -> None:
        """Tell the scheduler of an attempt that may come."""
        tokens, sampling = pack_tokens(prompt), Sampling(max_tokens=8)
        expected = Submit(request, 1, "frontend", tokens, len(prompt), sampling, time_left_s)
        self.scheduler.prefetch(expected, "prefill", self.now_s)

    def step(self, elapsed_s: float = 0.01) -> list[Work]:
        """The works as they were computed; the scheduler's own move on."""
        works = self.scheduler.schedule(self.now_s)
        computed = [msgspec.structs.replace(work, history=list(work.history)) for work in works]
        self.take(self.scheduler.advance(self.runner.step(works), elapsed_s))
        self.now_s += elapsed_s
        self.check()
        return computed

    def take(self, outcome: Outcome) -> None:
        self.begun += outcome.begun
        self.notes += outcome.notes
        for event in to_kv_events(outcome.events, self.runner.facts.block_size):
            match event:
                case BlockStored(block_hashes=hashes):
                    assert self.cached.isdisjoint(hashes)
                    self.cached.update(hashes)
                case BlockRemoved(block_hashes=hashes):
                    assert self.cached.issuperset(hashes)
                    self.cached.difference_update(hashes)
                case _:
                    raise AssertionError(event)
        for each in outcome.split(PIECE_BYTES):
            for part in itertools.chain(*each.parts.values()):
                earlier = self.parts[part.request, part.attempt]
                assert not earlier or earlier[-1].finish is None, "a part after the finish"
                earlier.append(part)

    def check(self) -> None:
        self.scheduler.validate()
        snapshot = to_snapshot(self.scheduler.kv_cache.snapshot())
        assert {block.hash for block in snapshot} == self.cached
        digest = 0
        seen: set[int] = set()
        for block in snapshot:
            digest ^= block.hash
            orphan = self.copies and block.parent not in self.cached
            assert block.parent is None or block.parent in seen or orphan, "a child before its parent"
            seen.add(block.hash)
        assert digest == self.scheduler.kv_cache.digest

    def run(self, elapsed_s: float = 0.01) -> None:
        for _ in range(10_000):
            if not self.scheduler.busy:
                break
            self.step(elapsed_s)
        assert not self.scheduler.busy
        assert self.scheduler.load().held_blocks == 0

    def output(self, request: str, attempt: int = 1) -> list[int]:
        tokens: list[int] = []
        parts = self.parts[request, attempt]
        for part in parts:
            assert part.first == parts[0].first + len(tokens), "a gap or a repeat"
            tokens += unpack_tokens(part.tokens)
        return tokens

    def prompt(self, request: str, attempt: int = 1) -> PromptLogprobs | None:
        """Return the log-probabilities of an attempt's prompt so far, joined."""
        joined: PromptLogprobs | None = None
        for part in self.parts[request, attempt]:
            one = part.prompt_logprobs
            if one is None:
                continue
            assert one.is_sound
            assert (one.first, part.tokens, part.finish) == (1 if joined is None else 1 + joined.count, b"", None)
            joined = (
                one
                if joined is None
                else PromptLogprobs(1, *map(add, msgspec.structs.astuple(joined)[1:], msgspec.structs.astuple(one)[1:]))
            )
        return joined

    def last(self, request: str, attempt: int = 1) -> Part:
        return self.parts[request, attempt][-1]


NOT_FINITE_ROW = Drawn(0, error=f"{NOT_FINITE}: its logits", suspect=True)


def step_with(engine: Engine, failing: Callable[[Work], bool]) -> int:
    """Make a step in which the numbers of some works are not finite; return of how many."""
    works = engine.scheduler.schedule(engine.now_s)
    drawn = engine.runner.step(works)
    failed = [bool(work.ends or work.scoring) and failing(work) for work in works]
    rows = [NOT_FINITE_ROW if is_failed else one for one, is_failed in zip(drawn, failed, strict=True)]
    engine.take(engine.scheduler.advance(rows, 0.01))
    engine.check()
    return sum(failed)
