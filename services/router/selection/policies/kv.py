"""The default policy, with its score of a candidate: little uncached work in total, and a short tail. Pure.

All costs are counted in prompt tokens to compute, the unit in which candidates differ most:

    cost = slowness x ( uncached tokens              the work that this choice adds to the fleet
                      + patience x queued tokens     the wait before it
                      + crowding x log2(1 + requests there)
                  + crowding x requests there beyond 1.25 x its places, this one included, at most 4 )
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

*Places.* A worker computes at most `max_running` requests at once. If many more are there, each next one waits for
answers to end, whatever is queued; elsewhere it computes its prefix once, and all that follow find it there. So a
prefix that is asked for too often for one worker comes to one more. A few that wait do not count, since they wait for
moments only. More than four count as four: where many wait at every worker, prompts would else leave their blocks for a
place that is as far away.

*Pairs.* Where some workers only compute prompts, one of them and a single worker for all are compared by the seconds
that requests wait (`split_costs`). Each of the two is chosen by the same measure, or a prompt of 0.1 s would wait for
seconds at the worker with the fewest neighbours while others have no queue. So patience is 1, and uncached work counts
once more for each request there that it delays. At a worker that only computes prompts nothing decodes, so that there
is no crowding.

*Fetching* from host memory runs at 50 GB/s, from disk at 4 GB/s (`services.router.selection.candidates`). For an 8B
model on an H200, with 128 KiB per token and 30,000 tokens/s, that takes 0.08 and 1.0 of the time that computing takes;
for a 1B model 0.1 and 1.2, for a 70B model 0.02 and 0.3, and on a CPU almost nothing. It counts for a third of that,
because the engine computes for other requests meanwhile. The remaining cost is that the request waits, that copies slow
decoding by 1 to 9 %, that requests share the disk, and that fetched blocks evict others. Fetching never counts for more
than computing: where computing is faster, workers compute. Blocks of other machines count in the same way, at the rate
that was measured with that machine.

*Slowness* is the fleet's average prefill speed divided by the candidate's own. The measured speeds of equal engines
differ with their latest requests. So a ratio between 2/3 and 3/2 counts as equal; otherwise prompts would leave their
blocks without need. Only a prompt shows whether a worker that was slow still is. So a speed below the average that has
not fallen for a minute (`WorkerSpeed.old`) counts as the average, unless a prompt waits there already.

The constants were chosen on a trace and on synthetic loads; `docs/decisions/0016-kv-policy.md` lists what was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from random import Random

from services.router.selection.candidates import (
    CandidateState,
    FleetAverage,
    RoutingRequest,
    ScoredCandidate,
    best,
    fetch_s,
)

FETCH_WEIGHT = 1 / 3
"""Weight of a second of fetching, in seconds of computing."""
ASSUMED_TOKENS_PER_S = 10_000.0
"""Prefill speed that is assumed for an engine, to weigh fetching, if no candidate reports one."""
IDLE_PATIENCE_INVERSE = 20.0
"""Inverse of patience when no request is in flight."""
NEIGHBOUR_TOKENS = 128
NEIGHBOUR_S = 0.08
FULL_SHARE = 1.25
"""Requests at a candidate, of its places, from which on each next one counts as waiting for a place."""
WAITING_MOST = 4
"""Most requests that count as waiting for a place at a candidate."""
DECODE_WEIGHT = 0.35
"""Weight of a second for which a request that decodes waits, in seconds of waiting for a first token."""
PROMPT_WEIGHT = 1.5
"""How many later prompts each prompt delays at a worker that only computes prompts, for each request there."""
STORING_S = 0.15
"""Most seconds in which a worker that computes other prompts stores the last blocks of one."""
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
    speed = candidate.speed
    own = _speed(request.fleet.prefill_tokens_per_s, candidate) if speed.old else speed.prefill_tokens_per_s
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
    waiting, running = slow * load.queued_tokens, 0.0
    if request.part == "prompt":
        uncached *= 1 + PROMPT_WEIGHT * load.requests
    else:
        crowding = NEIGHBOUR_TOKENS + NEIGHBOUR_S * request.fleet.prefill_tokens_per_s
        running = slow * crowding * log2(1 + load.requests)
        if candidate.places:
            waiting_there = 1 + load.requests - candidate.places * FULL_SHARE
            if waiting_there > 0:
                running += slow * crowding * min(waiting_there, WAITING_MOST)
        if request.part == "alone":
            uncached *= 1 + DECODE_WEIGHT * load.requests
        else:
            waiting /= IDLE_PATIENCE_INVERSE + request.fleet.requests
    if load.active_blocks:
        needed = load.active_blocks + -(-request.prompt_tokens // size) - device
        if needed > candidate.total_blocks:
            running += (needed - candidate.total_blocks) * size
    return uncached, fetched, waiting, running


def split_costs(
    request: RoutingRequest, whole: CandidateState, prefill: CandidateState, decode: CandidateState
) -> tuple[float, float]:
    """Return (the cost of a pair, the cost of one worker for all), in seconds that requests wait, all of them together.
    `decode` has the prompt's blocks in its store's memory.

        one worker = queue + fetch + prompt x (1 + DECODE_WEIGHT x requests there)
        pair       = queue + fetch + prompt x (1 + PROMPT_WEIGHT x requests there)         where the prompt is computed
                     + storing + queue + fetch + rest x (1 + DECODE_WEIGHT x requests there)   where it is decoded

    `queue` is the time of the prompt tokens that wait at a worker, `prompt` that of the tokens which it would compute,
    both at its own measured speed; an old one that is below the average of the three counts as that (*Slowness* above).
    `rest` is the time of the tokens after the prompt's last full block, `fetch` that of copying blocks from the store.
    `storing` is that of copying what is handed over to the store, at the same rate. A busy worker may have to end steps
    first, so `STORING_S` is added, or the time of the prompt if that is less.

    *Requests there.* A prompt's time is a wait for the request itself. It is also one for every request that decodes at
    the same worker: no step without that prompt comes before. Where only prompts are computed, it is one for the
    prompts that come next; by Little's law they are as many as wait now, or more where the queue does not end soon.
    """
    usual = FleetAverage.of((whole, prefill, decode)).prefill_tokens_per_s or ASSUMED_TOKENS_PER_S
    computing = _speed(usual, prefill) or usual
    one_s, one_fetch_s, one_queue_s = _prompt_s(request, whole, _speed(usual, whole) or computing)
    prompt_s, prompt_fetch_s, prompt_queue_s = _prompt_s(request, prefill, computing)
    rest_s, rest_fetch_s, queue_s = _prompt_s(request, decode, _speed(usual, decode) or computing)
    storing_s = (decode.overlap.blocks - decode.overlap.device) * request.host_s
    if prefill.load.requests:
        storing_s += min(prompt_s, STORING_S)
    alone = one_queue_s + one_fetch_s + one_s * (1 + DECODE_WEIGHT * whole.load.requests)
    first = prompt_queue_s + prompt_fetch_s + prompt_s * (1 + PROMPT_WEIGHT * prefill.load.requests)
    handed_over = storing_s + queue_s + rest_fetch_s + rest_s * (1 + DECODE_WEIGHT * decode.load.requests)
    return first + handed_over, alone


def _prompt_s(request: RoutingRequest, candidate: CandidateState, tokens_per_s: float) -> tuple[float, float, float]:
    """Return the seconds of the prompt's uncached tokens, of fetching the others, and of the queue before both."""
    uncached = request.prompt_tokens - candidate.overlap.blocks * request.block_size
    return uncached / tokens_per_s, fetch_s(candidate, request), candidate.load.queued_tokens / tokens_per_s


def _speed(usual: float, candidate: CandidateState) -> float:
    """Return the candidate's prefill speed, in tokens a second; `usual` for a lower one that is old, if no prompt waits
    there; 0 if unknown."""
    own = candidate.speed.prefill_tokens_per_s
    if candidate.speed.old and 0 < own < usual and not candidate.load.queued_tokens:
        return usual
    return own


def _slowness(usual: float, own: float) -> float:
    """Return the slowness; 1 if the speeds are similar or unknown."""
    if not usual or not own or usual < SIMILAR_SPEED_RATIO * own < SIMILAR_SPEED_RATIO * SIMILAR_SPEED_RATIO * usual:
        return 1.0
    return usual / own
