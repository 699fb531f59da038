"""What a policy is asked, and what it answers with. Pure.

One of each is made for every candidate and question, and some are kept: they hold no cycles, so the garbage collector
need not look at them (`gc=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec import Struct

from services.router.index.index import CandidateId
from services.router.selection.load import UNTOLD as UNTOLD
from services.router.selection.load import CandidateLoad
from services.router.selection.load import Speed as Speed
from shared.hashing import SEED, block_hash, next_sequence_hash
from shared.messages import Overlap

HOST_BYTES_PER_S = 50e9
"""What one GPU copies from pinned host memory. From memory to memory it is a fifth, but an engine on a CPU computes a
hundred times as slowly."""
DISK_BYTES_PER_S = 4e9
"""What one NVMe disk reads with eight requests at once."""


class Fleet(Struct, frozen=True):
    """All candidates together, as far as one must know it to judge each of them."""

    requests: float = 0.0
    """In flight, of the mean candidate."""
    prefill_tokens_per_s: float = 0.0
    """The mean of those who told; 0: nobody did."""

    @staticmethod
    def of(candidates: Sequence[Facts]) -> Fleet:
        """Of at least one candidate."""
        requests = sum([each.load.requests for each in candidates]) / len(candidates)
        told = [each.speed.prefill_tokens_per_s for each in candidates if each.speed.prefill_tokens_per_s]
        return Fleet(requests, sum(told) / len(told) if told else 0.0)


class Question(Struct, frozen=True):
    """One prompt that needs a candidate."""

    prompt_tokens: int
    block_size: int
    """Tokens a block."""
    session: str = ""
    """Requests of one session prefer the same candidate, all else nearly equal."""
    priority: int = 0
    fleet: Fleet = Fleet()
    host_s: float = 0.0
    """What fetching one block from host memory takes; 0: not known."""
    disk_s: float = 0.0
    """The same from disk."""


class Facts(Struct, frozen=True, gc=False):
    """What is known of one candidate."""

    candidate: CandidateId
    overlap: Overlap
    """Leading blocks of the prompt that it holds."""
    load: CandidateLoad
    total_blocks: int
    """Its capacity."""
    speed: Speed = UNTOLD
    age_s: float = 1e9
    """Since it began to serve: one that has just joined ramps up."""


def predicted_s(facts: Facts, question: Question) -> float | None:
    """Until the prompt's first token, if it went there; None: how fast the worker is was not told. Blocks are fetched
    while those before it are computed."""
    rate = facts.speed.prefill_tokens_per_s
    if not rate:
        return None
    overlap = facts.overlap
    uncached_tokens = question.prompt_tokens - overlap.blocks * question.block_size
    fetch_s = overlap.host * question.host_s + overlap.disk * question.disk_s
    return max(facts.load.queued_tokens / rate, fetch_s) + uncached_tokens / rate


class Scored(Struct, frozen=True, gc=False):
    """A candidate with its score; lower is better."""

    facts: Facts
    score: float


def best(question: Question, scored: Sequence[Scored], draw: Random, *, session_margin: float = 0.0) -> Scored:
    """The lowest score. Among equals: the session's own candidate, else the least busy, else any. For a session those
    are equal that are within `session_margin` of the lowest."""
    lowest = min([each.score for each in scored])
    if question.session:
        near = [each for each in scored if each.score <= lowest + session_margin]
        return max(near, key=lambda each: _affinity(question.session, each.facts.candidate))
    equal = [each for each in scored if each.score == lowest]
    if len(equal) > 1:
        calm = min(busyness(each.facts) for each in equal)
        equal = [each for each in equal if busyness(each.facts) == calm]
    return equal[0] if len(equal) == 1 else draw.choice(equal)


def busyness(facts: Facts) -> tuple[int, int, int]:
    """Load as something to compare: requests, then prompt tokens to compute, then blocks in use."""
    load = facts.load
    return load.requests, load.queued_tokens, load.active_blocks


def _affinity(session: str, candidate: CandidateId) -> int:
    """Rendezvous hashing: when a candidate goes, only its own sessions move."""
    instance, rank = candidate
    return next_sequence_hash(block_hash(session.encode()), block_hash(f"{instance}/{rank}".encode()), SEED)
