"""What the page is sent, as types: one PageEvent a second. ui/snapshot.py makes it. Pure."""

from __future__ import annotations

from msgspec import Struct


class Process(Struct, frozen=True):
    """What all processes have."""

    id: str
    machine: str
    version: str
    age_s: float


class WorkerView(Struct, frozen=True):
    """One worker and its load; the counts are 0 while there is no report."""

    process: Process
    state: str
    """ready, silent (no report for a while, or none yet), or what an operator asked for: draining, drained, asleep."""
    role: str
    """prefill or decode. Empty if it does all of a request, or serves no model yet."""
    device: str
    model: str
    """The model that it serves. Empty if there is none yet."""
    kvbm: str
    reported_s: float | None
    """Age of the last report in seconds. None if none has come."""
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    held: int = 0
    cached: int = 0
    blocks: int = 0
    tokens_per_s: float | None = None
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


class FrontendView(Struct, frozen=True):
    """One frontend; the counts are None if it did not answer."""

    process: Process
    arriving: int | None = None
    running: int | None = None
    begun: int | None = None


class RouterView(Struct, frozen=True):
    """One router; the rest is empty if it did not answer."""

    process: Process
    answered: bool = False
    policy: str = ""
    trouble: str = ""
    reserved: int = 0
    index_blocks: int = 0
    index_bytes: int = 0
    sources: dict[str, int] = {}
    """How many event sources are in each state."""


class TierView(Struct, frozen=True):
    """One tier of one layout of a block store."""

    name: str
    state: str
    reason: str
    blocks: int
    capacity: int
    hit_rate: float | None


class LayoutView(Struct, frozen=True):
    """One layout of a block store."""

    model: str
    dtype: str
    block_bytes: int
    engines: int
    tickets: int
    tiers: list[TierView]


class StoreView(Struct, frozen=True):
    """One block store."""

    process: Process
    answered: bool = False
    pool_bytes: int = 0
    reserved: float = 0.0
    window_s: float = 0.0
    layouts: list[LayoutView] = []
    layouts_left_out: int = 0


class ModelView(Struct, frozen=True):
    """One model that routers choose workers for."""

    name: str
    workers: int
    context: int
    block_size: int
    generates: bool
    pictures: bool = False
    """True if it makes pictures."""


class RequestView(Struct, frozen=True):
    """One request: shared.messages.frontends.RequestWay with its frontend and the time when its body was complete."""

    id: str
    frontend: str
    model: str
    began_ms: int
    """Milliseconds since 1970, on this frontend's clock."""
    prompt: int
    output: int
    cached: tuple[int, int, int]
    """Cached prompt tokens: on the device, in host memory, on disk."""
    attempt: int
    instances: tuple[str, ...]
    times: tuple[float, float | None, float | None, float | None, float | None]
    """Seconds from the complete body: tokenised, selected, accepted, first token, ended."""
    outcome: str


class NotShown(Struct, frozen=True):
    """How many entries are not shown because of a bound."""

    workers: int
    frontends: int
    routers: int
    stores: int
    models: int
    requests: int
    notes: int


class Totals(Struct, frozen=True):
    """Sums over all processes, also those that are left out."""

    workers: int
    running: int
    waiting: int
    tokens_per_s: float
    held: int
    cached: int
    blocks: int
    begun: int
    """Requests of all frontends since they started."""


class PageEvent(Struct, frozen=True):
    """One event of the page's stream."""

    at_ms: int
    namespace: str
    frontend: str
    version: str
    connected: bool
    totals: Totals
    frontends: list[FrontendView]
    routers: list[RouterView]
    workers: list[WorkerView]
    stores: list[StoreView]
    models: list[ModelView]
    requests: list[RequestView]
    """The latest requests, oldest first."""
    notes: list[str]
    left_out: NotShown
