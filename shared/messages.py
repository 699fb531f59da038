"""Every Struct that crosses a process boundary between services: all that is ever said. Pure.

Channels, each with its union and its codec at the end of the file:

    discovery            Instance, ModelCard                     JSON under a lease
    frontend → router    Select → Selected | SelectRefused       request and reply
    → all routers        Reserved | Prefilled | Finished         published in batches; Reserved where there are several
    router → router      ReservationsRequest → Reservations …    request, streamed replies
    people → router      a request id → Explanations             request and reply, JSON
                         nothing → RouterState                   request and reply, JSON
    frontend → worker    Generate → Accepted | Refused           request and reply
                         Cancel                                  published
                         ResendRequest → Resent                  request and reply
    anyone → service     Ping → Pong                             request and reply, `control`
    worker → frontend    StepFrame of Parts                      published, at most one a step
    frontend → frontend  Recall | Forget → Recalled …            request, streamed replies
    worker → everyone    LoadReport                              published every 250 ms
    router → worker      SnapshotRequest → SnapshotChunk …       request, streamed replies; kvbm has them too
    worker → routers     EventBatch of vLLM's KV events          ZMQ; kvbm has them too
    worker ⇄ kvbm        shared.kvbm_messages

Payloads are msgpack; JSON where the message's `Content-Type` header says `application/json`. Token ids are packed
little-endian u32, hashes packed little-endian u64 (`shared.hashing`). Time limits travel as time left, in seconds.
Fields are only ever added, with a default, so that protocol N reads N-1 and N+1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import ProtocolError

PROTOCOL = 1
JSON_HEADER = {"Content-Type": "application/json"}

ServiceName = Literal["frontend", "router", "worker", "kvbm"]
Role = Literal["aggregated", "prefill", "decode", "encode"]
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
Tier = Literal["device", "host", "disk"]
Pooling = Literal["", "mean", "last"]
"""What an embedding is of: the mean of all positions' hidden states, or the last position's; empty: there is none."""

# --- discovery: JSON values under the process's lease


class EventSource(Struct, frozen=True):
    """Where a worker's KV events come from and what the source can do beyond vLLM's format."""

    publish: str
    """ZMQ endpoint of the PUB side."""
    replay: str
    """ZMQ endpoint of the ROUTER that replays, always bound by the source; empty: none."""
    topic: str = ""
    binds: Literal["source", "subscriber"] = "source"
    """Which side binds `publish`."""
    epoch: bool = False
    snapshot: bool = False
    digest: bool = False


class Instance(Struct, frozen=True):
    """The address book entry of one running process."""

    namespace: str
    service: ServiceName
    instance: str
    epoch: int
    """Counts the leases this process has held; grows by one each time a lease was lost."""
    machine: str
    pid: int
    started: float
    """Wall clock, seconds since 1970; for people."""
    version: str
    protocol: int = PROTOCOL
    subjects: dict[str, str] = {}
    """Operation → subject; every service has `control`."""
    events: EventSource | None = None
    http: str = ""
    """Base URL of the process's /live, /health and /metrics; empty: none."""
    api: str = ""
    """Base URL where clients reach a frontend, perhaps shared with other processes."""
    layouts: dict[str, EventSource] = {}
    """A kvbm's layouts, by digest: where the events of the blocks that it holds of each come from."""
    pid_namespace: int = 0
    """Where `pid` holds, as the kernel numbers it (the inode of /proc/self/ns/pid); 0: not known."""


class KvLayout(Struct, frozen=True):
    """How one block's KV lies in memory: blocks of two layouts are never exchanged."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""

    @property
    def block_bytes(self) -> int:
        """Size of one super-block: keys and values of all layers."""
        item = {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * item

    @property
    def digest(self) -> str:
        """16 hex digits that name the layout."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class ModelCard(Struct, frozen=True):
    """What one instance serves."""

    model: str
    instance: str
    path: str
    """Directory with tokenizer.json and tokenizer_config.json, as the worker sees it."""
    tokenizer_digest: str
    """SHA-256 (hex) of tokenizer.json."""
    hash_self_test: str
    """`shared.hashing.self_test(block_size)` as this instance computes it."""
    context_length: int
    vocab_size: int
    block_size: int
    capacity_blocks: int
    kv_layout: KvLayout
    eos_token_ids: tuple[int, ...] = ()
    role: Role = "aggregated"
    ranks: int = 1
    """Data-parallel ranks; a candidate is (instance, rank)."""
    lora: tuple[str, ...] = ()
    kvbm: str = ""
    """The instance id of the kvbm this worker is attached to; empty: none."""
    kvbm_layout: str = ""
    """The digest of its layout there."""
    grammars: bool = False
    """Whether it holds output to `Sampling.grammar`; who does not say so would pass over it."""
    biases: bool = False
    """Whether it adds `Sampling.logit_bias`; who does not say so would pass over it."""
    embedding_size: int = 0
    """Floats of an embedding; 0: it knows nothing of `Sampling.pooling`, and would answer with text."""
    pooling: Pooling = ""
    """What embeddings of the model are meant to be of; empty: something that is not built."""
    device: str = ""
    """Where its engine computes, for people: cpu, or cuda:N with N as that process counts its GPUs; empty: nowhere."""


# --- frontend → router: select and reserve in one step


class Select(Struct, frozen=True, tag="select"):
    """Choose an instance for a prompt and reserve its load there."""

    request: str
    attempt: int
    frontend: str
    """Instance id of the asker; its reservations end with its lease."""
    model: str
    hashes: bytes
    """Sequence hashes of the prompt's full blocks, packed u64, seeded for LoRA and salt."""
    prompt_tokens: int
    max_tokens: int
    """Upper bound of tokens still to be decoded."""
    excluded: tuple[str, ...] = ()
    """Instances that failed this request or refused it."""
    lora: str = ""
    priority: int = 0
    session: str = ""
    """Requests with the same non-empty session prefer the same instance, all else nearly equal."""
    explain: bool = False
    """Whether the answer shall name the candidates that were not chosen."""
    time_left_s: float = 0.0
    """Of the request; 0: not told."""
    wait_limit_s: float = 0.0
    """Refuse as overloaded where every candidate's first token is predicted to come later than this; 0: never."""


class Overlap(Struct, frozen=True, array_like=True):
    """Leading blocks found, each counted in its best tier."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk


class Candidate(Struct, frozen=True):
    """One row of a decision: an (instance, rank) with what spoke for and against it."""

    instance: str
    rank: int
    overlap: Overlap
    score: float
    """Lower is better."""
    active_blocks: int
    queued_tokens: int
    reason: str
    predicted_s: float | None = None
    """Until the first token, if chosen; None: how fast the worker is has not been heard."""


class Selected(Struct, frozen=True, tag="selected"):
    """The choice; the load is reserved until Finished, or until a lease ends."""

    request: str
    attempt: int
    instance: str
    rank: int
    router: str
    overlap: Overlap
    reason: str
    candidates: tuple[Candidate, ...] = ()
    """The best few, best first; none where nobody asked."""


class SelectRefused(Struct, frozen=True, tag="refused"):
    """No choice could be made."""

    request: str
    attempt: int
    code: Literal["no_instances", "all_excluded", "unknown_model", "bad_request", "overloaded"]
    reason: str
    retry_after_s: float = 1.0


SelectReply = Selected | SelectRefused

# --- reservations, to every router of the model


class Reserved(Struct, frozen=True, tag="reserved"):
    """A router chose `instance` for this attempt."""

    request: str
    attempt: int
    frontend: str
    instance: str
    rank: int
    uncached_tokens: int
    blocks: int
    """Blocks the prompt will occupy beside those that it finds on the device, which others may hold too."""
    router: str = ""
    """The router that reserved; it ignores its own message."""
    priority: int = 0


class Prefilled(Struct, frozen=True, tag="prefilled"):
    """The attempt's first token has come: its prefill load is gone, its blocks stay."""

    request: str
    attempt: int
    cached_tokens: int
    first_token_s: float = 0.0
    """From the request's arrival at the frontend, as its client saw it; 0: not told."""
    instance: str = ""
    """Who computed it; empty: not told."""
    cached_host_tokens: int = 0
    """Of `cached_tokens`, those that came from a kvbm's host memory …"""
    cached_disk_tokens: int = 0
    """… and those that came from its disk."""


class Finished(Struct, frozen=True, tag="finished"):
    """The attempt has ended, however it ended."""

    request: str
    attempt: int


LoadEvent = Reserved | Prefilled | Finished


class LoadEvents(Struct, frozen=True):
    """A batch of load events for one model."""

    model: str
    events: list[LoadEvent]


# --- router → router: what a replica that starts has missed


class ReservationsRequest(Struct, frozen=True, tag="reservations_request"):
    """All reservations of a model that have not ended, please."""

    model: str


class Reservations(Struct, frozen=True, tag="reservations"):
    """Some of those that one router knows, oldest first; what is told meanwhile comes by the load subject."""

    model: str
    reserved: list[Reserved]
    prefilled: list[tuple[str, int]]
    """(request, attempt) of those whose first token has come."""


# --- people → router: why, and how are you


class Explanation(Struct, frozen=True):
    """One choice, and what came of it."""

    model: str
    router: str
    """Who chose."""
    request: str
    attempt: int
    age_s: float
    """Since the choice."""
    instance: str
    """The one chosen."""
    rank: int
    reason: str
    candidates: tuple[Candidate, ...]
    """The best few, best first, the chosen one among them."""
    prompt_tokens: int
    predicted_cached_tokens: int
    actual_cached_tokens: int | None = None
    """As the worker counted; None: its first token was not told yet."""
    first_token_s: float | None = None
    """As the client saw it; None: not told yet, or an attempt before this one brought it."""
    ended_s: float | None = None
    """From the choice until its end was told; None: not yet."""


class Explanations(Struct, frozen=True):
    """What one router remembers of a request, or of its latest ones; oldest first."""

    router: str
    decisions: list[Explanation]


class ModelState(Struct, frozen=True):
    """What a router knows of one model."""

    model: str
    instances: int
    reservations: int
    index_blocks: int
    """Distinct ones."""
    index_bytes: int


class SourceState(Struct, frozen=True):
    """How one event stream is followed: a worker's, or that of one layout of a kvbm."""

    instance: str
    """A worker's id, or KVBM/LAYOUT."""
    state: str
    """live, syncing, …: services/router/sync/source.py draws them; refused."""
    reason: str = ""
    """Why it is refused."""
    partial: bool = False
    """Blocks that it told of may be unknown here: it has no snapshots, and its replay does not reach back."""
    exact: bool = True
    """Nothing that it told of was left out at a limit."""
    silent: bool = False
    """Requests compute new blocks there, and nothing is heard."""
    epoch: int | None = None
    applied: int = -1
    """Sequence of the last batch applied; -1: none."""
    gaps: int = 0
    resyncs: int = 0
    """How often everything was asked for."""
    rejected: int = 0
    """Batches that could not be read."""
    torn: int = 0
    """Messages that were no batches at all."""
    dropped: int = 0
    """Batches that came while too many waited to be applied."""
    digests: dict[str, int] = {}
    """Comparisons so far: agreed, differed, exempt."""
    heard_s_ago: float | None = None
    """Since the last batch came by itself; None: none yet."""


class RouterState(Struct, frozen=True):
    """One router's own account of itself."""

    router: str
    policy: str
    models: list[ModelState]
    sources: list[SourceState]
    policy_trouble: str = ""
    """Why not all choices are the policy's, at the worst of the models; empty: they are."""


# --- frontend → worker


class Sampling(Struct, frozen=True):
    """How tokens are drawn; every field in the range its comment gives (the frontend validates)."""

    max_tokens: int
    """≥ 1; counts tokens of all attempts of the request."""
    temperature: float = 1.0
    """0 … 2; 0 is greedy."""
    top_p: float = 1.0
    """0 < p ≤ 1."""
    top_k: int = 0
    """≥ 0; 0 is off."""
    min_p: float = 0.0
    """0 … 1."""
    seed: int = 0
    """u64; the frontend draws one where the client gave none."""
    presence_penalty: float = 0.0
    """-2 … 2, over the tokens produced so far."""
    frequency_penalty: float = 0.0
    """-2 … 2, over the tokens produced so far."""
    repetition_penalty: float = 1.0
    """> 0, over prompt and output."""
    logprobs: int = -1
    """-1: none; 0: of the drawn token; n: and of the n likeliest (≤ 20)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    """What the output is held to from its first token to its end, as llguidance reads it: its JSON or its Lark dialect;
    empty: nothing. Only for instances whose card has `grammars`, and never with `ignore_eos`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each at most once (≤ 300), and what is added to the logit before all else, -100 … 100. Only for
    instances whose card has `biases`."""
    pooling: Pooling = ""
    """Not empty: nothing is drawn, and the attempt's one Part has finish "stop", no tokens and an `embedding`. Only for
    instances whose card has an `embedding_size`, and only for a prompt without output; it may fill the context."""


class Generate(Struct, frozen=True, tag="generate"):
    """Compute a prompt and decode from it; tokens go to the frontend's stream subject."""

    request: str
    attempt: int
    model: str
    frontend: str
    """Instance id whose `stream` subject gets the step frames."""
    tokens: bytes
    """Prompt, and on a continuation the output so far, packed u32."""
    prompt_tokens: int
    """Length of the original prompt; less than len(tokens) / 4 on a continuation."""
    sampling: Sampling
    time_left_s: float
    rank: int = 0
    lora: str = ""
    salt: str = ""
    priority: int = 0
    wait_left_s: float | None = None
    """Seconds within which the worker is to begin to compute it, at most; where it has not, the attempt ends with
    NOT_BEGUN. None: there is no such limit."""


class Accepted(Struct, frozen=True, tag="accepted"):
    """The worker owns the attempt now and will end it with a Part that has a finish reason."""

    request: str
    attempt: int


class Refused(Struct, frozen=True, tag="refused"):
    """The worker does not take the attempt; nothing was done."""

    request: str
    attempt: int
    code: Literal["overloaded", "draining", "bad_request", "wrong_model", "not_ready"]
    reason: str


GenerateReply = Accepted | Refused


class Cancel(Struct, frozen=True, tag="cancel"):
    """Free everything of this attempt; idempotent, unknown attempts are ignored."""

    request: str
    attempt: int


class Ping(Struct, frozen=True, tag="ping"):
    """Are you there? Any service, on its `control` subject."""

    key: str = ""
    """Of discovery: is it yours still? Empty: no key is asked about."""


class Pong(Struct, frozen=True, tag="pong"):
    """Yes; `progress` is the engine's step count where there is an engine."""

    instance: str
    epoch: int
    progress: int = 0
    publishes: bool | None = None
    """Whether `Ping.key` is to be in discovery, as far as this process has a say; None: not asked, or not said."""


# --- worker → frontend: one frame per engine step and frontend; steps of less than 2 ms share one


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position."""

    logprob: float
    """Of the drawn token."""
    top_tokens: bytes = b""
    """The likeliest tokens, packed u32, likeliest first."""
    top_logprobs: tuple[float, ...] = ()


SHUTTING_DOWN = "the worker is shutting down"
"""`Part.error` of an attempt that its worker hands back because it ends: neither of them has failed."""
UNFOLLOWABLE = "the grammar cannot be followed"
"""How `Part.error` begins where output cannot be held to `Sampling.grammar`, at any worker: nothing else has failed."""
NOT_FINITE = "the model computes numbers that are not finite"
"""How `Part.error` begins where that is so once more after the worker has computed everything again: others would fail,
too."""
NOT_BEGUN = "the request did not begin in time"
"""How `Part.error` begins where nothing of the attempt was computed within `Generate.wait_left_s`: it had no place."""


class Part(Struct, frozen=True, array_like=True):
    """One attempt's share of a step frame."""

    request: str
    attempt: int
    first: int
    """Index, in the request's whole output, of the first token here; a gap or a repeat shows at once."""
    tokens: bytes
    """New tokens, packed u32; a stop token is the last one of its part. May be empty."""
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache; with every part."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token, where they were asked for."""
    error: str = ""
    """Why, where finish is "error"; SHUTTING_DOWN, and what begins with UNFOLLOWABLE, NOT_FINITE or NOT_BEGUN,
    frontends know."""
    cached_host_tokens: int = 0
    """Of `cached_tokens`, those that came from the kvbm's host memory …"""
    cached_disk_tokens: int = 0
    """… and those that came from its disk."""
    embedding: bytes = b""
    """Little-endian float32, of length 1, where `Sampling.pooling` asked for it and finish is "stop"."""


class StepFrame(Struct, frozen=True, array_like=True):
    """What one engine step, or some very short ones, made for one frontend; sequences count up by one per (worker,
    frontend, epoch), from 0. A worker that numbers anew, because it had forgotten the frontend, has a larger epoch."""

    instance: str
    epoch: int
    sequence: int
    parts: list[Part]


# --- frontend → worker: a gap in the step frames


class ResendRequest(Struct, frozen=True, tag="resend"):
    """Publish the step frames from `first` on again, please; they come on the frontend's stream subject."""

    frontend: str
    first: int
    """Sequence of the first frame that was missed."""


class StreamState(Struct, frozen=True, array_like=True):
    """How far one running attempt is."""

    request: str
    attempt: int
    produced: int
    """Length of the request's whole output so far: what the next part's `first` will be."""


class Resent(Struct, frozen=True, tag="resent"):
    """The frames `first` … `next` - 1 are published again, before any new one."""

    epoch: int
    first: int
    """Later than asked where older frames are no longer kept: `streams` then says what was missed."""
    next: int
    """Sequence of the next new frame."""
    streams: list[StreamState]
    """The frontend's running attempts as of the frames up to `next`; an attempt that is missing has ended."""


# --- worker → routers and frontends, every 250 ms


class KvState(Struct, frozen=True, array_like=True):
    """How far the KV events of one rank are. The ranks of a source share its epoch and its sequence."""

    rank: int
    epoch: int
    """Counts the engine's starts; a new one means an empty cache."""
    sequence: int
    """Of the last batch published, whatever its rank; -1: none yet."""
    digest: int = 0
    """XOR of the event hashes of the blocks held, as of `sequence`."""


class LoadReport(Struct, frozen=True):
    """A worker's own account of itself."""

    instance: str
    epoch: int
    progress: int
    """Engine steps so far; standing still while work is there means frozen."""
    waiting: int
    running: int
    waiting_tokens: int
    """Prompt tokens not yet computed, of waiting and running sequences."""
    total_blocks: int
    held_blocks: int
    """Blocks that running sequences use."""
    cached_blocks: int
    """Blocks with reusable content that nobody uses now."""
    prefill_tokens_per_s: float = 0.0
    """As measured lately; 0: not yet."""
    step_s: float = 0.0
    """What a step that only decodes takes, as measured lately; 0: not yet."""
    kv: list[KvState] = []
    frames: dict[str, int] = {}
    """Frontend → sequence of the last step frame sent to it."""
    attempts: list[tuple[str, int]] = []
    """(request, attempt) of all that is waiting or running here."""


# --- frontend → frontend: a response that the other one keeps


class Recall(Struct, frozen=True, tag="recall"):
    """What is kept of a response, please; it counts as used."""

    response: str
    account: str
    """The name of the key that asks for it; empty: no key is asked for."""
    what: Literal["conversation", "response"]


class Forget(Struct, frozen=True, tag="forget"):
    """Keep it no longer."""

    response: str
    account: str


KeptQuestion = Recall | Forget


class Recalled(Struct, frozen=True):
    """A piece of the answer; JSON, put together."""

    found: bool
    """False: it is not kept, or not this account's."""
    piece: bytes = b""


# --- router → worker: every block held, to rebuild an index


class SnapshotRequest(Struct, frozen=True, tag="snapshot"):
    """Everything the prefix cache holds, please."""

    rank: int = 0
    layout: str = ""
    """Whose blocks, where a kvbm is asked: a layout's digest."""


class SnapshotBlock(Struct, frozen=True, array_like=True):
    """One cached block; parents come before their children."""

    hash: int
    parent: int | None
    tokens: bytes
    lora: str = ""
    salt: str = ""


class SnapshotChunk(Struct, frozen=True):
    """Part of a snapshot; all chunks carry the sequence it was taken at."""

    epoch: int
    sequence: int
    blocks: list[SnapshotBlock]
    last: bool
    tier: Tier = "device"
    """Where these blocks are; a kvbm's snapshot has chunks of host and of disk."""


# --- KV events on ZMQ: vLLM's format (0.32: maps), [topic][sequence, 8 bytes big-endian][EventBatch]


EventHash = int | Annotated[bytes, Meta(max_length=64)]
"""An engine's own name for a block. The longest hash in use is SHA-256; whoever keeps a name must know its bound."""


class BlockStored(Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Blocks became reusable, in order, the first behind `parent_block_hash`."""

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """Tier: GPU for the device; host_pinned and disk below it."""
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    """Per block; a tenant salt is the first entry of a chain's first block."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Blocks are no longer reusable."""

    block_hashes: list[EventHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The whole cache was dropped."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """One payload of the event stream."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


# --- codecs

T = TypeVar("T")


class Codec(Generic[T]):
    """One channel's typed encoder and decoder; built once."""

    def __init__(self, kind: type[T] | object, name: str) -> None:
        self._name = name
        self._msgpack: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._json: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, payload: bytes, headers: Mapping[str, str] | None = None) -> T:
        """Raises ProtocolError on anything that is not a message of this channel."""
        try:
            if not is_json(headers):
                return self._msgpack.decode(payload)
            message = self._json.decode(payload)
            _ENCODER.encode(message)  # JSON knows integers that msgpack, and so the next process, cannot be told
            return message
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as wrong:
            raise ProtocolError(f"{self._name}: {wrong}") from wrong

    def encode(self, message: T, headers: Mapping[str, str] | None = None) -> bytes:
        """`headers` are those of the request that this answers."""
        return msgspec.json.encode(message) if is_json(headers) else _ENCODER.encode(message)


def is_json(headers: Mapping[str, str] | None) -> bool:
    """Whether a message's headers ask for JSON."""
    return headers is not None and "application/json" in headers.get("Content-Type", "")


_ENCODER = msgspec.msgpack.Encoder()

INSTANCE: Codec[Instance] = Codec(Instance, "instance")
MODEL_CARD: Codec[ModelCard] = Codec(ModelCard, "model card")
SELECT: Codec[Select] = Codec(Select, "select")
SELECT_REPLY: Codec[SelectReply] = Codec(SelectReply, "select reply")
LOAD_EVENTS: Codec[LoadEvents] = Codec(LoadEvents, "load events")
RESERVATIONS_REQUEST: Codec[ReservationsRequest] = Codec(ReservationsRequest, "reservations request")
RESERVATIONS: Codec[Reservations] = Codec(Reservations, "reservations")
EXPLANATIONS: Codec[Explanations] = Codec(Explanations, "explanations")
ROUTER_STATE: Codec[RouterState] = Codec(RouterState, "router state")
GENERATE: Codec[Generate] = Codec(Generate, "generate")
GENERATE_REPLY: Codec[GenerateReply] = Codec(GenerateReply, "generate reply")
CANCEL: Codec[Cancel] = Codec(Cancel, "cancel")
RESEND_REQUEST: Codec[ResendRequest] = Codec(ResendRequest, "resend request")
RESENT: Codec[Resent] = Codec(Resent, "resent")
PING: Codec[Ping] = Codec(Ping, "ping")
PONG: Codec[Pong] = Codec(Pong, "pong")
STEP_FRAME: Codec[StepFrame] = Codec(StepFrame, "step frame")
LOAD_REPORT: Codec[LoadReport] = Codec(LoadReport, "load report")
KEPT_QUESTION: Codec[KeptQuestion] = Codec(KeptQuestion, "question for a response")
RECALLED: Codec[Recalled] = Codec(Recalled, "piece of a response")
SNAPSHOT_REQUEST: Codec[SnapshotRequest] = Codec(SnapshotRequest, "snapshot request")
SNAPSHOT_CHUNK: Codec[SnapshotChunk] = Codec(SnapshotChunk, "snapshot chunk")
EVENT_BATCH: Codec[EventBatch] = Codec(EventBatch, "event batch")
