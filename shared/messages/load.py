"""worker → routers and frontends, every 250 ms: the load of a worker. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.codec import Codec

StandbyState = Literal["", "none", "starting", "ready"]
"""State of the engine that is to stand by: none while the worker sleeps or its engine starts. Empty if none is to."""

LOSS_LIMIT_CHARACTERS = 300
"""The longest reason of a loss in a report."""


class EngineLosses(Struct, frozen=True):
    """The engines that a worker has lost since it started."""

    count: int
    age_s: float
    """Seconds since the last loss."""
    reason: str
    """Why the last one was lost."""
    take_overs: int = 0
    """How often a standby took over."""


class KvState(Struct, frozen=True, array_like=True):
    """The position of one rank's KV events. The ranks of a source share its epoch and its sequence."""

    rank: int
    epoch: int
    """The number of the engine's starts; a new start means an empty cache."""
    sequence: int
    """The sequence of the last published batch, of any rank. -1 if there is none yet."""
    digest: int = 0
    """The XOR of the event hashes of all blocks in the cache, as of `sequence`."""


class RankLoad(Struct, frozen=True, array_like=True):
    """The load of one data-parallel rank, with the meanings of LoadReport's fields."""

    rank: int
    waiting: int
    running: int
    waiting_tokens: int
    held_blocks: int


class EncoderState(Struct, frozen=True):
    """A worker's encoder cache, which keeps the embeddings of images."""

    images: int
    """The number of images whose embeddings are there."""
    size_bytes: int
    hits: int
    """The number of images of prompts that were found there since the engine started."""
    encoded: int
    """The number of images whose embeddings were computed since then."""
    fetched: int = 0
    """The number of images whose embeddings came from the machine's kvbm since then."""
    image_s: float = 0.0
    """The time to encode an image, as measured lately, in seconds. 0 if not measured yet."""
    waiting: int = 0
    """The number of images that wait to be encoded for other workers."""


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
    """The prefill speed measured lately, in tokens per second. 0 if not measured yet."""
    step_s: float = 0.0
    """The duration of a step that only decodes, as measured lately, in seconds. 0 if not measured yet."""
    kv: list[KvState] = []
    frames: dict[str, int] = {}
    """The sequence of the last step frame that was sent to each frontend."""
    attempts: list[tuple[str, int]] = []
    """The (request, attempt) of every waiting or running sequence."""
    ranks: list[RankLoad] = []
    """The load of each rank, if there are several."""
    output_tokens: int = 0
    """The number of tokens drawn since the worker started; an older worker reports 0."""
    encoder: EncoderState | None = None
    """The worker's encoder cache. None if no image has come since the engine started, or an older worker reports."""

    standby: StandbyState = ""
    standby_bytes: int = 0
    """The bytes of memory that a ready standby shares with no other process. 0 if not known."""
    losses: EngineLosses | None = None
    """The engines that the worker has lost. None if there were none, or an older worker reports."""
    tensor_ranks: int = 1
    """The number of processes of the native engine that compute each layer together."""


LOAD_REPORT: Codec[LoadReport] = Codec(LoadReport, "load report")
