"""Actions of a session: what it asks its shell to do for a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from services.frontend.protocol.errors import failure_of
from services.frontend.requests.retry import Loss
from shared.errors import HeadraceError, InvalidRequest
from shared.messages.frames import PromptLogprobs, TokenLogprob
from shared.messages.select import LoadEvent


class SelectWorker(Struct, frozen=True):
    """Ask a router for a worker. The answer is Selected, SelectRefused or Unrouted."""

    attempt: int
    produced: int
    """The number of output tokens so far; they belong to the prompt of this attempt."""
    excluded: tuple[str, ...]


class RetryLater(Struct, frozen=True):
    """Feed `RetryDue` after a pause."""

    attempt: int
    pause_s: float
    why: str
    """Why no worker could be chosen."""


class ImagesApart(Struct, frozen=True):
    """Images of the prompt that another worker encodes before the attempt is sent."""

    instance: str
    numbers: tuple[int, ...]
    """Which images of the request."""
    wait_s: float
    """The most seconds to wait."""


class DispatchAttempt(Struct, frozen=True):
    """Send Generate. The answer is Accepted, Refused, Unreachable or Unsendable."""

    attempt: int
    instance: str
    rank: int
    wait_s: float = 0.0
    """Seconds from the request's start within which the worker must begin. 0 if the deadline alone counts."""
    prefill_only: bool = False
    """Whether another worker decodes: the attempt ends with its first token."""
    images: ImagesApart | None = None
    """What is encoded elsewhere before. None if nothing is."""


class AnnounceAttempt(Struct, frozen=True):
    """Tell the worker that will decode of the attempt, so that it loads the prompt's blocks while they are computed.
    It is advice: there is no answer."""

    attempt: int
    instance: str
    rank: int
    prefill: str
    """The worker that computes the prompt."""


class HandOver(Struct, frozen=True):
    """The prompt is computed; its worker's attempt is over, and the next action dispatches the one that decodes."""

    attempt: int
    """The attempt that is over."""
    instance: str
    """The worker that decodes."""


class EmitTokens(Struct, frozen=True):
    """Pass new output on, each token once and in order, without the stop token."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None


class EmitPromptLogprobs(Struct, frozen=True):
    """Pass on log-probabilities of prompt tokens, each token once and in order."""

    given: PromptLogprobs


class EmitStep(Struct, frozen=True):
    """Pass on that a step of a picture has ended, or that bytes of its file have come."""

    step: int
    preview: bytes
    first: int = 0
    """The index of `content` in the file. 0 again if another attempt begins the file again."""
    content: bytes = b""


class WithdrawAttempt(Struct, frozen=True):
    """Send Cancel for an attempt to its worker."""

    instance: str
    attempt: int


class CountLoss(Struct, frozen=True):
    """Count a lost attempt."""

    loss: Loss
    had_tokens: bool
    """Whether the attempt had brought a token."""
    attempt: int
    why: str


class PublishLoad(Struct, frozen=True):
    """Publish a load event to the routers."""

    event: LoadEvent


class Finish(Struct, frozen=True):
    """End the request with an answer."""

    reason: str
    """`stop` or `length`."""
    embedding: bytes = b""
    """The embedding as `Part.embedding` has it; empty for text."""
    stop_token: int | None = None
    """The token that ended the output, which was not passed on; None if another reason ended it."""
    stop_logprob: TokenLogprob | None = None
    """Its log-probability, if they were asked for."""


class Fail(Struct, frozen=True):
    """End the request with an error."""

    error: HeadraceError


Action = (
    SelectWorker
    | RetryLater
    | DispatchAttempt
    | AnnounceAttempt
    | HandOver
    | EmitTokens
    | EmitPromptLogprobs
    | EmitStep
    | WithdrawAttempt
    | CountLoss
    | PublishLoad
    | Finish
    | Fail
)


# --- what is noted of them for `headrace explain`, in words. A request that got its answer from its first worker has no
# note here: the routers know all of it.


def loss_note(action: CountLoss, instance: str, tokens: int) -> str:
    """Return the note of a lost attempt at a worker; `tokens` is the number of output tokens so far."""
    kept = f", after {tokens} tokens, which are kept" if tokens else ""
    return f"lost at {instance or 'no worker'} ({action.loss}){kept}: {action.why}"


def hand_over_note(action: HandOver) -> str:
    """Return the note of a prompt that was computed, and whose answer another worker decodes."""
    return f"computed its prompt and handed over to {action.instance}, which decodes"


def no_worker_note(action: RetryLater) -> str:
    """Return the note of a request for which no worker could be chosen."""
    return f"no worker could be chosen, the routers are asked again in about {action.pause_s:g} s: {action.why}"


def failure_note(error: HeadraceError) -> str:
    """Return the note of an error that the client got. The text of a request that is itself at fault may repeat what
    it says, so its note names the field alone."""
    status = failure_of(error).status
    if isinstance(error, InvalidRequest):
        at_fault = ", ".join(filter(None, (error.param, error.code))) or "the request is at fault"
        return f"refused with status {status}: {at_fault}"
    return f"ended with status {status}: {error}"
