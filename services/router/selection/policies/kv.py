"""The default policy: little uncached work in total, and a short tail. Pure.

All costs are counted in prompt tokens to compute, the unit in which candidates differ most:

    cost = slowness x ( uncached tokens              the work that this choice adds to the fleet
                      + patience x queued tokens     the wait before it
                      + crowding x log2(1 + requests there) )
         + the tokens that an average engine prefills in a third of the time that fetching takes
         + tokens that do not fit next to the running requests

    patience = 1 / (20 + requests in flight at the mean candidate)
    crowding = 128 + the tokens that an average engine prefills in 0.08 s

*Patience.* Waiting costs only the request itself, and ends soon. Uncached work costs all requests: it delays those that
run there, evicts blocks that others would have found, and delays later ones, whose number grows with the requests in
flight (Little's law). So a busy fleet protects its caches, and an idle one its first tokens. With a weight of 1, each
request would minimise its own time to the first token, and the cache hits that keep queues short would be lost.

*Crowding.* Requests that decode on the same worker share its steps and wait for each other's prefills; the first few
neighbours cost the most. So a common prefix, however long, does not gather unrelated requests on one worker while
others are idle.

*Fetching* from host memory runs at 50 GB/s, from disk at 4 GB/s (`services.router.selection.candidates`). For an 8B
model on an H200, with 128 KiB per token and 30,000 tokens/s, that takes 0.08 and 1.0 of the time that computing takes;
for a 1B model 0.1 and 1.2, for a 70B model 0.02 and 0.3, and on a CPU almost nothing. It counts for a third of that,
because the engine computes for other requests meanwhile. The remaining cost is that the request waits, that copies slow
decoding by 1 to 9 %, that requests share the disk, and that fetched blocks evict others. Fetching never counts for more
than computing: where computing is faster, workers compute. Blocks of other machines count in the same way, at the rate
that was measured with that machine.

*Slowness* is the fleet's average prefill speed divided by the candidate's own. The measured speeds of equal engines
differ with their latest requests. So a ratio between 2/3 and 3/2 counts as equal; otherwise prompts would leave their
blocks without need.

The constants were chosen on a trace and on synthetic loads; `docs/decisions/0016-kv-policy.md` lists what was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from random import Random

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate, best

FETCH_WEIGHT = 1 / 3
"""Weight of a second of fetching, in seconds of computing."""
ASSUMED_TOKENS_PER_S = 10_000.0
"""Prefill speed that is assumed for an engine, to weigh fetching, if no candidate reports one."""
IDLE_PATIENCE_INVERSE = 20.0
"""Inverse of patience when no request is in flight."""
NEIGHBOUR_TOKENS = 128
NEIGHBOUR_S = 0.08
SIMILAR_SPEED_RATIO = 1.5
"""Engines whose speeds differ by a smaller factor count as equal."""


class KvPolicy:
    """Weighs cache overlap against load."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        """Keep all candidates."""
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        """Return the cost above, in tokens."""
        uncached, fetched, waiting, running = _costs(request, candidate)
        return uncached + fetched + waiting + running

    def reason(self, request: RoutingRequest, candidate: CandidateState) -> str:
        """Return the terms of the cost."""
        uncached, fetched, waiting, running = _costs(request, candidate)
        return f"uncached {uncached:.0f} + fetch {fetched:.0f} + waiting {waiting:.0f} + running {running:.0f}"

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Pick the lowest cost. A session keeps its own candidate if that costs no more than one additional neighbour
        would."""
        return best(request, scored, draw, session_margin=NEIGHBOUR_TOKENS)


def _costs(request: RoutingRequest, candidate: CandidateState) -> tuple[float, float, float, float]:
    """Return (uncached, fetched, waiting, running), in prompt tokens. It runs for every candidate of every request, so
    terms that are mostly 0 are skipped rather than computed."""
    size, overlap, load = request.block_size, candidate.overlap, candidate.load
    device, host, disk, remote = overlap.device, overlap.host, overlap.disk, overlap.remote
    own = candidate.speed.prefill_tokens_per_s
    slow = _slowness(request.fleet.prefill_tokens_per_s, own) if own else 1.0
    uncached = slow * (request.prompt_tokens - (device + host + disk + remote) * size)
    fetched = 0.0
    if host or disk:
        usual = request.fleet.prefill_tokens_per_s or ASSUMED_TOKENS_PER_S
        fetched = FETCH_WEIGHT * usual * (host * request.host_s + disk * request.disk_s)
        computed = slow * size * (host + disk)
        if fetched > computed:
            fetched = computed
    if remote:
        usual = request.fleet.prefill_tokens_per_s or ASSUMED_TOKENS_PER_S
        fetched += min(FETCH_WEIGHT * usual * remote * candidate.remote_s, slow * size * remote)
    waiting = slow * load.queued_tokens / (IDLE_PATIENCE_INVERSE + request.fleet.requests)
    crowding = NEIGHBOUR_TOKENS + NEIGHBOUR_S * request.fleet.prefill_tokens_per_s
    running = slow * crowding * log2(1 + load.requests)
    if load.active_blocks:
        needed = load.active_blocks + -(-request.prompt_tokens // size) - device
        if needed > candidate.total_blocks:
            running += (needed - candidate.total_blocks) * size
    return uncached, fetched, waiting, running


def split_costs(
    request: RoutingRequest, whole: CandidateState, prefill: CandidateState, decode: CandidateState
) -> tuple[float, float]:
    """Return (the cost of a pair, the cost of one worker for all), in prompt tokens. `decode` has the prompt's blocks
    in its store's memory.

    A prompt that is computed where others decode delays each of them by its time, which counts as patience counts any
    wait. A worker that only computes prompts delays no decoding, so that there are no neighbours to share steps with.
    """
    uncached, fetched, waiting, running = _costs(request, whole)
    delayed = uncached * whole.load.requests / (IDLE_PATIENCE_INVERSE + request.fleet.requests)
    computed = sum(_costs(request, prefill)[:3])
    return computed + sum(_costs(request, decode)), uncached + fetched + waiting + running + delayed


def _slowness(usual: float, own: float) -> float:
    """Return the slowness; 1 if the speeds are similar or unknown."""
    if not usual or not own or usual < SIMILAR_SPEED_RATIO * own < SIMILAR_SPEED_RATIO * SIMILAR_SPEED_RATIO * usual:
        return 1.0
    return usual / own
