"""Sequence: one attempt as the scheduler sees it. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from sys import intern

from msgspec.structs import replace

from services.worker.contracts.messages import Begun, Submit
from services.worker.contracts.runner import Work
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.queue_clock import NO_WAIT, WaitTimes
from shared.blocks import Content
from shared.hashing import (
    NO_EXTRAS,
    ContentKey,
    content_key,
    content_keys,
    image_extras,
    pack_tokens,
    root_key,
    salted_image_key,
    token_array,
)
from shared.messages.frames import FinishReason, Part


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens, and how far their KV is computed.

        tokens   | prompt                     | output so far      |
                 0         computed      prompt_tokens        len(tokens)
        blocks   | b0 | b1 | b2 | …       cover at least the tokens computed next
                   stored ──┘             leading blocks that the pool knows by key

    On a continuation the tokens begin with output of earlier attempts. The KV of a drawn token is computed one step
    later, so `uncomputed` is 1 between the steps of a decode.

    The fields that each token needs come first, and lie in this object: between two steps they fall out of the CPU's
    caches, and then each further object that a token touches costs 0.1 µs.
    """

    work: Work
    """The part that runners see, `tokens` and `blocks` included."""
    tokens: array[int]
    request: str
    attempt: int
    frontend: str
    prompt_tokens: int
    number: int
    """The shell's short name for the attempt (`Submit.number`)."""
    stop_tokens: frozenset[int]
    """Token ids each of which ends the sequence."""
    most_tokens: int
    """Length in tokens, prompt included, at which the sequence ends."""
    stored: int = 0
    begun: bool = False
    """A token was drawn in this attempt, so that `cached_tokens` is final."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache by the time the first token was drawn."""
    cached_host_tokens: int = 0
    """Tokens among them in blocks that were loaded for it from the kvbm's host memory."""
    cached_disk_tokens: int = 0
    """Tokens among them in blocks that were loaded for it from the kvbm's disk."""
    submit: Submit
    arrival: int
    """Number of the attempt in order of arrival."""
    arrived_s: float
    deadline_s: float
    begin_by_s: float
    """When its wait for admission ends; infinite if only its deadline ends the wait, or if it was admitted."""
    due_s: float
    """When its next token is due: at its arrival, or later by a multiple of the time that its prompt would take alone
    (`Scheduler._set_due`), until its first token; before all that begin, where it goes on with an answer."""
    block_size: int
    root: ContentKey
    keys: list[ContentKey]
    """Content keys of the full blocks of the submitted tokens, and of the blocks stored since."""
    blocks: list[int]
    extras: Mapping[int, bytes]
    """What names the images in a block, by its index."""
    queued_at: WaitTimes = NO_WAIT
    """The clocks of the queue when it began to wait."""
    queued_s: float = 0.0
    """When that was."""
    admitted_s: float | None = None
    """When it was given blocks for the first time."""
    waited_s: WaitTimes = NO_WAIT
    """For what it waited until then."""
    overtaken: int = 0
    """How many that came later were put before it while it waited."""
    onboarding_s: float | None = None
    """When it began to wait for blocks that were then asked of the kvbm. None if it did not."""
    loaded: dict[int, bool] = field(default_factory=dict)
    """Index of each block that was loaded for it → whether from disk."""
    looked_up: bool = False
    """Whether a fetch from the kvbm was considered since it began to wait."""
    no_reuse: bool = False
    """The sequence uses only blocks that it computed itself: its numbers were not finite, which a cached block may have
    caused."""

    @staticmethod
    def of(
        submit: Submit, limits: SchedulerLimits, arrival: int, now_s: float, expected: Sequence | None = None
    ) -> Sequence:
        """Return the sequence of a submitted attempt. Hash its tokens, as far as `expected` has no keys of them."""
        sampling, block_size = submit.sampling, limits.block_size
        root = root_key(limits.model, submit.lora, submit.salt)
        tokens, blocks = token_array(submit.tokens), list[int]()
        named = [(image.key, image.start, image.tokens) for image in submit.images]
        extras = image_extras(named, block_size) if named else NO_EXTRAS
        images = submit.images
        if submit.salt:
            images = tuple(replace(image, key=salted_image_key(image.key, submit.salt)) for image in images)
        stop_tokens = frozenset[int]() if sampling.ignore_eos else limits.eos_token_ids
        # As in vLLM, an end-of-sequence token is barred even where it would not end the sequence.
        barred = sorted(limits.eos_token_ids.union(sampling.stop_token_ids)) if sampling.min_tokens else ()
        return Sequence(
            work=Work(
                arrival, tokens, 0, 0, blocks, sampling, submit.prompt_tokens, barred, lora=submit.lora, images=images
            ),
            tokens=tokens,
            request=submit.request,
            attempt=submit.attempt,
            frontend=intern(submit.frontend),
            prompt_tokens=submit.prompt_tokens,
            number=submit.number,
            stop_tokens=stop_tokens.union(sampling.stop_token_ids) if sampling.stop_token_ids else stop_tokens,
            most_tokens=min(submit.prompt_tokens + sampling.max_tokens, limits.context_length),
            submit=submit,
            arrival=arrival,
            arrived_s=now_s,
            deadline_s=now_s + submit.time_left_s,
            begin_by_s=inf if submit.wait_left_s is None else now_s + submit.wait_left_s,
            due_s=-inf if len(tokens) > submit.prompt_tokens else now_s,
            block_size=block_size,
            root=root,
            keys=_keys(root, submit.tokens, block_size, expected, extras),
            blocks=blocks,
            extras=extras,
        )

    @property
    def name(self) -> tuple[str, int]:
        return self.request, self.attempt

    @property
    def rank(self) -> tuple[int, float, int]:
        """Key for sorting: the higher priority first, then what is due earlier, then the earlier arrival."""
        return -self.submit.priority, self.due_s, self.arrival

    @property
    def ends_by_s(self) -> float:
        """When it ends unless it was admitted, or ends otherwise, before."""
        return min(self.deadline_s, self.begin_by_s)

    @property
    def computed(self) -> int:
        """Number of leading tokens whose KV is in the blocks."""
        return self.work.start

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.work.start

    @property
    def produced(self) -> int:
        """Number of output tokens of the request so far, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def blocks_needed(self) -> int:
        """Number of blocks that cover all tokens."""
        return -(-len(self.tokens) // self.block_size)

    @property
    def reusable_keys(self) -> list[ContentKey]:
        """Keys of the blocks that may come from the cache. At least the last token is always computed; for a mean over
        all positions every token is, and so is each position that a log-probability of the prompt is due from."""
        sampling, work = self.work.sampling, self.work
        if self.no_reuse or sampling.pooling == "mean":
            return []
        last = len(self.tokens) - 1
        if sampling.prompt_logprobs >= 0 and work.scored < self.prompt_tokens:
            last = work.scored - 1
        return self.keys[: last // self.block_size]

    def count_cached(self, first: int) -> None:
        """Count blocks first … stored - 1 as found in the cache. Only the prompt's tokens of a continuation count."""
        size, prompt = self.block_size, self.prompt_tokens
        self.cached_tokens += min(self.stored * size, prompt) - min(first * size, prompt)
        if self.loaded:
            from_disk = list(map(self.loaded.get, range(first, self.stored)))
            full = max(prompt // size - first, 0)  # blocks in the prompt; the next one has the rest of it, if any
            left = max(prompt - (first + full) * size, 0)
            for blocks, tokens in ((from_disk[:full], size), (from_disk[full : full + 1], left)):
                self.cached_disk_tokens += tokens * blocks.count(True)
                self.cached_host_tokens += tokens * blocks.count(False)

    def forget_cached(self) -> None:
        """Count nothing as found in the cache: the blocks were released before the first token."""
        self.cached_tokens = self.cached_host_tokens = self.cached_disk_tokens = 0

    def content(self, index: int) -> Content:
        """Return the content of block `index`: a full block, whose key is known or the next one."""
        start = index * self.block_size
        packed = self.submit.tokens[4 * start : 4 * (start + self.block_size)]
        if len(packed) < 4 * self.block_size:  # some of it was drawn here
            packed = pack_tokens(self.tokens[start : start + self.block_size])
        parent = self.keys[index - 1] if index else None
        extra = self.extras.get(index, b"")
        if index == len(self.keys):
            self.keys.append(content_key(parent or self.root, packed + extra))
        return Content(self.keys[index], parent, packed, self.submit.lora, self.submit.salt, extra)

    def contents(self, first: int, count: int) -> list[Content]:
        """Return the contents of blocks first … first + count - 1, which are full and whose keys are known."""
        size, last = 4 * self.block_size, first + count
        lora, salt, packed = self.submit.lora, self.submit.salt, self.submit.tokens
        if len(packed) < size * last:  # some of them were drawn here
            packed = pack_tokens(self.tokens)
        keys = self.keys[first:last]
        parents = [self.keys[first - 1] if first else None, *keys]
        numbers, extras = range(first, last), self.extras
        return [
            Content(
                key, parent, packed[size * at : size * at + size], lora, salt, extras.get(at, b"") if extras else b""
            )
            for key, parent, at in zip(keys, parents, numbers, strict=False)
        ]

    def begun_report(self, now_s: float) -> Begun:
        """Return how long the attempt took to its first token, which was drawn now."""
        admitted_s, asked_s = self.admitted_s, self.onboarding_s
        assert admitted_s is not None, "it has drawn a token"
        queued_s = admitted_s - self.arrived_s
        held_up_s = sum(self.waited_s)  # it would have waited as long with its blocks
        onboard_s = 0.0 if asked_s is None else max(0.0, min(admitted_s - asked_s, queued_s - held_up_s))
        missing = self.cached_tokens // self.block_size
        first_missing = self.keys[missing] if missing < self.prompt_tokens // self.block_size else b""
        prefill_s = max(0.0, now_s - admitted_s)
        return Begun(self.number, queued_s, prefill_s, onboard_s, self.waited_s, first_missing, self.overtaken)

    def last_part(self, finish: FinishReason, error: str = "", embedding: bytes = b"") -> Part:
        """Return the part that ends the attempt without a token."""
        return Part(
            request=self.request,
            attempt=self.attempt,
            first=self.produced,
            tokens=b"",
            finish=finish,
            cached_tokens=self.cached_tokens,
            error=error,
            cached_host_tokens=self.cached_host_tokens,
            cached_disk_tokens=self.cached_disk_tokens,
            embedding=embedding,
        )


def rank_of(sequence: Sequence) -> tuple[int, float, int]:
    """Return the sequence's rank, as a key for sorting."""
    return sequence.rank


def _keys(
    root: ContentKey, packed: bytes, block_size: int, expected: Sequence | None, extras: Mapping[int, bytes]
) -> list[ContentKey]:
    """Return the content keys of the full blocks of packed tokens. To hash 8,192 tokens takes 1 ms."""
    if (
        expected is None
        or extras
        or expected.extras
        or expected.root != root
        or not packed.startswith(expected.submit.tokens)
    ):
        return content_keys(root, packed, block_size, extras)
    known = expected.keys
    rest = packed[4 * block_size * len(known) :]
    return known + content_keys(known[-1] if known else root, rest, block_size)
