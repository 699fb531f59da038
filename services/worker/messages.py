"""The channel between a worker's shell and its engine.

    shell (asyncio: NATS, ZMQ, etcd)                     engine process (a plain loop)
        Submit, Cancel, TakeSnapshot, Shutdown   ──▶     scheduler, block pool, runner
                            ◀──   Ready, Stepped, Snapshot, Failed
        KvbmUp, KvbmDown, KvbmReply              ──▶     the machine's block store, and copies to and from it
                            ◀──   KvbmAsk, KvbmLink

The engine owns the block pool and numbers the KV event batches, so that one process says what is cached. The shell
answers the network and never touches a block; what engine and kvbm say to each other it carries without a look.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages import Codec, KvEvent, KvLayout, Part, Sampling, SnapshotBlock

# --- shell → engine


class Submit(Struct, frozen=True, tag="submit"):
    """Take an attempt; it ends with a Part that has a finish reason."""

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
    number: int = 0
    """The shell's short name for the attempt, in `Stepped.advanced`."""
    wait_left_s: float | None = None
    """It ends with NOT_BEGUN where it was in no step by then; None: only `time_left_s` bounds its wait."""


class CancelAttempt(Struct, frozen=True, tag="cancel"):
    """End it and free its blocks; unknown attempts are ignored."""

    request: str
    attempt: int


class TakeSnapshot(Struct, frozen=True, tag="snapshot"):
    """Answered by Snapshot with the same ticket."""

    ticket: int


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """End the process; what runs is not finished first (the shell drains before it says this)."""


class KvbmUp(Struct, frozen=True, tag="kvbm_up"):
    """This kvbm serves the pool's directory now: attach."""

    kvbm: str
    """Its instance id."""


class KvbmDown(Struct, frozen=True, tag="kvbm_down"):
    """It is not there any more. What it held for this engine may be another's soon."""

    reason: str


class KvbmReply(Struct, frozen=True, tag="kvbm_reply"):
    """One answer to the KvbmAsk of this number."""

    number: int
    payload: bytes
    last: bool = True
    """No other answer to it follows."""
    failed: str = ""
    """Why there is no payload: nobody answered in time, or NATS is away. What was asked may have been done."""


EngineOrder = Submit | CancelAttempt | TakeSnapshot | KvbmUp | KvbmDown | KvbmReply
EngineCommand = EngineOrder | Shutdown

# --- engine → shell

PARTS: Codec[list[Part]] = Codec(list[Part], "parts")
"""A StepFrame's, alone."""
KV_EVENTS: Codec[list[KvEvent]] = Codec(list[KvEvent], "KV events")
"""An EventBatch's, alone."""


class Loading(Struct, frozen=True, tag="loading"):
    """Progress of a long start: what, and how much of it (0 … 1)."""

    what: str
    share: float


class Ready(Struct, frozen=True, tag="ready"):
    """The engine can take Submits; what it serves."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    capacity_blocks: int
    kv_layout: KvLayout
    path: str = ""
    """Directory with tokenizer.json and tokenizer_config.json (a GGUF file was converted into it)."""
    grammars: bool = False
    """Whether output is held to `Sampling.grammar`."""
    biases: bool = False
    """Whether `Sampling.logit_bias` is added."""
    embedding_size: int = 0
    """Floats of an embedding; 0: there are none."""
    weights: str = ""
    """A digest of what is computed with: blocks are exchanged between engines with the same one only."""


class EngineLoad(Struct, frozen=True):
    """The engine's own account after a step."""

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    held_blocks: int = 0
    cached_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    """What a step that only decodes takes, as measured lately; 0: not yet."""
    preemptions: int = 0
    """Since the engine started."""
    recomputed: int = 0
    """Sequences computed once more as their numbers were not finite, since the engine started …"""
    not_finite: int = 0
    """… and those that ended with an error as they were not finite again."""
    onboarding: int = 0
    """Of `waiting`, those that wait for blocks of the kvbm."""
    late_onboardings: int = 0
    """Those that waited for them in vain, since the engine started."""
    offered_blocks: int = 0
    """Offered to the kvbm, since the engine started …"""
    dropped_offers: int = 0
    """… and left out because too many waited to be offered."""


class Exchanged(Struct, frozen=True):
    """What was exchanged with kvbm since the engine started."""

    saved_blocks: int = 0
    """Copied to the pool and committed."""
    loaded_blocks: int = 0
    """Copied from it."""
    bad_blocks: int = 0
    """Copies, either way, that were begun or asked for and are worth nothing: cancelled, late, of a slot that became
    another block's meanwhile, or differing."""
    saved_bytes: int = 0
    loaded_bytes: int = 0
    save_s: float = 0.0
    """Spent copying."""
    load_s: float = 0.0
    saved_by: dict[str, int] = {}
    """Blocks, by the way their copies took …"""
    loaded_by: dict[str, int] = {}
    fallbacks: dict[str, int] = {}
    """… and those for which a better way failed before, by its name and the reason."""
    differing_blocks: int = 0
    """Loads that were compared with the pool's slot and were not the same."""
    damaged_blocks: int = 0
    """Loads whose slot in the pool had not the checksum that kvbm has of it."""
    discarded_blocks: int = 0
    """Named to the kvbm as blocks that may be wrong."""


class Stepped(Struct, frozen=True, tag="stepped"):
    """What one step made, or some short ones together. `progress` counts steps, also those that only cancelled or
    expired.

    What goes on to others is encoded where it is made, once, and passed on as it is; what the shell has to know of it
    comes beside. So a token costs the shell next to nothing: it decodes no part, and touches no attempt but those that
    begin or end.
    """

    progress: int
    frames: dict[str, bytes]
    """Frontend → its parts, the encoded ones of a StepFrame."""
    notable: list[Part]
    """Those of these parts that are an attempt's first or last."""
    advanced: list[int]
    """Numbers of the attempts that each of the other parts brings one token further; once for each part."""
    event_batch: bytes
    """The encoded events of an EventBatch, with `event_sequence`; empty where there are none."""
    event_sequence: int
    """Of the last batch so far; -1 before the first."""
    digest: int
    load: EngineLoad
    steps: int = 0
    """That this tells of; 0: the opening."""
    tokens: int = 0
    """Computed in them."""
    elapsed_s: float = 0.0
    """What the runner took for them, all together."""
    exchanged: Exchanged | None = None
    """None: nothing more since it was told last."""

    @property
    def parts(self) -> dict[str, list[Part]]:
        """Frontend → its parts, for those who look at them."""
        return {frontend: PARTS.decode(parts) for frontend, parts in self.frames.items()}

    @property
    def events(self) -> list[KvEvent]:
        """Of the batch."""
        return KV_EVENTS.decode(self.event_batch) if self.event_batch else []


class Snapshot(Struct, frozen=True, tag="snapshot_taken"):
    """Every cached block, parents first, as of `event_sequence`."""

    ticket: int
    event_sequence: int
    blocks: list[SnapshotBlock]


class Failed(Struct, frozen=True, tag="failed"):
    """The engine cannot go on (or could not start); it ends after this."""

    reason: str
    model: bool = False
    """The model cannot be served: starting again will not help."""


class KvbmAsk(Struct, frozen=True, tag="kvbm_ask"):
    """Put this to the kvbm; each is answered by KvbmReply, the last of which is `last`."""

    number: int
    operation: Literal["attach", "store", "commit", "abort", "fetch", "release", "discard"]
    payload: bytes
    """As `shared.kvbm_messages` encodes it."""
    timeout_s: float
    """For each answer."""


class KvbmLink(Struct, frozen=True, tag="kvbm_link"):
    """Whether blocks are exchanged with a kvbm now; told at each change."""

    kvbm: str
    """Instance id; empty: none."""
    layout: str = ""
    """The digest there."""
    reason: str = ""
    """Why not."""


EngineReport = Loading | Ready | Stepped | Snapshot | Failed | KvbmAsk | KvbmLink
