"""The inputs of a routing policy, and its scores. Pure.

One CandidateState and one ScoredCandidate are created for every candidate and request, and some are kept. They contain
no cycles, so the garbage collector need not track them (`gc=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from msgspec import Struct

from services.router.index.index import CandidateId
from services.router.selection.load import UNKNOWN_SPEED as UNKNOWN_SPEED
from services.router.selection.load import CandidateLoad
from services.router.selection.load import WorkerSpeed as WorkerSpeed
from shared.hashing import SEED, block_hash, next_sequence_hash
from shared.messages.cards import KvLayout
from shared.messages.select import Overlap

HOST_BYTES_PER_S = 50e9
"""Bytes per second that one GPU copies from pinned host memory. A copy from memory to memory has a fifth of that, but
an engine on a CPU computes a hundred times as slowly."""
DISK_BYTES_PER_S = 4e9
"""Bytes per second that one NVMe disk reads with eight requests in flight."""


def block_bytes_of(layout: KvLayout) -> int:
    """Return the bytes of one block; 0 if unknown."""
    try:
        return layout.block_bytes
    except KeyError:  # the dtype of a foreign engine
        return 0


class FleetAverage(Struct, frozen=True):
    """Averages over all candidates, as far as policies need them to judge a single one."""

    requests: float = 0.0
    """Requests in flight at the mean candidate."""
    prefill_tokens_per_s: float = 0.0
    """Mean prefill speed of the candidates that report one; 0 if none does. Old speeds count only if all are old."""

    @staticmethod
    def of(candidates: Sequence[CandidateState]) -> FleetAverage:
        """Compute the averages of at least one candidate."""
        requests = sum([each.load.requests for each in candidates]) / len(candidates)
        known = [each.speed for each in candidates if each.speed.prefill_tokens_per_s]
        speeds = [each.prefill_tokens_per_s for each in known if not each.old]
        speeds = speeds or [each.prefill_tokens_per_s for each in known]
        return FleetAverage(requests, sum(speeds) / len(speeds) if speeds else 0.0)


class RoutingRequest(Struct, frozen=True):
    """One prompt that needs a candidate."""

    prompt_tokens: int
    block_size: int
    """Tokens per block."""
    session: str = ""
    """Id of the client's session. Requests of one session prefer the same candidate if scores are nearly equal."""
    priority: int = 0
    """Requests of a higher priority are computed first; 0 is the usual one."""
    lora: str = ""
    """Id of the LoRA. Empty if there is none."""
    images: int = 0
    """Number of images in the prompt."""
    image_tokens: int = 0
    """How many of its tokens stand for them."""
    fleet: FleetAverage = FleetAverage()
    host_s: float = 0.0
    """Seconds to fetch one block from host memory; 0 if unknown."""
    disk_s: float = 0.0
    """Seconds to fetch one block from disk; 0 if unknown."""
    part: Literal["whole", "alone", "prompt", "decode"] = "whole"
    """What the candidate is needed for: the whole request, the same where a pair may do it instead (`alone`), or one
    half of a pair. The last three are dropped if the other way costs less."""


class CandidateState(Struct, frozen=True, gc=False):
    """The state of one candidate, as of now."""

    id: CandidateId
    overlap: Overlap
    """Leading blocks of the prompt that it holds, per tier."""
    load: CandidateLoad
    total_blocks: int
    """Its capacity in blocks."""
    speed: WorkerSpeed = UNKNOWN_SPEED
    age_s: float = 1e9
    """Seconds since it began to serve; an instance that has just joined ramps up."""
    places: int = 0
    """How many requests it computes at once; 0 if unknown."""
    remote_s: float = 0.0
    """Seconds to read one block of `overlap.remote` from another machine; 0 if there are none."""


def predicted_start_s(candidate: CandidateState) -> float | None:
    """Predict the seconds until the candidate has computed the prompts that it was given before; None if the worker's
    speed is unknown."""
    rate = candidate.speed.prefill_tokens_per_s
    return candidate.load.queued_tokens / rate if rate else None


def fetch_s(candidate: CandidateState, request: RoutingRequest) -> float:
    """Return the seconds to fetch the blocks that the candidate has elsewhere than on its device."""
    overlap = candidate.overlap
    return overlap.host * request.host_s + overlap.disk * request.disk_s + overlap.remote * candidate.remote_s


def predicted_first_token_s(candidate: CandidateState, request: RoutingRequest) -> float | None:
    """Predict the seconds until the prompt's first token if the candidate got it; None if the worker's speed is
    unknown. Blocks are fetched while earlier requests are computed."""
    rate = candidate.speed.prefill_tokens_per_s
    if not rate:
        return None
    uncached_tokens = request.prompt_tokens - candidate.overlap.blocks * request.block_size
    return max(candidate.load.queued_tokens / rate, fetch_s(candidate, request)) + uncached_tokens / rate


class ScoredCandidate(Struct, frozen=True, gc=False):
    """A candidate with its score; lower is better."""

    candidate: CandidateState
    score: float


def best(
    request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random, *, session_margin: float = 0.0
) -> ScoredCandidate:
    """Return the candidate with the lowest score. Among equal scores prefer the session's own candidate, else the least
    busy one, else a random one. For a session, scores within `session_margin` of the lowest count as equal."""
    lowest = min([each.score for each in scored])
    if request.session:
        near = [each for each in scored if each.score <= lowest + session_margin]
        return max(near, key=lambda each: _affinity(request.session, each.candidate.id))
    equal = [each for each in scored if each.score == lowest]
    if len(equal) > 1:
        calm = min(busyness(each.candidate) for each in equal)
        equal = [each for each in equal if busyness(each.candidate) == calm]
    return equal[0] if len(equal) == 1 else draw.choice(equal)


def busyness(candidate: CandidateState) -> tuple[int, int, int]:
    """Return the load as a sort key: requests, then prompt tokens to compute, then blocks in use."""
    load = candidate.load
    return load.requests, load.queued_tokens, load.active_blocks


def _affinity(session: str, candidate: CandidateId) -> int:
    """Return a rendezvous hash: when a candidate leaves, only its own sessions move."""
    instance, rank = candidate
    return next_sequence_hash(block_hash(session.encode()), block_hash(f"{instance}/{rank}".encode()), SEED)
