"""Whether a prompt is computed by one worker and decoded by another, and by which. Pure.

    whole requests:    aggregated and decode workers ──policy──▶ one of them           cost alone
    pairs:             prefill workers ──policy──▶ one          ─┐
                       decode workers of its store ──policy──▶ one ─▶                  cost of the pair

The policy chooses each worker; `split_costs` of the kv policy compares, whatever the policy. The blocks are handed over
through the store that both workers exchange blocks with, so to the worker that decodes they count as found in its
store's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from services.router.index.index import CandidateId
from services.router.index.shared_stores import StoreId
from services.router.selection.candidates import CandidateState, FleetAverage, RoutingRequest
from services.router.selection.policies.kv import split_costs
from services.router.selection.policy_guard import PolicyChoice, PolicyGuard
from shared.messages import Overlap

SplitCosts = Callable[[RoutingRequest, CandidateState, CandidateState, CandidateState], tuple[float, float]]
"""A function like `split_costs`: (request, whole, prefill, decode) → (cost of the pair, of one worker for all)."""


class WorkerPair(Struct, frozen=True):
    """A worker that computes the prompt, and one that decodes."""

    prefill: PolicyChoice
    decode: PolicyChoice
    cost: float
    """What the pair costs, in seconds."""
    alone: float
    """What the best single worker costs, in seconds."""

    @property
    def candidates(self) -> tuple[CandidateId, CandidateId]:
        """The candidate that computes the prompt, and the one that decodes."""
        return self.prefill.chosen.candidate.id, self.decode.chosen.candidate.id

    @property
    def pays(self) -> bool:
        """Whether the pair costs less than a single worker."""
        return self.cost < self.alone

    @property
    def comparison(self) -> str:
        """Both costs, in words."""
        return f"a pair costs {self.cost:.2f} s, one worker {self.alone:.2f} s"


def choose_pair(
    guard: PolicyGuard,
    request: RoutingRequest,
    prefilling: Sequence[tuple[StoreId | None, CandidateState]],
    decoding: Sequence[tuple[StoreId | None, CandidateState]],
    whole: CandidateState,
    compare: SplitCosts = split_costs,
) -> WorkerPair | None:
    """Return the pair that the policy chooses, each worker with its store; None if no two workers have one store.
    `whole` is the worker that would compute the whole request."""
    stores = {store for store, _ in decoding if store is not None}
    able = [(store, state) for store, state in prefilling if store in stores]
    if not able:
        return None
    computing = [state for _, state in able]
    prompt = replace(request, part="prompt", fleet=FleetAverage.of(computing))
    prefill = guard.choose(prompt, computing)
    chosen = prefill.chosen.candidate
    (at,) = (store for store, state in able if state.id == chosen.id)
    blocks = (request.prompt_tokens - 1) // request.block_size
    takers = [_as_taker(state, blocks) for store, state in decoding if store == at]
    decode = guard.choose(replace(request, part="decode"), takers)
    return WorkerPair(prefill, decode, *compare(request, whole, chosen, decode.chosen.candidate))


def _as_taker(state: CandidateState, blocks: int) -> CandidateState:
    """Return the candidate as it is once the prompt's full blocks have come to its store's memory."""
    device = min(state.overlap.device, blocks)
    return replace(state, overlap=Overlap(device=device, host=blocks - device))
