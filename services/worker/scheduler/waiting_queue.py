"""WaitingQueue: the sequences that wait to be admitted, by rank, and what they wait for. Pure.

Rank: higher `priority` first, then answers that another worker has begun, then what is due earlier. A prompt is due
after its arrival, by `overtaking` times the time that computing its uncached tokens takes, and no later than leaves as
much before its wait or its deadline is over; with 0 the order is first come, first served. So a conversation's next
turn, most of which is cached, does not wait for a stranger's prompt of 20 s that came just before it. The long one is
overtaken only by prompts that come within the 20 s, and computes on after them in the blocks that it has. The head of
the queue is never passed over for want of blocks.

docs/decisions/0080 gives the reasons.
"""

from __future__ import annotations

from bisect import bisect_left

from services.worker.scheduler.queue_clock import Cause, QueueClock, WaitTimes
from services.worker.scheduler.sequence import Sequence, rank_of


class WaitingQueue:
    """Times are seconds on one clock."""

    def __init__(self, *, most_sequences: int, most_tokens: int) -> None:
        self._most_sequences = most_sequences
        self._most_tokens = most_tokens
        self.sequences: list[Sequence] = []
        """By rank; to be changed by `add` and `remove` alone."""
        self.tokens = 0
        """Uncomputed tokens of all sequences."""
        self.overtaken = 0
        """How often a sequence was put before one of its priority that had come earlier."""
        self._clock = QueueClock()

    def refusal(self, tokens: int) -> str:
        """Return why a new sequence of `tokens` tokens may not wait. Empty if it may. An empty queue takes one of any
        length, and a sequence that waits again is always taken."""
        if len(self.sequences) >= self._most_sequences:
            return f"overloaded: {len(self.sequences)} attempts wait"
        if self.sequences and self.tokens + tokens > self._most_tokens:
            return f"overloaded: {self.tokens} tokens wait"
        return ""

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Let the sequence wait from now on."""
        sequence.queued_s, sequence.queued_at = now_s, self._clock.read(now_s)
        at = bisect_left(self.sequences, sequence.rank, key=rank_of)
        for other in self.sequences[at:]:
            if other.arrival < sequence.arrival and other.submit.priority == sequence.submit.priority:
                other.overtaken += 1
                self.overtaken += 1
        self.sequences.insert(at, sequence)
        self.tokens += sequence.uncomputed

    def remove(self, sequence: Sequence) -> None:
        """End the sequence's wait. It has computed nothing since it was added."""
        found = self.sequences.pop(bisect_left(self.sequences, sequence.rank, key=rank_of))
        assert found is sequence
        self.tokens -= sequence.uncomputed

    def set_cause(self, cause: Cause | None, now_s: float) -> None:
        """The head of the queue waits for this from now on. None means for nothing that has a clock."""
        self._clock.set(cause, now_s)

    def waited_s(self, sequence: Sequence, now_s: float) -> WaitTimes:
        """Return for what the sequence has waited since it was added."""
        return self._clock.since(sequence.queued_at, now_s)

    def validate(self) -> None:
        """Raise AssertionError if the queue contradicts itself. O(sequences)."""
        assert sorted(self.sequences, key=rank_of) == self.sequences
        assert self.tokens == sum(sequence.uncomputed for sequence in self.sequences)
        for sequence in self.sequences:
            assert not sequence.blocks
            assert sequence.computed == 0
