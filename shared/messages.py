"""Every message that services exchange, as a Struct; nothing else crosses the border of a process. Pure.

These are the channels. The codec of each one is at the end of the file:

    discovery            Instance, ModelCard                     JSON under a lease
    frontend → router    Select → Selected | SelectRefused       request and reply
    → all routers        Reserved | Prefilled | Finished         in batches; Reserved only if there are several
    router → router      ReservationsRequest → Reservations …    request, streamed replies
    people → router      a request id → Explanations             request and reply, JSON
                         nothing → RouterState                   request and reply, JSON
    frontend → worker    Generate → Accepted | Refused           request and reply
                         Cancel                                  published
                         ResendRequest → Resent                  request and reply
    anyone → service     Ping → Pong                             request and reply, `control`
    people → service     FindNotes → FoundNotes                  request and reply, `control`
    people → worker      OperateWorker → WorkerOperated          request and reply
    worker → frontend    StepFrame of Parts                      published, at most one a step
    frontend → frontend  Recall | Forget → Recalled …            request, streamed replies
                         nothing → RecentRequests                request and reply
    worker → everyone    LoadReport                              published every 250 ms
    router → worker      SnapshotRequest → SnapshotChunk …       request, streamed replies; kvbm has them too
    worker → routers     EventBatch of vLLM's KV events          ZMQ; kvbm has them too
    worker ⇄ kvbm        shared.kvbm_messages

Payloads are msgpack, or JSON if the message's `Content-Type` header says `application/json`. Token ids are packed
little-endian u32, hashes are packed little-endian u64 (`shared.hashing`). A time limit is sent as the seconds left.
A field is only ever added, and with a default, so that protocol N can read N-1 and N+1. Select, Generate and kvbm's
Fetch of a traced request carry its place in the trace in the header `traceparent` (`shared.tracing.traceparent`).
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
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error", "handed_over"]
"""Why an attempt ended. handed_over: a `Generate.prefill_only` has its first token, and another worker decodes."""
Tier = Literal["device", "host", "disk"]
Pooling = Literal["", "mean", "last"]
"""How an embedding is made: from the mean of all positions' hidden states, or from the last one; empty: not at all."""

# --- discovery: JSON values under the lease of the process


class EventSource(Struct, frozen=True):
    """The address of a stream of KV events, and what its source can do beyond vLLM's format."""

    publish: str
    """The ZMQ endpoint of the PUB socket."""
    replay: str
    """The ZMQ endpoint of the ROUTER socket that replays batches, bound by the source; empty: there is no replay."""
    topic: str = ""
    binds: Literal["source", "subscriber"] = "source"
    """Which side binds `publish`."""
    epoch: bool = False
    """Whether the load reports of the source name the epoch of its events."""
    snapshot: bool = False
    """Whether the source answers a SnapshotRequest."""
    digest: bool = False
    """Whether the load reports of the source have a digest of its blocks."""


class Instance(Struct, frozen=True):
    """The address book entry of one running process."""

    namespace: str
    service: ServiceName
    instance: str
    epoch: int
    """The number of leases that this process has held: 1 at first, one more each time a lease is lost."""
    machine: str
    pid: int
    started: float
    """When the process started, in seconds since 1970. It orders the model cards of workers."""
    version: str
    protocol: int = PROTOCOL
    subjects: dict[str, str] = {}
    """The subject of each operation; every service has `control`."""
    events: EventSource | None = None
    http: str = ""
    """The base URL of /live, /health and /metrics of the process; empty: there is none."""
    api: str = ""
    """The base URL at which clients reach this frontend; other processes may share it."""
    layouts: dict[str, EventSource] = {}
    """The source of KV events of each layout of a kvbm, by the layout's digest."""
    pid_namespace: int = 0
    """The kernel's number of the PID namespace of `pid` (the inode of /proc/self/ns/pid); 0: unknown."""
    state: str = ""
    """Why a worker takes no requests although it lives: draining, drained or asleep; empty: no operator asked for
    that."""
    peers: str = ""
    """HOST:PORT at which kvbms of other machines can read this kvbm's blocks; empty: they cannot."""
    role: Role = "aggregated"
    """The role of a worker, which its card has too, for as long as it has one."""


class KvLayout(Struct, frozen=True, omit_defaults=True):
    """The shape of one block's KV in memory. Blocks of different layouts are never exchanged."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """The number of tokens in a block."""
    form: str = ""
    """A digest of the order of the bytes in a block of another engine; empty: the native engine's order."""
    form_bytes: Annotated[int, Meta(ge=0)] = 0
    """The size of one block of that engine in bytes; 0: the size follows from the other fields."""

    @property
    def block_bytes(self) -> int:
        """The size of one block in bytes: keys and values of all layers."""
        if self.form_bytes:
            return self.form_bytes
        item = {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * item

    @property
    def digest(self) -> str:
        """The name of the layout: 16 hex digits."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class SamplingDefaults(Struct, frozen=True):
    """The sampling parameters of requests that do not set them, as in `Sampling`."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0


class ModelCard(Struct, frozen=True):
    """One model as one instance serves it."""

    model: str
    instance: str
    path: str
    """The directory with tokenizer.json and tokenizer_config.json, as the worker sees it."""
    tokenizer_digest: str
    """The SHA-256 of tokenizer.json, in hex."""
    hash_self_test: str
    """The result of `shared.hashing.self_test(block_size)` in this instance."""
    context_length: int
    vocab_size: int
    block_size: int
    capacity_blocks: int
    """The number of blocks that each rank has."""
    kv_layout: KvLayout
    eos_token_ids: tuple[int, ...] = ()
    role: Role = "aggregated"
    """What the instance does of a request: all of it; prefill: only prompts, which it hands over with their first
    token; decode: it takes such requests over, and computes a prompt itself where no worker hands it over."""
    ranks: int = 1
    """The number of data-parallel ranks; a candidate is (instance, rank)."""
    lora: tuple[str, ...] = ()
    """The ids (`shared.lora`) of the LoRAs that are loaded; each one's name is also that of a model for clients."""
    kvbm: str = ""
    """The instance id of the kvbm that this worker is attached to; empty: none."""
    kvbm_layout: str = ""
    """The digest of the worker's layout at that kvbm."""
    grammars: bool = False
    """Whether the instance applies `Sampling.grammar`; an instance without this flag ignores the field."""
    biases: bool = False
    """Whether the instance applies `Sampling.logit_bias`; an instance without this flag ignores the field."""
    min_tokens: bool = False
    """Whether the instance applies `Sampling.min_tokens`; an instance without this flag ignores the field."""
    prompt_logprobs: bool = False
    """Whether the instance applies `Sampling.prompt_logprobs`; an instance without this flag ignores the field."""
    allowed_tokens: bool = False
    """Whether the instance applies `Sampling.allowed_tokens`; an instance without this flag ignores the field."""
    embedding_size: int = 0
    """The length of an embedding in floats; 0: the instance ignores `Sampling.pooling`, and answers with text."""
    pooling: Pooling = ""
    """The pooling that the model was trained with; empty: it is one that is not implemented."""
    generates: bool = True
    """Whether the instance answers with text; False: it only makes embeddings."""
    device: str = ""
    """The device of the engine, for people: cpu, or cuda:N, where N is that process's number of the GPU; empty:
    none."""
    sampling: SamplingDefaults = SamplingDefaults()
    """What the model's generation_config.json, or the worker's settings, recommend."""
    chat_template: str = ""
    """The chat template that replaces that of `path`: a name of `shared.chat_templates`, or a file's absolute path as
    the worker sees it; empty: none does."""
    template_digest: str = ""
    """The SHA-256, in hex, of the file with the chat template; empty: there is none, or an older worker wrote this."""
    template_text: str = ""
    """The text of the template that `chat_template` names, so that each frontend renders the same; empty: there is
    none, it is too long for a card, or an older worker wrote this. Then frontends read the file, and compare its
    digest."""

    @property
    def decodes(self) -> bool:
        """Whether the instance can answer a whole request. A model is ready only with such an instance."""
        return self.role in ("aggregated", "decode")

    @property
    def routed(self) -> bool:
        """Whether routers choose the instance."""
        return self.decodes or self.role == "prefill"


# --- frontend → router: select and reserve in one step


class Select(Struct, frozen=True, tag="select"):
    """Choose an instance for a prompt and reserve its load there."""

    request: str
    attempt: int
    frontend: str
    """The instance id of the frontend that asks; its reservations end with its lease."""
    model: str
    hashes: bytes
    """The sequence hashes of the prompt's full blocks, packed u64, with the seed of LoRA and salt."""
    prompt_tokens: int
    max_tokens: int
    """The maximum number of tokens that are still to be decoded."""
    excluded: tuple[str, ...] = ()
    """The instances that failed or refused this request."""
    lora: str = ""
    priority: int = 0
    """Requests of a higher priority are computed first: the negative of what the client sent."""
    session: str = ""
    """Requests of one session prefer one instance, if all else is nearly equal; empty: no session."""
    explain: bool = False
    """Whether the answer must name the candidates that were not chosen."""
    time_left_s: float = 0.0
    """The time left for the request, in seconds; 0: unknown."""
    wait_limit_s: float = 0.0
    """The longest wait for earlier prompts, in seconds: if no candidate is predicted to begin the request by then, the
    router refuses it as overloaded; 0: no limit."""
    whole: bool = False
    """Whether one worker must compute the whole request: an embedding, or log-probabilities of the prompt."""


class Overlap(Struct, frozen=True, array_like=True):
    """The number of leading blocks that were found, each counted in its fastest tier."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    """In the memory of other machines' block stores, which the candidate's own store can read."""

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk + self.remote

    @property
    def here(self) -> int:
        """The blocks on the candidate's own machine."""
        return self.device + self.host + self.disk


class Candidate(Struct, frozen=True):
    """One row of a decision: an (instance, rank), and the reasons for and against it."""

    instance: str
    rank: int
    overlap: Overlap
    score: float
    """The cost that the policy computed; lower is better."""
    active_blocks: int
    queued_tokens: int
    reason: str
    predicted_s: float | None = None
    """The predicted time to the first token, in seconds; None: the worker has not reported its speed yet."""


class Selected(Struct, frozen=True, tag="selected"):
    """The router's choice. The load stays reserved until Finished, or until a lease ends."""

    request: str
    attempt: int
    instance: str
    rank: int
    router: str
    overlap: Overlap
    reason: str
    candidates: tuple[Candidate, ...] = ()
    """The best few candidates, best first; empty unless `Select.explain` asked for them."""
    decode: str = ""
    """The worker that takes the request over after its first token, as attempt + 1, whose load is reserved there;
    `instance` computes only the prompt. Empty: `instance` computes all of it."""
    decode_rank: int = 0


class SelectRefused(Struct, frozen=True, tag="refused"):
    """The router could not choose an instance."""

    request: str
    attempt: int
    code: Literal["no_instances", "all_excluded", "unknown_model", "bad_request", "overloaded"]
    reason: str
    retry_after_s: float = 1.0


SelectReply = Selected | SelectRefused

# --- reservations, to every router of the model


class Reserved(Struct, frozen=True, tag="reserved"):
    """A router chose `instance` for this attempt, and counts its load there."""

    request: str
    attempt: int
    frontend: str
    instance: str
    rank: int
    uncached_tokens: int
    blocks: int
    """The number of blocks that the prompt will occupy, without those that it finds on the device, which others may
    share."""
    router: str = ""
    """The router that made the reservation; it ignores its own message."""
    priority: int = 0
    """The priority of its Select."""
    delay_s: float = 0.0
    """The longest time, in seconds, until the worker hears of the attempt, which another one hands over; 0: it hears of
    it at once."""


class Prefilled(Struct, frozen=True, tag="prefilled"):
    """The attempt's first token has come: its prefill load ends, its blocks stay in use."""

    request: str
    attempt: int
    cached_tokens: int
    first_token_s: float = 0.0
    """The time from the request's arrival at the frontend to its first token, in seconds; 0: unknown."""
    instance: str = ""
    """The worker that computed the prompt; empty: unknown."""
    cached_host_tokens: int = 0
    """How many of `cached_tokens` came from a kvbm's host memory."""
    cached_disk_tokens: int = 0
    """How many of `cached_tokens` came from a kvbm's disk."""


class Finished(Struct, frozen=True, tag="finished"):
    """The attempt has ended, for whatever reason."""

    request: str
    attempt: int


LoadEvent = Reserved | Prefilled | Finished


class LoadEvents(Struct, frozen=True):
    """A batch of load events for one model."""

    model: str
    events: list[LoadEvent]


# --- router → router: what a starting replica has missed


class ReservationsRequest(Struct, frozen=True, tag="reservations_request"):
    """Ask a router for all reservations of a model that have not ended."""

    model: str


class Reservations(Struct, frozen=True, tag="reservations"):
    """A part of the reservations that one router knows, oldest first. New ones come on the load subject meanwhile."""

    model: str
    reserved: list[Reserved]
    prefilled: list[tuple[str, int]]
    """The (request, attempt) of each reservation whose first token has come."""


# --- people → router: explanations and state


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
    """The cached tokens that the worker counted; None: its first token is not reported yet."""
    first_token_s: float | None = None
    """The time to the first token that the client saw, in seconds; None: not reported yet, or an earlier attempt
    produced it."""
    ended_s: float | None = None
    """The time from the choice to the reported end, in seconds; None: it has not ended."""
    lora: str = ""
    """The id of the LoRA that was asked for; empty: none."""
    trace: str = ""
    """The id of the request's trace; empty: it is not traced, or an older router wrote this."""
    passed_over: dict[str, str] = {}
    """Worker → why it could not be chosen: at most as many as candidates. Empty also where an older router wrote
    this."""


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
    """The sequence of the last batch that was applied; -1: none."""
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
    """The time since the last published batch came, in seconds; None: none has come yet."""


class RouterState(Struct, frozen=True):
    """The state of one router, as it reports it."""

    router: str
    policy: str
    models: list[ModelState]
    sources: list[SourceState]
    policy_trouble: str = ""
    """Why the policy does not make every choice, for the model with the worst trouble; empty: it makes them all."""
    events: str = "on"
    """Whether the router follows KV events: on, or off; then it has no sources."""


# --- frontend → worker


class Sampling(Struct, frozen=True):
    """The sampling parameters. The frontend has checked that each is within the range that its comment gives."""

    max_tokens: int
    """The maximum number of tokens, ≥ 1, over all attempts of the request."""
    temperature: float = 1.0
    """The temperature, 0 … 2; 0 is greedy."""
    top_p: float = 1.0
    """The nucleus sampling threshold, 0 < p ≤ 1."""
    top_k: int = 0
    """The number of likeliest tokens to draw from, ≥ 0; 0 is off."""
    min_p: float = 0.0
    """The least probability relative to the likeliest token, 0 … 1."""
    seed: int = 0
    """The random seed, a u64; the frontend draws one if the client gives none."""
    presence_penalty: float = 0.0
    """The presence penalty, -2 … 2, over the tokens produced so far."""
    frequency_penalty: float = 0.0
    """The frequency penalty, -2 … 2, over the tokens produced so far."""
    repetition_penalty: float = 1.0
    """The repetition penalty, > 0, over prompt and output."""
    logprobs: int = -1
    """Which log probabilities to return: -1: none; 0: that of the drawn token; n: also those of the n likeliest (≤
    20)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    """The grammar that constrains the whole output, as llguidance reads it (JSON, or its dialect of Lark); empty: none.
    Only for instances whose card has `grammars`, and never with `ignore_eos`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each at most once (≤ 300), and the bias that is added to the logit first, -100 … 100. Only for
    instances whose card has `biases`."""
    pooling: Pooling = ""
    """The pooling of an embedding; empty: the request generates text. With it, no token is drawn, and the attempt's
    only Part has finish "stop", no tokens and an `embedding`. Only for instances whose card has an `embedding_size`,
    and only for a prompt without output; the prompt may fill the context."""
    min_tokens: int = 0
    """The number of tokens, ≤ `max_tokens`, over all attempts of the request, before which no end-of-sequence token and
    no token of `stop_token_ids` is drawn, unless the grammar allows nothing else. Only for instances whose card has
    `min_tokens`."""
    prompt_logprobs: int = -1
    """The log probabilities of the prompt's tokens to return, in numbers as for `logprobs`; they come in
    `Part.prompt_logprobs`. Only for instances whose card has `prompt_logprobs`, and only for a prompt without
    output."""
    allowed_tokens: bytes = b""
    """The token ids that alone may be drawn, packed u32 (≤ 16,384), unless the grammar allows none of them; empty: all.
    Only for instances whose card has `allowed_tokens`."""


class Generate(Struct, frozen=True, tag="generate"):
    """Compute a prompt and decode from it. The tokens go to the frontend's stream subject."""

    request: str
    attempt: int
    model: str
    frontend: str
    """The instance id of the frontend whose `stream` subject gets the step frames."""
    tokens: bytes
    """The prompt and, on a continuation, the output so far, packed u32."""
    prompt_tokens: int
    """The length of the original prompt in tokens; less than len(tokens) / 4 on a continuation."""
    sampling: Sampling
    time_left_s: float
    rank: int = 0
    lora: str = ""
    salt: str = ""
    priority: int = 0
    """Attempts of a higher priority are computed first, and those of a lower one give their blocks back first."""
    wait_left_s: float | None = None
    """The time within which the worker must begin to compute the prompt, in seconds. If it does not, the attempt ends
    with NOT_BEGUN. None: there is no such limit."""
    prefill_only: bool = False
    """Whether the attempt ends with its first token, as "handed_over", unless that token ends the request. The worker
    offers all full blocks of the prompt to its kvbm, also those that it found in its cache. Only for instances whose
    card has the role prefill."""
    prefill_by: str = ""
    """In advice that this attempt is expected: the instance that computes the prompt, and may lend its blocks."""


class Accepted(Struct, frozen=True, tag="accepted"):
    """The worker owns the attempt now. It will end the attempt with a Part that has a finish reason."""

    request: str
    attempt: int


class Refused(Struct, frozen=True, tag="refused"):
    """The worker does not accept the attempt, and has done nothing."""

    request: str
    attempt: int
    code: Literal["overloaded", "draining", "bad_request", "wrong_model", "not_ready"]
    reason: str


GenerateReply = Accepted | Refused


class Cancel(Struct, frozen=True, tag="cancel"):
    """Free everything that this attempt uses. Idempotent; unknown attempts are ignored."""

    request: str
    attempt: int


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


class WorkerOperated(Struct, frozen=True, tag="operated"):
    """An operation was done, unless `failed` says why not."""

    instance: str
    failed: str = ""
    state: str = ""
    """The worker's `Instance.state` after the operation."""
    lora: tuple[str, ...] = ()
    """The LoRAs' ids in the worker's card after the operation."""


class Ping(Struct, frozen=True, tag="ping"):
    """Ask a process, on its `control` subject, whether it lives."""

    key: str = ""
    """A key of discovery: the question is whether the process still publishes it. Empty: there is no such question."""


class ChangeLogLevel(Struct, frozen=True, tag="change_log_level"):
    """Ask a process, on its `control` subject, to log from another level on."""

    level: str
    """debug, info, warning or error."""
    for_s: float = 0.0
    """The seconds after which the level is again what it was; 0: it stays."""


class FindNotes(Struct, frozen=True, tag="find_notes"):
    """Ask a process, on its `control` subject, what it remembers of requests, or of one block."""

    request: str = ""
    """The id of a request, or what `shared.request_names` takes for one; empty: all requests are meant."""
    block: str = ""
    """The last 16 hex digits of a block's key, or all 32; empty: requests are meant."""


class Note(Struct, frozen=True):
    """One thing that happened to a request or to a block."""

    about: str
    """The request's id, or the block's key in hex."""
    age_s: float
    text: str
    attempt: int = 0
    """The number of the request's attempt; 0: the request as a whole, or a block."""


class FoundNotes(Struct, frozen=True, tag="found_notes"):
    """What one process remembers, oldest first, and where it has the block now."""

    service: str
    instance: str
    notes: list[Note]
    places: list[str] = []
    """Where the block is now in this process, and why it stays or goes, one line a place; empty for a request."""
    failed: str = ""
    """Why there is no answer; empty: there is one."""


class LogLevelChanged(Struct, frozen=True, tag="log_level_changed"):
    """The answer to ChangeLogLevel."""

    instance: str
    failed: str = ""
    """Why the level was not changed; empty: it was."""


class Pong(Struct, frozen=True, tag="pong"):
    """The process lives."""

    instance: str
    epoch: int
    progress: int = 0
    """The engine's number of steps so far, if there is an engine."""
    publishes: bool | None = None
    """Whether this process publishes `Ping.key`; None: it was not asked, or does not say."""


# --- worker → frontend: one frame per engine step and frontend; steps of less than 2 ms share one


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The natural logarithms of probabilities at one position."""

    logprob: float
    """The log probability of the drawn token."""
    top_tokens: bytes = b""
    """The likeliest tokens, packed u32, likeliest first."""
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """The natural logarithms of the probabilities of several prompt tokens that follow one another. Each number has
    four bytes, since a long prompt has many of them."""

    first: int
    """The index of the first of these tokens in the prompt, ≥ 1: nothing precedes token 0."""
    logprobs: bytes
    """The log probability of each token, packed little-endian float32."""
    top_tokens: bytes = b""
    """The likeliest tokens at each position, packed u32, likeliest first, the same number for each."""
    top_logprobs: bytes = b""
    """The log probabilities of these tokens, packed little-endian float32."""

    @property
    def count(self) -> int:
        """The number of prompt tokens."""
        return len(self.logprobs) // 4

    @property
    def is_sound(self) -> bool:
        """Whether the lengths agree, so that reading it cannot fail."""
        rest = len(self.logprobs) % 4 or len(self.top_tokens) % (4 * self.count or 1)
        return self.first >= 1 and self.count >= 1 and not rest and len(self.top_tokens) == len(self.top_logprobs)

    def after(self, known: int) -> PromptLogprobs:
        """Return it without its first `known` tokens."""
        top = len(self.top_tokens) // self.count * known
        return PromptLogprobs(
            self.first + known, self.logprobs[4 * known :], self.top_tokens[top:], self.top_logprobs[top:]
        )


SHUTTING_DOWN = "the worker is shutting down"
"""The text of `Part.error` if the worker ends and hands the attempt back: neither has failed."""
UNFOLLOWABLE = "the grammar cannot be followed"
"""The beginning of `Part.error` if no worker can apply `Sampling.grammar`; nothing else has failed."""
NOT_FINITE = "the model computes numbers that are not finite"
"""The beginning of `Part.error` if that happens again after the worker has recomputed everything: other workers would
fail too."""
NOT_BEGUN = "the request did not begin in time"
"""The beginning of `Part.error` if no part of the attempt was computed within `Generate.wait_left_s`."""


class Part(Struct, frozen=True, array_like=True):
    """One attempt's share of a step frame."""

    request: str
    attempt: int
    first: int
    """The index of the first token here in the request's whole output. It shows a gap or a repeat at once."""
    tokens: bytes
    """The new tokens, packed u32, perhaps none. A stop token is the last token of its part."""
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """The number of prompt tokens that were found in the prefix cache; every part has it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each token, if the request asked for them."""
    error: str = ""
    """The reason if finish is "error". Frontends know SHUTTING_DOWN, and texts that begin with UNFOLLOWABLE, NOT_FINITE
    or NOT_BEGUN."""
    cached_host_tokens: int = 0
    """How many of `cached_tokens` came from the kvbm's host memory."""
    cached_disk_tokens: int = 0
    """How many of `cached_tokens` came from the kvbm's disk."""
    embedding: bytes = b""
    """The embedding, a vector of norm 1 in little-endian float32, if `Sampling.pooling` asked for it and finish is
    "stop"."""
    prompt_logprobs: PromptLogprobs | None = None
    """The next log probabilities of prompt tokens, if the request asked for them. Those of all prompt tokens but the
    first come in order, in parts without tokens, before the part with the attempt's first token."""


class StepFrame(Struct, frozen=True, array_like=True):
    """The output of one engine step, or of several very short ones, for one frontend.

    Frames of one (worker, frontend, epoch) are numbered from 0 without gaps. A worker that has forgotten the frontend
    numbers from 0 again, with a larger epoch."""

    instance: str
    epoch: int
    sequence: int
    parts: list[Part]


# --- frontend → worker: a gap in the step frames


class ResendRequest(Struct, frozen=True, tag="resend"):
    """Ask a worker to publish the step frames from `first` on again, on the frontend's stream subject."""

    frontend: str
    first: int
    """The sequence of the first missing frame."""


class StreamState(Struct, frozen=True, array_like=True):
    """The progress of one running attempt."""

    request: str
    attempt: int
    produced: int
    """The length of the request's whole output so far in tokens: the `first` of the next part."""


class Resent(Struct, frozen=True, tag="resent"):
    """The worker publishes the frames `first` … `next` - 1 again, before any new frame."""

    epoch: int
    first: int
    """The first frame that is published again. It is later than requested if older frames are no longer kept; then
    `streams` says what was missed."""
    next: int
    """The sequence of the next new frame."""
    streams: list[StreamState]
    """The frontend's running attempts as of the frames up to `next`; an attempt that is missing has ended."""


# --- worker → routers and frontends, every 250 ms


class KvState(Struct, frozen=True, array_like=True):
    """The position of one rank's KV events. The ranks of a source share its epoch and its sequence."""

    rank: int
    epoch: int
    """The number of the engine's starts; a new start means an empty cache."""
    sequence: int
    """The sequence of the last published batch, of any rank; -1: none yet."""
    digest: int = 0
    """The XOR of the event hashes of all blocks in the cache, as of `sequence`."""


class RankLoad(Struct, frozen=True, array_like=True):
    """The load of one data-parallel rank, with the meanings of LoadReport's fields."""

    rank: int
    waiting: int
    running: int
    waiting_tokens: int
    held_blocks: int


class LoadReport(Struct, frozen=True):
    """The load of a worker, as it reports it. Counts are sums over its ranks; a speed is one rank's, the mean of those
    that were measured."""

    instance: str
    epoch: int
    progress: int
    """The number of engine steps so far. If it stands still while there is work, the engine is frozen."""
    waiting: int
    running: int
    waiting_tokens: int
    """The number of prompt tokens of waiting and running sequences that are not computed yet."""
    total_blocks: int
    held_blocks: int
    """The number of blocks that running sequences use."""
    cached_blocks: int
    """The number of blocks with reusable content that no sequence uses now."""
    prefill_tokens_per_s: float = 0.0
    """The prefill speed measured lately, in tokens per second; 0: not measured yet."""
    step_s: float = 0.0
    """The duration of a step that only decodes, as measured lately, in seconds; 0: not measured yet."""
    kv: list[KvState] = []
    frames: dict[str, int] = {}
    """The sequence of the last step frame that was sent to each frontend."""
    attempts: list[tuple[str, int]] = []
    """The (request, attempt) of every waiting or running sequence."""
    ranks: list[RankLoad] = []
    """The load of each rank, if there are several."""
    output_tokens: int = 0
    """The number of tokens drawn since the worker started; an older worker reports 0."""


# --- frontend → frontend: the latest requests of each, for the page at /ui


class RequestWay(Struct, frozen=True):
    """How one request went through the services, as its frontend knows it: times and counts, and nothing of its text.

    Each time is in seconds after the request's body was complete; None: not yet, or never."""

    name: str
    """The first digits of the frontend's own part of the request's id: too few to read a stored response with."""
    model: str
    age_s: float
    """The time since the body was complete, in seconds."""
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens that were found in a cache; the first part of an attempt reports it."""
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    attempt: int = 0
    """The number of the current attempt, or of the last one; 0: none yet."""
    instances: tuple[str, ...] = ()
    """The workers that were chosen, in this order; the latest few."""
    tokenised_s: float = 0.0
    selected_s: float | None = None
    """When a router had chosen a worker for the first attempt."""
    accepted_s: float | None = None
    """When a worker had accepted the request for the first time."""
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    """What ended it: stop, length, tool_calls, cancelled, or the kind of the error; empty: it runs."""


class RecentRequests(Struct, frozen=True):
    """The latest requests of one frontend, oldest first, and how many it has."""

    frontend: str
    arriving: int
    """The number of requests whose prompt is not tokenised yet."""
    running: int
    begun: int
    """The number of requests, since the frontend started, whose prompt was tokenised."""
    requests: list[RequestWay]


# --- frontend → frontend: a response that another frontend stores


class Recall(Struct, frozen=True, tag="recall"):
    """Ask a frontend for a response that it stores. This counts as a use of the response."""

    response: str
    account: str
    """The name of the API key that asks for it; empty: no keys are required."""
    what: Literal["conversation", "response"]


class Forget(Struct, frozen=True, tag="forget"):
    """Ask a frontend to delete a stored response."""

    response: str
    account: str


ResponseStoreRequest = Recall | Forget


class Recalled(Struct, frozen=True):
    """A piece of the answer; the pieces together are JSON."""

    found: bool
    """Whether the response is stored, and belongs to this account."""
    piece: bytes = b""


# --- router → worker: every cached block, to rebuild an index


class SnapshotRequest(Struct, frozen=True, tag="snapshot"):
    """Ask a worker or a kvbm for everything that its prefix cache holds."""

    rank: int = 0
    layout: str = ""
    """The digest of the layout, if a kvbm is asked; empty for a worker."""


class SnapshotBlock(Struct, frozen=True, array_like=True):
    """One cached block. Parents come before their children."""

    hash: int
    parent: int | None
    tokens: bytes
    lora: str = ""
    salt: str = ""


class SnapshotChunk(Struct, frozen=True):
    """A part of a snapshot. All its chunks have the sequence at which it was taken."""

    epoch: int
    sequence: int
    blocks: list[SnapshotBlock]
    last: bool
    tier: Tier = "device"
    """The tier of these blocks; a kvbm's snapshot has chunks of host and of disk."""


# --- KV events on ZMQ: vLLM's format (0.32: maps), [topic][sequence, 8 bytes big-endian][EventBatch]


EventHash = int | Annotated[bytes, Meta(max_length=64)]
"""An engine's own name for a block, at most 64 bytes, so that a reader that stores names can bound them. The longest in
use is a SHA-256."""


class BlockStored(Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Blocks became reusable, in this order; the first one follows `parent_block_hash`."""

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """The tier: GPU for the device, host_pinned and disk for those below it."""
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    """The extra keys of each block; a tenant salt is the first entry of a chain's first block."""
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
    """The typed encoder and decoder of one channel, built once."""

    def __init__(self, kind: type[T] | object, name: str) -> None:
        self._name = name
        self._msgpack: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._json: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, payload: bytes, headers: Mapping[str, str] | None = None) -> T:
        """Decode a message of this channel. Raise ProtocolError if it is not one."""
        try:
            if not is_json(headers):
                return self._msgpack.decode(payload)
            message = self._json.decode(payload)
            _ENCODER.encode(message)  # JSON has larger integers than msgpack can carry to the next process
            return message
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as wrong:
            raise ProtocolError(f"{self._name}: {wrong}") from wrong

    def encode(self, message: T, headers: Mapping[str, str] | None = None) -> bytes:
        """Encode a message: as JSON if `headers`, those of the request that it answers, say so; else as msgpack."""
        return msgspec.json.encode(message) if is_json(headers) else _ENCODER.encode(message)


def is_json(headers: Mapping[str, str] | None) -> bool:
    """Return whether a message's headers ask for JSON."""
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
OPERATE_WORKER: Codec[OperateWorker] = Codec(OperateWorker, "operation")
WORKER_OPERATED: Codec[WorkerOperated] = Codec(WorkerOperated, "answer to an operation")
PING: Codec[Ping] = Codec(Ping, "ping")
CONTROL: Codec[Ping | ChangeLogLevel | FindNotes] = Codec(Ping | ChangeLogLevel | FindNotes, "control")
FOUND_NOTES: Codec[FoundNotes] = Codec(FoundNotes, "found notes")
LOG_LEVEL_CHANGED: Codec[LogLevelChanged] = Codec(LogLevelChanged, "log level")
PONG: Codec[Pong] = Codec(Pong, "pong")
STEP_FRAME: Codec[StepFrame] = Codec(StepFrame, "step frame")
LOAD_REPORT: Codec[LoadReport] = Codec(LoadReport, "load report")
RESPONSE_STORE_REQUEST: Codec[ResponseStoreRequest] = Codec(ResponseStoreRequest, "question for a response")
RECENT_REQUESTS: Codec[RecentRequests] = Codec(RecentRequests, "recent requests")
RECALLED: Codec[Recalled] = Codec(Recalled, "piece of a response")
SNAPSHOT_REQUEST: Codec[SnapshotRequest] = Codec(SnapshotRequest, "snapshot request")
SNAPSHOT_CHUNK: Codec[SnapshotChunk] = Codec(SnapshotChunk, "snapshot chunk")
EVENT_BATCH: Codec[EventBatch] = Codec(EventBatch, "event batch")
