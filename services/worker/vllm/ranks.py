"""EngineRanks: the data-parallel ranks of a vLLM engine, and what is new of each. Pure.

    Submit ──▶ its rank's AttemptTable                         ┌──▶ Stepped of rank 0
    vLLM's events, statistics and outputs of a rank ──▶ that rank ──▶ Stepped of rank 1 …
                                                               └──▶ all share `progress` and `event_sequence`

Each rank is a core of vLLM with a cache of its own. Its report carries its events with the digest after them, so that
the digests of all ranks are true at each number of a batch.

Ranks of one engine are ranks of one worker, and routers choose the rank, which switches vLLM's own balancing off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.worker.contracts.messages import Exchanged, Stepped, Submit
from services.worker.scheduler.outcome import Outcome
from services.worker.vllm.attempts import AttemptTable
from services.worker.vllm.blocks import EngineBlocks
from services.worker.vllm.kv_transfer import sum_exchanged
from services.worker.vllm.stats import EngineStats
from shared.messages.kv_events import AllBlocksCleared, KvEvent

MOST_EMBEDDED_BYTES = 256 << 10
"""Most bytes of embeddings, or of a prompt's log probabilities, in one report, so that no frame nears the least payload
limit of a NATS server, 1 MB."""


class EngineRank:
    """One rank: its attempts, its cached blocks and its load."""

    def __init__(self, number: int, *, block_size: int, capacity_blocks: int, now_s: float) -> None:
        self.number = number
        self.attempts = AttemptTable()
        self.blocks = EngineBlocks(block_size)
        self.stats = EngineStats(capacity_blocks)
        self.active_s = now_s
        """When the rank last did something, or last got work while it had none."""
        self._new_events: list[KvEvent] = [AllBlocksCleared()]
        self._reported_steps = 0

    def add(self, submit: Submit, now_s: float) -> str:
        """Add an attempt. Return its key."""
        if not len(self.attempts):
            self.active_s = now_s
        return self.attempts.add(submit, now_s)

    def apply_events(self, events: Iterable[KvEvent]) -> None:
        """Take up a batch of vLLM's KV events."""
        self._new_events.extend(self.blocks.apply(events))

    def take_news(self) -> tuple[Outcome, list[KvEvent], int]:
        """Return what happened to the attempts, the events and the number of steps since the last call."""
        events, self._new_events = self._new_events, []
        steps, self._reported_steps = self.stats.steps - self._reported_steps, self.stats.steps
        return self.attempts.take_outcome(), events, steps


class EngineRanks:
    """All ranks of one engine, by number."""

    def __init__(self, count: int, *, block_size: int, capacity_blocks: int, now_s: float) -> None:
        """`capacity_blocks` are those of each rank."""
        self.all = tuple(
            EngineRank(number, block_size=block_size, capacity_blocks=capacity_blocks, now_s=now_s)
            for number in range(count)
        )
        self._progress = 0
        self._exchanged: dict[int, Exchanged] = {}
        """Rank → its counts of blocks exchanged with the kvbm."""
        self._exchanged_changed = False
        self.event_sequence = -1
        """Number of the last event batch so far."""

    @property
    def living(self) -> int:
        """Number of attempts at all ranks."""
        return sum(len(rank.attempts) for rank in self.all)

    def find(self, request: str, attempt: int) -> tuple[EngineRank, str] | None:
        """Return the rank and the key of a living attempt."""
        for rank in self.all:
            key = rank.attempts.find(request, attempt)
            if key is not None:
                return rank, key
        return None

    def uses_lora(self, name: str) -> bool:
        return any(rank.attempts.uses_lora(name) for rank in self.all)

    def idle(self, now_s: float, idle_s: float) -> list[EngineRank]:
        """Return the ranks without attempts that did nothing for `idle_s`."""
        return [rank for rank in self.all if not len(rank.attempts) and now_s - rank.active_s >= idle_s]

    def stalled(self, now_s: float, stall_s: float) -> EngineRank | None:
        """Return a rank that has attempts and did nothing for `stall_s`."""
        stalled = (rank for rank in self.all if len(rank.attempts) and now_s - rank.active_s >= stall_s)
        return next(stalled, None)

    def record_exchanged(self, rank: int, exchanged: Exchanged) -> None:
        """Record a rank's counts since the start."""
        if self._exchanged.get(rank) != exchanged:
            self._exchanged[rank] = exchanged
            self._exchanged_changed = True

    def take_reports(self) -> list[Stepped]:
        """Return the reports of all ranks that have something new: one of each, or several where it would be too
        large."""
        reports: list[Stepped] = []
        for rank in self.all:
            outcome, events, steps = rank.take_news()
            if not (outcome.parts or events or steps):
                continue
            self._progress += max(1, steps)
            self.event_sequence += bool(events)
            tokens, elapsed_s = rank.stats.take_step_counts()
            first, *others = outcome.split(MOST_EMBEDDED_BYTES)
            reports.append(self.report(rank, first, events, steps, tokens, elapsed_s))
            reports.extend(self.report(rank, other) for other in others)
        return reports

    def report(
        self,
        rank: EngineRank,
        outcome: Outcome,
        events: Sequence[KvEvent] = (),
        steps: int = 0,
        tokens: int = 0,
        elapsed_s: float = 0.0,
    ) -> Stepped:
        """Return a report of what happened at a rank, with the numbers as they are."""
        changed, self._exchanged_changed = self._exchanged_changed, False
        return outcome.to_stepped(
            list(events),
            progress=self._progress,
            event_sequence=self.event_sequence,
            digest=rank.blocks.digest,
            load=rank.stats.load(unbegun_tokens=rank.attempts.unbegun_tokens, cached_blocks=len(rank.blocks)),
            steps=steps,
            tokens=tokens,
            elapsed_s=elapsed_s,
            exchanged=sum_exchanged(list(self._exchanged.values())) if changed else None,
            rank=rank.number,
        )

    def validate(self) -> None:
        """Raise AssertionError if the parts contradict each other."""
        for rank in self.all:
            rank.attempts.validate()
            rank.blocks.validate()
