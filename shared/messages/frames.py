"""worker → frontend: one frame per engine step and frontend; steps of less than 2 ms share one. Frontends ask about a
gap. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from shared.messages.codec import Codec

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error", "handed_over"]
"""Why an attempt ended. handed_over: a `Generate.prefill_only` has its first token, and another worker decodes."""


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

    @property
    def size_bytes(self) -> int:
        return len(self.logprobs) + len(self.top_tokens) + len(self.top_logprobs)

    def after(self, known: int) -> PromptLogprobs:
        """Return it without its first `known` tokens."""
        return self._part(known, self.count)

    def pieces(self, most_bytes: int) -> Iterator[PromptLogprobs]:
        """Yield all of it in order, in pieces that have at most `most_bytes` each, or one token."""
        most = max(1, most_bytes * self.count // self.size_bytes)
        for known in range(0, self.count, most):
            yield self._part(known, known + most)

    def _part(self, known: int, end: int) -> PromptLogprobs:
        top = len(self.top_tokens) // self.count
        tops = slice(top * known, top * end)
        return PromptLogprobs(
            self.first + known, self.logprobs[4 * known : 4 * end], self.top_tokens[tops], self.top_logprobs[tops]
        )


class PicturePiece(Struct, frozen=True, array_like=True):
    """How far a picture is, and some of its file."""

    step: int
    """How many denoising steps of this attempt have ended."""
    first: int = 0
    """The index of `content` in the whole file."""
    content: bytes = b""
    """The next bytes of the file; the part with finish "stop" has the last ones."""
    preview: bytes = b""
    """The picture as it is after this step, as a small JPEG. Empty if none is due."""


SHUTTING_DOWN = "the worker is shutting down"
"""The text of `Part.error` if the worker ends and hands the attempt back: neither has failed."""
UNFOLLOWABLE = "the grammar cannot be followed"
"""The beginning of `Part.error` if no worker can apply `Sampling.grammar`; nothing else has failed."""
NOT_FINITE = "the model computes numbers that are not finite"
"""The beginning of `Part.error` if that happens again after the worker has recomputed everything: other workers would
fail too."""
BLOCKED = "the model's safety checker blocks the picture"
"""The beginning of `Part.error` if the same picture would be blocked by other workers too."""
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
    """The reason if finish is "error". Frontends know SHUTTING_DOWN, and texts that begin with UNFOLLOWABLE,
    NOT_FINITE, BLOCKED or NOT_BEGUN."""
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
    picture: PicturePiece | None = None
    """What is new of a picture, if `Generate.picture` asks for one. Its pieces come in order."""


class StepFrame(Struct, frozen=True, array_like=True):
    """The output of one engine step, or of several very short ones, for one frontend.

    Frames of one (worker, frontend, epoch) are numbered from 0 without gaps. A worker that has forgotten the frontend
    numbers from 0 again, with a larger epoch."""

    instance: str
    epoch: int
    sequence: int
    parts: list[Part]


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


RESEND_REQUEST: Codec[ResendRequest] = Codec(ResendRequest, "resend request")
RESENT: Codec[Resent] = Codec(Resent, "resent")
STEP_FRAME: Codec[StepFrame] = Codec(StepFrame, "step frame")
