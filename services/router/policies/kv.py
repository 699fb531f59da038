"""The default: little uncached work in total, and a short tail. Pure.

Everything is counted in prompt tokens to compute, the unit in which candidates differ most:

    cost = slowness x ( uncached tokens              the work that this choice adds to the fleet
                      + 0.1 x tokens fetched         from host memory, 0.3 x from disk
                      + patience x queued tokens     the wait before it
                      + crowding x log2(1 + requests there) )
         + tokens that do not fit beside those running

    patience = 1 / (20 + requests in flight, of the mean candidate)
    crowding = 128 + what the fleet's usual engine prefills in 0.08 s

*Patience.* Waiting is the asker's own loss, and soon over. Uncached work is everyone's: it delays all that run there,
takes room from what others would have found, and delays those to come, who are the more the more are in flight
(Little's law). So a busy fleet guards its caches, and an idle one its first tokens. With a weight of 1, each prompt is
greedy for its own first token, and hits, which keep queues short, are lost.

*Crowding.* Who decodes beside others shares steps with them, and waits for their prefills; the first neighbours cost
the most. So a common beginning, however long, does not gather strangers on one worker while others are idle.

*Slowness* is the fleet's usual prefill speed over the candidate's own. Speeds of equal engines differ by what they were
asked lately, so between 2/3 and 3/2 they count as equal: else prompts leave their blocks for nothing.

The numbers were chosen on a trace and on made-up loads; `docs/decisions/0016-kv-policy.md` has what was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from random import Random

from services.router.question import Facts, Question, Scored, best

HOST_FETCH = 0.1
DISK_FETCH = 0.3
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
    fetched = slow * size * (HOST_FETCH * host + DISK_FETCH * disk) if host or disk else 0.0
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
