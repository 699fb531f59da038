"""The default: little uncached work in total, and a short tail. Pure.

Everything is counted in prompt tokens to compute, the unit in which candidates differ most:

    cost = slowness x ( uncached tokens              the work that this choice adds to the fleet
                      + patience x queued tokens     the wait before it
                      + crowding x log2(1 + requests there) )
         + what the fleet's usual engine prefills in a third of the time that fetching takes
         + tokens that do not fit beside those running

    patience = 1 / (20 + requests in flight, of the mean candidate)
    crowding = 128 + what the fleet's usual engine prefills in 0.08 s

*Patience.* Waiting is the asker's own loss, and soon over. Uncached work is everyone's: it delays all that run there,
takes room from what others would have found, and delays those to come, who are the more the more are in flight
(Little's law). So a busy fleet guards its caches, and an idle one its first tokens. With a weight of 1, each prompt is
greedy for its own first token, and hits, which keep queues short, are lost.

*Crowding.* Who decodes beside others shares steps with them, and waits for their prefills; the first neighbours cost
the most. So a common beginning, however long, does not gather strangers on one worker while others are idle.

*Fetching* from host memory goes at 50 GB/s, from disk at 4 (`services.router.selection.candidates`). For an 8B model on
an H200, with 128 KiB a token and 30,000 tokens/s, that is 0.08 and 1.0 of the time that computing takes; for one of 1B
0.1 and 1.2, of 70B 0.02 and 0.3, on a CPU nearly nothing. It counts for a third of that because the engine computes for
others meanwhile; what is left is that the asker waits, that copies slow decoding by 1 to 9 %, that a disk is shared,
and that what is fetched displaces other blocks. It never counts for more than computing: where that is sooner, workers
do.

*Slowness* is the fleet's usual prefill speed over the candidate's own. Speeds of equal engines differ by what they were
asked lately, so between 2/3 and 3/2 they count as equal: else prompts leave their blocks for nothing.

The numbers were chosen on a trace and on made-up loads; `docs/decisions/0016-kv-policy.md` has what was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from random import Random

from services.router.selection.candidates import Facts, Question, Scored, best

FETCHING = 1 / 3
"""What a second of fetching counts for, in seconds of computing."""
UNTOLD_TOKENS_PER_S = 10_000.0
"""How fast an engine is taken to compute, beside one that fetches, where nobody told."""
CALM = 20.0
"""The inverse of patience where nothing is in flight."""
NEIGHBOUR_TOKENS = 128
NEIGHBOUR_S = 0.08
ALIKE = 1.5
"""Engines whose speeds differ by less are taken as equal."""


class KvPolicy:
    """Cache overlap first, load always."""

    def filter(self, question: Question, candidates: Sequence[Facts]) -> Sequence[Facts]:
        """All may."""
        return candidates

    def score(self, question: Question, candidate: Facts) -> float:
        """The cost above, in tokens."""
        uncached, fetched, waiting, running = _costs(question, candidate)
        return uncached + fetched + waiting + running

    def reason(self, question: Question, candidate: Facts) -> str:
        """The terms of the cost."""
        uncached, fetched, waiting, running = _costs(question, candidate)
        return f"uncached {uncached:.0f} + fetch {fetched:.0f} + waiting {waiting:.0f} + running {running:.0f}"

    def pick(self, question: Question, scored: Sequence[Scored], draw: Random) -> Scored:
        """The cheapest; for a session its own candidate, where that costs no more than one neighbour would."""
        return best(question, scored, draw, session_margin=NEIGHBOUR_TOKENS)


def _costs(question: Question, candidate: Facts) -> tuple[float, float, float, float]:
    """(uncached, fetched, waiting, running), in prompt tokens. Asked for every candidate of every question: what is
    mostly nothing is skipped rather than computed."""
    size, overlap, load = question.block_size, candidate.overlap, candidate.load
    device, host, disk = overlap.device, overlap.host, overlap.disk
    own = candidate.speed.prefill_tokens_per_s
    slow = _slowness(question.fleet.prefill_tokens_per_s, own) if own else 1.0
    uncached = slow * (question.prompt_tokens - (device + host + disk) * size)
    fetched = 0.0
    if host or disk:
        usual = question.fleet.prefill_tokens_per_s or UNTOLD_TOKENS_PER_S
        fetched = FETCHING * usual * (host * question.host_s + disk * question.disk_s)
        computed = slow * size * (host + disk)
        if fetched > computed:
            fetched = computed
    waiting = slow * load.queued_tokens / (CALM + question.fleet.requests)
    crowding = NEIGHBOUR_TOKENS + NEIGHBOUR_S * question.fleet.prefill_tokens_per_s
    running = slow * crowding * log2(1 + load.requests)
    if load.active_blocks:
        needed = load.active_blocks + -(-question.prompt_tokens // size) - device
        if needed > candidate.total_blocks:
            running += (needed - candidate.total_blocks) * size
    return uncached, fetched, waiting, running


def _slowness(usual: float, own: float) -> float:
    """1 where they are alike, or nobody told."""
    if not usual or not own or usual < ALIKE * own < ALIKE * ALIKE * usual:
        return 1.0
    return usual / own
