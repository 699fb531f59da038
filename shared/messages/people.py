"""people → router and people → worker: explanations, states, operations. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.codec import Codec
from shared.messages.select import Candidate


class Explanation(Struct, frozen=True):
    """One choice of a router, and its outcome."""

    model: str
    router: str
    """The router that chose."""
    request: str
    attempt: int
    age_s: float
    """The time since the choice, in seconds."""
    instance: str
    """The chosen worker."""
    rank: int
    reason: str
    candidates: tuple[Candidate, ...]
    """The best few candidates, best first; the chosen one is among them."""
    prompt_tokens: int
    predicted_cached_tokens: int
    actual_cached_tokens: int | None = None
    """The cached tokens that the worker counted. None if its first token is not reported yet."""
    first_token_s: float | None = None
    """The time to the first token that the client saw, in seconds. None if not reported yet, or an earlier attempt
    produced it."""
    ended_s: float | None = None
    """The time from the choice to the reported end, in seconds. None if it has not ended."""
    lora: str = ""
    """The id of the LoRA that was asked for. Empty if there is none."""
    trace: str = ""
    """The id of the request's trace. Empty if it is not traced, or an older router wrote this."""
    passed_over: dict[str, str] = {}
    """Worker → why it could not be chosen: at most as many as candidates. Empty also where an older router wrote
    this."""
    images: int = 0
    """The number of images in the prompt."""
    image_tokens: int = 0
    """How many of the prompt's tokens stand for them."""


class Explanations(Struct, frozen=True):
    """The choices that one router remembers of a request, or its latest choices; oldest first."""

    router: str
    decisions: list[Explanation]


class ModelState(Struct, frozen=True):
    """One model as a router knows it."""

    model: str
    instances: int
    reservations: int
    index_blocks: int
    """The number of distinct blocks in the index."""
    index_bytes: int


class SourceState(Struct, frozen=True):
    """How a router follows one event stream: that of a worker, or that of one layout of a kvbm."""

    instance: str
    """The id of a worker, or KVBM/LAYOUT."""
    state: str
    """The state of the source (live, syncing, …: services/router/sync/source.py draws them), or `refused`."""
    reason: str = ""
    """The reason of a refusal."""
    partial: bool = False
    """Whether blocks that the source has reported may be unknown here: it has no snapshots, and its replay is too
    short."""
    exact: bool = True
    """Whether no reported block was left out at a limit."""
    silent: bool = False
    """Whether requests compute new blocks at the source, but no events arrive."""
    epoch: int | None = None
    applied: int = -1
    """The sequence of the last batch that was applied. -1 if there is none."""
    gaps: int = 0
    resyncs: int = 0
    """The number of times that a snapshot of everything was requested."""
    rejected: int = 0
    """The number of batches that could not be read."""
    torn: int = 0
    """The number of messages that were not batches at all."""
    dropped: int = 0
    """The number of batches that were dropped because too many waited to be applied."""
    digests: dict[str, int] = {}
    """The number of digest comparisons so far, by result: agreed, differed, exempt."""
    heard_s_ago: float | None = None
    """The time since the last published batch came, in seconds. None if none has come yet."""


class RouterState(Struct, frozen=True):
    """The state of one router, as it reports it."""

    router: str
    policy: str
    models: list[ModelState]
    sources: list[SourceState]
    policy_trouble: str = ""
    """Why the policy does not make every choice, for the model with the worst trouble. Empty if it makes them all."""
    events: str = "on"
    """Whether the router follows KV events: on, or off; then it has no sources."""
    left_out: dict[str, str] = {}
    """Why workers that live get no requests, by their ids."""


class PrefixHeat(Struct, frozen=True):
    """A prefix that several of the latest prompts share. Hashes stand for its text."""

    model: str
    block: str
    """The sequence hash of its last block, which names the whole prefix: 16 hex digits."""
    blocks: int
    tokens: int
    asked: int
    """The number of the latest requests whose prompt begins with it."""
    hits: int
    """How many of them found it cached where they went, as far as a prompt can be."""
    age_s: float
    """The time since the last of them, in seconds."""
    device: list[str]
    """The workers that have all of it on their device; the first few."""
    host: int
    """The number of workers that would load some of it from host memory."""
    disk: int
    """The number of workers that would load some of it from disk."""


class HeatState(Struct, frozen=True):
    """What one router's latest choices asked for."""

    router: str
    requests: int
    """The number of requests whose choices it remembers; one request may have several choices."""
    over_s: float
    """The age of the oldest choice, in seconds."""
    asked_blocks: int
    """The number of distinct blocks that these prompts asked for; of long prompts the leading ones."""
    index_blocks: int
    """The number of distinct blocks in the index."""
    prefixes: list[PrefixHeat]
    """The hottest first: by blocks times requests."""


WorkerOperation = Literal["sleep", "wake", "drain", "resume", "clear", "load_lora", "unload_lora"]


class OperateWorker(Struct, frozen=True, tag="operate"):
    """Do an operation on the whole worker; the answer comes when it is done. A worker does one at a time."""

    operation: WorkerOperation
    name: str = ""
    """The name of the LoRA to load or unload."""
    path: str = ""
    """The directory of the LoRA to load, as PEFT writes it and as the worker sees it."""
    level: int = 1
    """The level of sleep: 1 keeps the weights in host memory, 2 drops them; both drop the KV."""
    drain_s: float | None = None
    """The seconds for which running attempts may go on before a sleep. None means the worker's setting `drain_s`."""
    engine_s: float | None = None
    """The seconds that the engine has for each step of it, and is killed after. None means the worker's own limit,
    which is also the most."""


class WorkerOperated(Struct, frozen=True, tag="operated"):
    """An operation was done, unless `failed` says why not."""

    instance: str
    failed: str = ""
    state: str = ""
    """The worker's `Instance.state` after the operation."""
    lora: tuple[str, ...] = ()
    """The LoRAs' ids in the worker's card after the operation."""
    busy: bool = False
    """True if it was refused for now alone: another operation runs, or the engine is starting."""


EXPLANATIONS: Codec[Explanations] = Codec(Explanations, "explanations")
ROUTER_STATE: Codec[RouterState] = Codec(RouterState, "router state")
HEAT: Codec[HeatState] = Codec(HeatState, "heat")
OPERATE_WORKER: Codec[OperateWorker] = Codec(OperateWorker, "operation")
WORKER_OPERATED: Codec[WorkerOperated] = Codec(WorkerOperated, "answer to an operation")
