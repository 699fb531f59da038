"""The channel between a worker's shell and its engine.

    shell (asyncio: NATS, ZMQ, etcd)                     engine process (a plain loop)
        Submit, CancelAttempt,                   ──▶     scheduler, block pool, runner
        TakeEngineSnapshot, ExplainBlock,
        Operate, EncodeImage, ProbeDevice,
        Shutdown
        TakeOver                                 ──▶     to an engine that stands by, which has said StandingBy
                            ◀──   Ready, Stepped, Snapshot, BlockExplained, Operated, ImageEncoded, Probed, Failed
                            ◀──   KvbmLink, KvbmAsks     the machine's block store, with which the engine speaks itself

The engine owns the block pool and numbers the KV event batches, so that one process says what is cached. The shell
answers the network and never touches a block.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.cards import ImageInput, KvLayout, PictureOutput, Pooling
from shared.messages.codec import Codec
from shared.messages.control import Note
from shared.messages.frames import Part
from shared.messages.generate import Image, Picture, Sampling
from shared.messages.kv_events import KvEvent, SnapshotBlock
from shared.tracing.traceparent import TraceParent

# --- shell → engine


class Submit(Struct, frozen=True, tag="submit"):
    """Compute an attempt; it ends with a Part that has a finish reason."""

    request: str
    attempt: int
    frontend: str
    tokens: bytes
    prompt_tokens: int
    """Length of the original prompt (a continuation's `tokens` are longer)."""
    sampling: Sampling
    time_left_s: float
    lora: str = ""
    salt: str = ""
    priority: int = 0
    wait_left_s: float | None = None
    """Seconds after which the attempt ends with NOT_BEGUN if it was in no step by then. None if only `time_left_s`
    bounds its wait."""
    rank: int = 0
    """The data-parallel rank that computes it, less than `Ready.ranks`."""
    prefill_only: bool = False
    """An attempt with this flag ends with its first token, as `Generate.prefill_only` says."""
    images: tuple[Image, ...] = ()
    """The images of the prompt, as `Generate.images` has them."""
    picture: Picture | None = None
    """The picture to make, as `Generate.picture` has it."""
    number: int = 0
    """The shell's short name for the attempt, in `Stepped.one_token_attempts`."""
    trace: str = ""
    """The `traceparent` of what is done for the attempt. Empty if it is not traced."""


class Prefetch(Struct, frozen=True, tag="prefetch"):
    """Load the blocks of a prompt that another worker is computing: this attempt is expected. There is no answer; the
    attempt's Submit or CancelAttempt ends it."""

    expected: Submit
    sharer: str = ""
    """Instance id of the worker that computes the prompt. Empty if not known."""


class CancelAttempt(Struct, frozen=True, tag="cancel"):
    """End an attempt and free its blocks; unknown attempts are ignored."""

    request: str
    attempt: int


class TakeEngineSnapshot(Struct, frozen=True, tag="snapshot"):
    """Answer with a Snapshot of one rank that has the same ticket."""

    ticket: int
    rank: int = 0


class ExplainBlock(Struct, frozen=True, tag="explain_block"):
    """Tell what is known of a block, with a BlockExplained that has the same ticket."""

    ticket: int
    name: bytes
    """The last 8 bytes of the block's key, or all 16."""
    rank: int = 0


EngineOperation = Literal["sleep", "wake", "load_lora", "unload_lora", "clear"]


class Operate(Struct, frozen=True, tag="operate"):
    """Do an operation on the whole engine, and answer with an Operated that has the same ticket. The shell sends one at
    a time. It sends `sleep` only while no attempt runs, and `unload_lora` only while none runs with that LoRA."""

    ticket: int
    operation: EngineOperation
    name: str = ""
    """Name of the LoRA to load or unload."""
    path: str = ""
    """Directory of the LoRA to load, as PEFT writes it."""
    level: int = 1
    """Level of sleep: 1 keeps the weights in host memory, 2 drops them; both drop the KV."""


class EncodeImage(Struct, frozen=True, tag="encode_image"):
    """Store an image's embeddings in the kvbm, unless they are there, and answer with an ImageEncoded that has the same
    ticket."""

    ticket: int
    key: bytes
    """The key of the embeddings."""
    pixels: bytes
    """The prepared image, in the form of `Image.pixels`."""
    time_left_s: float
    """Seconds after which no frontend waits for them."""
    width: int = 0
    """Pixels of a row. 0 means those of the model's `ImageInput`, as for `height`."""
    height: int = 0


class ProbeDevice(Struct, frozen=True, tag="probe"):
    """Compute this prompt and draw one token, though no request waits, and answer with a Probed. An engine that sleeps
    answers at once. vLLM and attached engines are not asked: they probe by themselves."""

    prompt: tuple[int, ...]
    """Token ids, at most a context less one."""


class TakeOver(Struct, frozen=True, tag="take_over"):
    """Serve in place of an engine that has ended. The shell sends it once, to a standby alone, which may still be
    loading."""

    instance: str
    """The worker's instance id."""


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """End the process. Attempts that run are not finished first: the shell drains before it sends this."""


EngineOrder = (
    Submit | Prefetch | CancelAttempt | TakeEngineSnapshot | ExplainBlock | Operate | EncodeImage | ProbeDevice
)
EngineCommand = EngineOrder | TakeOver | Shutdown

# --- engine → shell

PARTS: Codec[list[Part]] = Codec(list[Part], "parts")
"""Codec of a StepFrame's parts alone."""
KV_EVENTS: Codec[list[KvEvent]] = Codec(list[KvEvent], "KV events")
"""Codec of an EventBatch's events alone."""


FIRST_TOKENS = "computing the first tokens"
"""What an engine that is nearly ready says that it is loading."""
FIRST_TOKENS_LIMIT_S = 600.0
"""Seconds that the first tokens of an engine may take: kernels may be compiled for them, and weights read from disk."""


class Loading(Struct, frozen=True, tag="loading"):
    """Progress of a long start: what is done, and which share of it (0 … 1) is ready."""

    what: str
    share: float


class StandingBy(Struct, frozen=True, tag="standing_by"):
    """A standby has all but KV, and waits for TakeOver."""

    own_bytes: int = 0
    """Bytes of memory that it does not share with another process. 0 if the system does not say."""


class Ready(Struct, frozen=True, tag="ready"):
    """The engine accepts Submits; the fields say what it serves."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    capacity_blocks: int
    """Blocks of each rank."""
    kv_layout: KvLayout
    path: str = ""
    """Directory with tokenizer.json and tokenizer_config.json (a GGUF file was converted into it)."""
    grammars: bool = False
    """Whether `Sampling.grammar` constrains output."""
    biases: bool = False
    """Whether `Sampling.logit_bias` is added."""
    min_tokens: bool = False
    """Whether `Sampling.min_tokens` is kept."""
    prompt_logprobs: bool = False
    """Whether `Sampling.prompt_logprobs` is computed."""
    images: ImageInput | None = None
    """How images are prepared for the model. None if it takes none."""
    most_images: int = 0
    """Most images of a request."""
    image_cost: int = 0
    """How many tokens of a step take as long as an image."""
    allowed_tokens: bool = False
    """Whether `Sampling.allowed_tokens` is kept to."""
    pictures: PictureOutput | None = None
    """What the engine makes of `Generate.picture`, and nothing else. None if it makes no pictures."""
    forgets_output: bool = False
    """Whether a continued attempt counts only its own tokens, as `ModelCard.forgets_output` says."""
    embedding_size: int = 0
    """Number of floats of an embedding. 0 if the engine makes none."""
    generates: bool = True
    """Whether the engine generates text. If false, it only makes embeddings."""
    pooling: Pooling = ""
    """The only pooling of its embeddings. Empty if it has each."""
    weights: str = ""
    """A digest of the weights and of how they are computed with. Only engines with the same digest exchange blocks."""
    operations: tuple[EngineOperation, ...] = ()
    """The operations that this engine can do; the shell refuses the others by name."""
    ranks: int = 1
    """Number of data-parallel ranks. Each has its own blocks and computes its own attempts."""
    shares_blocks: bool = False
    """Whether other engines of the machine can copy its blocks."""
    gpus: tuple[str, ...] = ()
    """The NVIDIA GPUs that it computes on, each by its PCI bus id or its UUID. Empty if there are none."""
    address: str = ""
    """IP:PORT of the server that the engine is attached to. Empty if it is not attached to one."""
    server: str = ""
    """URL of that server, if it takes text alone, as `ModelCard.server` says."""
    alias: str = ""
    """The model's name at that server, if it is another one, as `ModelCard.alias` says."""
    embeddings_layout: str = ""
    """What engines that exchange embeddings of images have in common, as `ModelCard.embeddings_layout` says."""


class EngineLoad(Struct, frozen=True):
    """The counts of one rank after its step."""

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    held_blocks: int = 0
    cached_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    """Seconds that a step which only decodes takes, as measured lately. 0 if not measured yet."""
    preemptions: int = 0
    """Preemptions since the engine started."""
    overtaken: int = 0
    """How often an attempt was put before one that had come earlier, since the engine started."""
    recomputed: int = 0
    """Sequences that were computed once more since the engine started, since their numbers were not finite."""
    not_finite: int = 0
    """Sequences that ended with an error since the engine started, since their numbers were not finite again."""
    queried_tokens: int = 0
    """Prompt tokens that vLLM looked up in its prefix cache, since the engine started."""
    found_tokens: int = 0
    """Tokens among them that it found there."""
    onboarding: int = 0
    """Attempts among `waiting` that wait for blocks of the kvbm."""
    late_onboardings: int = 0
    """Attempts that waited for blocks of the kvbm in vain, since the engine started."""
    shared_blocks: int = 0
    """Blocks among the held ones that other engines of the machine copy."""
    prefetched_blocks: int = 0
    """Blocks of expected prompts that were loaded from the kvbm before their attempts came, since the engine
    started."""
    offered_blocks: int = 0
    """Blocks offered to the kvbm since the engine started."""
    encoder_hits: int = 0
    """Images whose embeddings were in the encoder cache when a step computed their first token, since the engine
    started."""
    encoded_images: int = 0
    """Images whose embeddings were computed, since the engine started."""
    fetched_images: int = 0
    """Images whose embeddings came from the kvbm, since the engine started."""
    encoder_entries: int = 0
    """Images whose embeddings are in the encoder cache."""
    encoder_bytes: int = 0
    """Bytes of these embeddings."""
    image_s: float = 0.0
    """Seconds that it takes to encode an image, as measured lately. 0 if not measured yet."""
    pictures: int = 0
    """Pictures and videos that were made since the engine started."""
    picture_steps: int = 0
    """Denoising steps of these and others since then; a step of several pictures counts for each."""
    dropped_offers: int = 0
    """Blocks left out since the engine started, because too many waited to be offered."""


class Exchanged(Struct, frozen=True):
    """Counts of blocks exchanged with kvbm and other engines since the engine started."""

    saved_blocks: int = 0
    """Blocks copied to the pool and committed."""
    loaded_blocks: int = 0
    """Blocks copied from the pool."""
    bad_blocks: int = 0
    """Copies in either direction that are of no use: cancelled, late, differing, or from a slot that became another
    block's meanwhile."""
    saved_bytes: int = 0
    loaded_bytes: int = 0
    save_s: float = 0.0
    """Seconds spent copying to the pool."""
    load_s: float = 0.0
    """Seconds spent copying from the pool."""
    saved_by: dict[str, int] = {}
    """Path that copies took → blocks copied to the pool."""
    loaded_by: dict[str, int] = {}
    """Path that copies took → blocks copied from the pool."""
    fallbacks: dict[str, int] = {}
    """Name of a better path that failed before, with the reason → blocks copied."""
    differing_blocks: int = 0
    """Loads that were compared with the pool's slot and differ from it."""
    damaged_blocks: int = 0
    """Loads whose slot in the pool did not have the checksum that kvbm has of it."""
    discarded_blocks: int = 0
    """Blocks that the kvbm was asked to discard, since they may be wrong."""
    sharing_failures: int = 0
    """How often the engine could not begin to share its blocks with other engines of the machine."""
    sharing_fails: bool = False
    """The last try failed, so it shares nothing now, and tries again."""


class Begun(Struct, frozen=True, array_like=True):
    """An attempt has its first token."""

    number: int
    """The attempt's `Submit.number`."""
    queued_s: float
    """Seconds from its arrival to the first step that computed it. They include the wait for blocks of the kvbm."""
    prefill_s: float
    """Seconds from there to the end of the step that drew the token."""
    onboard_s: float = 0.0
    """How many of `queued_s` it waited for blocks of the kvbm alone, and for none of `waited_s`."""
    waited_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """How many of `queued_s` its queue waited for free blocks, for a place among the running attempts, and for its
    share of a step's tokens."""
    first_missing: bytes = b""
    """The key of its first full block that was in no cache. Empty if there is none, or the engine does not say."""
    overtaken: int = 0
    """How many attempts that came later were put before it in the queue, because they are due earlier."""


class AttemptNote(Struct, frozen=True, array_like=True):
    """Something rare that happened to an attempt in the engine, in words."""

    number: int
    """The attempt's `Submit.number`."""
    text: str


class Stepped(Struct, frozen=True, tag="stepped"):
    """The results of one step, or of some short ones together. `progress` counts steps, also those that only cancelled
    or expired.

    Data for frontends and routers is encoded once, where it is made, and passed on as it is; the shell gets what it
    needs in fields of its own. So a token costs the shell almost nothing: it decodes no part, and touches only attempts
    that begin or end.

    A report is that of one rank: `event_batch`, `digest` and `load` are this rank's alone. `progress` and
    `event_sequence` count over all ranks.
    """

    progress: int
    encoded_parts: dict[str, bytes]
    """Frontend → the encoded parts of its StepFrame."""
    boundary_parts: list[Part]
    """The parts among them that are an attempt's first or last."""
    one_token_attempts: list[int]
    """`Submit.number` of the attempt of each other part, which brings the attempt one token further."""
    event_batch: bytes
    """The encoded events of an EventBatch, with `event_sequence`; empty if there are none."""
    event_sequence: int
    """Number of the last event batch so far; -1 before the first."""
    digest: int
    load: EngineLoad
    steps: int = 0
    """Number of steps that this reports. 0 for the opening."""
    tokens: int = 0
    """Tokens computed in these steps."""
    elapsed_s: float = 0.0
    """Seconds that the runner took for these steps, all together."""
    exchanged: Exchanged | None = None
    """Totals. None if nothing was exchanged since they were reported last."""
    rank: int = 0
    begun: list[Begun] = []
    notes: list[AttemptNote] = []

    @property
    def parts(self) -> dict[str, list[Part]]:
        """Frontend → its parts, decoded."""
        return {frontend: PARTS.decode(parts) for frontend, parts in self.encoded_parts.items()}

    @property
    def events(self) -> list[KvEvent]:
        """The events of the batch, decoded."""
        return KV_EVENTS.decode(self.event_batch) if self.event_batch else []


class Snapshot(Struct, frozen=True, tag="snapshot_taken"):
    """Every cached block of one rank, parents first, as of `event_sequence`."""

    ticket: int
    event_sequence: int
    blocks: list[SnapshotBlock]


class BlockExplained(Struct, frozen=True, tag="block_explained"):
    """The answer of one rank to an ExplainBlock."""

    ticket: int
    places: list[str]
    """Where the block is, and why it stays or goes."""
    notes: list[Note]


class Operated(Struct, frozen=True, tag="operated"):
    """The answer to an Operate: it was done, unless `failed` says why not. Events of blocks that it removed were
    reported before."""

    ticket: int
    failed: str = ""


class ImageEncoded(Struct, frozen=True, tag="image_encoded"):
    """The answer to an EncodeImage: the embeddings are in the kvbm or on their way there, unless `failed` says why
    not."""

    ticket: int
    failed: str = ""


class Probed(Struct, frozen=True, tag="probed"):
    """A rank of an idle engine was asked for a few tokens. Where that failed, the engine ends."""

    took_s: float
    failed: str = ""
    rank: int = 0


class MemoryUse(Struct, frozen=True, tag="memory_use"):
    """What takes the device's memory, in bytes. The engine says it at its start, and while it computes."""

    used: int
    """Allocated: weights, KV, what steps need."""
    kept: int
    """Free, and kept for the next allocations."""
    others: int
    """What other processes and CUDA itself have."""
    free: int


class OwnMetrics(Struct, frozen=True, tag="own_metrics"):
    """The metrics that the engine keeps by itself, as Prometheus's text; sent now and then."""

    text: str


class Failed(Struct, frozen=True, tag="failed"):
    """The engine cannot go on, or could not start; it ends after this."""

    reason: str
    model: bool = False
    """The model cannot be served: starting again will not help."""


KvbmOperation = Literal["attach", "store", "commit", "abort", "fetch", "release", "discard"]


AskOutcome = Literal["answered", "away", "late"]
"""How a request to the kvbm ended: with its last answer, without a connection, or without an answer in time."""


class AskSpan(Struct, frozen=True, array_like=True):
    """The span of a traced request to the kvbm, whose own span is below it."""

    place: TraceParent
    parent: str
    """The id of the span that it is below."""
    start_ns: int
    """Nanoseconds since 1970."""


class KvbmAsked(Struct, frozen=True, array_like=True):
    """A request to the kvbm that has ended."""

    operation: KvbmOperation
    outcome: AskOutcome
    took_s: float
    """Seconds until the engine had the last answer."""
    failed: str = ""
    """Why there was no last answer."""
    span: AskSpan | None = None
    """Its span, if it is traced."""


class KvbmAsks(Struct, frozen=True, tag="kvbm_asks"):
    """Requests to the kvbm that have ended; sent when the engine has nothing to do, and about once a second."""

    asks: list[KvbmAsked]


class KvbmLink(Struct, frozen=True, tag="kvbm_link"):
    """Whether blocks are exchanged with a kvbm now; sent at each change."""

    kvbm: str
    """Instance id of the kvbm. Empty if there is no link."""
    layout: str = ""
    """Digest of the layout there."""
    reason: str = ""
    """Why there is no link."""
    namespace: str = ""
    """The kvbm's namespace. Empty if there is no link, or if the kvbm does not say it."""


EngineReport = (
    Loading
    | StandingBy
    | Ready
    | Stepped
    | Snapshot
    | BlockExplained
    | Operated
    | ImageEncoded
    | Probed
    | OwnMetrics
    | MemoryUse
    | Failed
    | KvbmAsks
    | KvbmLink
)
