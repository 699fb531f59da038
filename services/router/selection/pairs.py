"""Whether a prompt is computed by one worker and decoded by another, and by which. Pure.

    whole requests:    aggregated and decode workers ──policy──▶ one of them           cost alone
    pairs:             prefill workers ──policy──▶ one             ─┐
                       decode workers that it reaches ──policy──▶ one ─▶               cost of the pair

The policy chooses each worker; `split_costs` of the kv policy compares, whatever the policy. The blocks are handed over
through the store that both workers exchange blocks with, so to the worker that decodes they count as found in its
store's memory. Where its store is another machine's, they count as remote, as far as they come in time. If workers of
one machine make a pair, it is compared with the best pair of all machines.

docs/decisions/0078 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from services.router.index.index import CandidateId
from services.router.index.inheritance import StoreId
from services.router.selection.candidates import CandidateState, FleetAverage, RoutingRequest
from services.router.selection.peer_links import RemoteSearch
from services.router.selection.policies.kv import split_costs
from services.router.selection.policy_guard import PolicyChoice, PolicyFault, PolicyGuard, worst_fault
from shared.messages.select import Overlap

SplitCosts = Callable[[RoutingRequest, CandidateState, CandidateState, CandidateState], tuple[float, float]]
"""A function like `split_costs`: (request, whole, prefill, decode) → (cost of the pair, of one worker for all)."""

AtStore = tuple[StoreId | None, CandidateState]
"""A candidate, and the store that it exchanges blocks with."""


class WorkerPair(Struct, frozen=True):
    """A worker that computes the prompt, and one that decodes."""

    prefill: PolicyChoice
    prompt: RoutingRequest
    """What the policy was asked for `prefill`."""
    decode: PolicyChoice
    rest: RoutingRequest
    """What the policy was asked for `decode`."""
    cost: float
    """What the pair costs, in seconds."""
    alone: float
    """What the best single worker costs, in seconds."""

    @property
    def candidates(self) -> tuple[CandidateId, CandidateId]:
        """The candidate that computes the prompt, and the one that decodes."""
        return self.prefill.chosen.candidate.id, self.decode.chosen.candidate.id

    @property
    def fault(self) -> PolicyFault | None:
        """What was wrong with the policy, if anything."""
        return worst_fault(self.prefill.fault, self.decode.fault)

    @property
    def pays(self) -> bool:
        """Whether the pair costs less than a single worker."""
        return self.cost < self.alone

    @property
    def comparison(self) -> str:
        """Both costs, in words."""
        return f"a pair costs {_time(self.cost)}, one worker {_time(self.alone)}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"  # the pair of an idle GPU takes few ms


def choose_pair(
    guard: PolicyGuard,
    request: RoutingRequest,
    prefilling: Sequence[AtStore],
    decoding: Sequence[AtStore],
    whole: CandidateState,
    remote: RemoteSearch | None = None,
    *,
    compare: SplitCosts = split_costs,
) -> WorkerPair | None:
    """Return the pair that the policy chooses, each worker with its store; None if no two workers can make one. `whole`
    is the worker that would compute the whole request. With `remote` blocks can come from other machines' stores."""
    blocks = (request.prompt_tokens - 1) // request.block_size
    takers = {store: _takers(decoding, store, blocks, None) for store, _ in prefilling if store is not None}
    pair = _best_pair(guard, request, prefilling, takers, whole, compare)
    if remote is None:
        return pair
    reached = {store: _takers(decoding, store, blocks, remote) for store in takers}
    if all(len(reached[store]) == len(takers[store]) for store in takers):
        return pair
    wide = _best_pair(guard, request, prefilling, reached, whole, compare)
    return wide if pair is None or (wide is not None and wide.cost < pair.cost) else pair


def _best_pair(
    guard: PolicyGuard,
    request: RoutingRequest,
    prefilling: Sequence[AtStore],
    takers: Mapping[StoreId, list[CandidateState]],
    whole: CandidateState,
    compare: SplitCosts,
) -> WorkerPair | None:
    able = [(takers[store], state) for store, state in prefilling if store is not None and takers[store]]
    if not able:
        return None
    computing = [state for _, state in able]
    prompt = replace(request, part="prompt", fleet=FleetAverage.of(computing))
    prefill = guard.choose(prompt, computing)
    chosen = prefill.chosen.candidate
    (reached,) = (those for those, state in able if state.id == chosen.id)
    rest = replace(request, part="decode")
    decode = guard.choose(rest, reached)
    return WorkerPair(prefill, prompt, decode, rest, *compare(request, whole, chosen, decode.chosen.candidate))


def _takers(decoding: Sequence[AtStore], at: StoreId, blocks: int, remote: RemoteSearch | None) -> list[CandidateState]:
    """Return the candidates that can take over a prompt of `blocks` full blocks from the store `at`, as they are once
    the blocks are there."""
    takers: list[CandidateState] = []
    for store, state in decoding:
        if store == at:
            device = min(state.overlap.device, blocks)
            takers.append(replace(state, overlap=Overlap(device=device, host=blocks - device), remote_s=0.0))
        elif store is not None and remote is not None:
            overlap = state.overlap
            coming = remote.handed_over(store, at, blocks - overlap.here)
            if coming.blocks:
                overlap = Overlap(overlap.device, overlap.host, overlap.disk, coming.blocks)
                takers.append(replace(state, overlap=overlap, remote_s=coming.block_s))
    return takers
