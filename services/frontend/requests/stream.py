"""One request on the bus: what is asked for, and its output on the way from step frames to the client.

    InferenceRequest ─▶ Stream ─┬─ Session: its states
                                └─ Output ─┬─▶ deltas that wait ─▶ `async for delta in stream` ─▶ the end, or the error
                                           └─▶ `send`, if the client's task waits for more and gave one

Deltas that wait for a slow client are joined into one; `max_tokens` bounds them. `send` writes a delta without waking
the client's task. That task wakes for the first delta, for each delta that `send` did not take, and for the end.

A request for several choices has one stream per choice. One `StreamSelector` waits for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from services.frontend.metrics import ModelMetrics
from services.frontend.output.output import Delta, Output, PromptEntries
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.protocol.chat_chunks import Usage, usage_of
from services.frontend.requests.actions import EmitStep, Fail, Finish
from services.frontend.requests.admission import Served
from services.frontend.requests.request_trace import RequestTrace
from services.frontend.requests.session import Session
from services.frontend.requests.way import Way
from services.frontend.tool_parsers.parse_result import join_pieces
from shared.errors import HeadraceError
from shared.messages.cards import ImageInput
from shared.messages.frames import PromptLogprobs, TokenLogprob
from shared.messages.generate import Image, Picture, Sampling

T = TypeVar("T")

NOTHING = Delta("")
"""What `StreamSelector.wake` makes a reader get: nothing came, and it may send its client a sign of life. Compared by
identity."""


class InferenceRequest(Struct, frozen=True):
    """One prompt and one choice, as routers and workers get it. The client's body has been checked and tokenised."""

    id: str
    model: str
    """The name of the base model."""
    prompt: bytes
    """Token ids, packed as u32."""
    prompt_tokens: int
    hashes: bytes
    """Sequence hashes of the prompt's full blocks, packed as u64."""
    sampling: Sampling
    salt: str
    affinity_key: str
    """Requests with the same non-empty key prefer the same worker."""
    deadline: float
    """The time at which the request fails if it has not ended, on the loop's clock."""
    output: Output | ParsedOutput
    """Turns the tokens of this request into text."""
    grammar_param: str = ""
    """The field of the body that the grammar comes from; errors name it."""
    embedding_size: int = 0
    """The number of floats of the embedding that is asked for; 0 if text is asked for."""
    is_follower: bool = False
    """Another request of the same body comes first. A follower is not refused for a long wait, because it may wait for
    that request."""
    priority: int = 0
    """Requests of a higher priority are computed first (requests/terms.py)."""
    is_patient: bool = False
    """True if it waits for other requests, and for each step, as long as its deadline allows."""
    repeats_prompt: bool = False
    """The request that comes first has the same prompt."""
    lora: str = ""
    """The id of the LoRA, which all attempts have. Empty if there is none."""
    prompt_entries: PromptEntries | None = None
    """Makes entries of the prompt's log-probabilities, if they are asked for."""
    received_s: float = 0.0
    """When the request's body was complete, on the loop's clock. 0 if unknown."""
    served: Served | None = None
    """Where the log's sums of the whole request are. None if there is no log of it."""
    trace: RequestTrace | None = None
    """The trace of the whole request. None if it is not traced."""
    images: tuple[Image, ...] = ()
    """The images of the prompt, which all attempts carry."""
    picture: Picture | None = None
    """The picture to make; None if text or an embedding is asked for. Its steps stand for the prompt's tokens."""
    image_input: ImageInput | None = None
    """How they were prepared, as the cards of the model's workers say."""
    prompt_only: bool = False
    """Whether the answer is nothing but the prompt: the one token that is computed is dropped."""

    @property
    def waits(self) -> bool:
        """True if it is not refused for having to wait for others."""
        return self.is_follower or self.is_patient


class StreamSelector:
    """Waits until one of several streams has something to read."""

    def __init__(self) -> None:
        self.waiting = False
        """Whether the reader has read everything and waits. Only then can `send` not overtake a delta that waits."""
        self._ready: dict[Stream, None] = {}
        self._woken: asyncio.Future[None] | None = None
        """What the reader has waited for last."""

    def mark_ready(self, stream: Stream) -> None:
        """Record that the stream has something to read, and wake the reader."""
        self._ready[stream] = None
        self.wake()

    def wake(self) -> None:
        """Wake the reader if it waits; it then gets NOTHING."""
        if self.waiting:
            self.waiting = False
            if self._woken is not None and not self._woken.done():  # it is done once the reader is cancelled
                self._woken.set_result(None)

    async def wait_ready(self) -> list[Stream]:
        """Wait for at least one stream, and return those marked since the last call; none after `wake`. The reader must
        have read all deltas of the streams that it got before."""
        if not self._ready:
            self._woken = asyncio.get_running_loop().create_future()
            self.waiting = True
            await self._woken
        ready = list(self._ready)
        self._ready.clear()
        return ready


class _FileBytes:
    """What has come of a picture's file, and was not taken."""

    def __init__(self) -> None:
        self._first = 0
        """The index in the whole file of the first byte of `_bytes`."""
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def put(self, first: int, content: bytes) -> None:
        self._first = min(self._first, first)  # another attempt begins the file again
        del self._bytes[first - self._first :]
        self._bytes += content

    def take(self) -> tuple[int, bytes]:
        taken = self._first, bytes(self._bytes)
        self._first += len(self._bytes)
        self._bytes.clear()
        return taken


class Stream:
    """One running request: its session, its output, and the times that its limits are measured from.

    `RequestService` writes to it, and the client's task reads from it. Times are seconds on the loop's clock.
    """

    def __init__(
        self,
        request: InferenceRequest,
        session: Session,
        metrics: ModelMetrics,
        selector: StreamSelector | None = None,
        started: float = 0.0,
    ) -> None:
        """Create the stream of a request that starts now. `metrics` are those of its model; `selector` is given if it
        waits for other streams too."""
        self.request = request
        self.metrics = metrics
        self.session = session
        self.started = started
        self.waiting_since = started
        """When the client began to wait: for the first token, or for the next one after a lost attempt."""
        self.last_sign = started
        """When the current attempt last gave a sign of life."""
        self.worker = ""
        """The worker of the latest attempt. Empty if there was none."""
        self.turn_wait: tuple[int, float] = (0, 0.0)
        """The attempt that waits for its model's turn, or waited last, and since when it has."""
        self.slept_s = 0.0
        """The seconds for which it waited for its model's turn: no worker could have begun it then."""
        self.accepted = started
        """When a worker accepted the current attempt, or was asked to."""
        self.first_tokens: float | None = None
        """When the first token came, also one that only ends the output. On the monotonic clock: the loop's counts
        whole milliseconds. None before."""
        self.last_tokens: float | None = None
        """When the last tokens of the output came; None before the first."""
        self.timer: asyncio.TimerHandle | None = None
        """Fires at the deadline."""
        self.way: Way | None = None
        """The request's way, if it is kept for the page."""
        self.finish = ""
        """Why the output ended: `stop`, `length` or `tool_calls`; empty before the end and after an error."""
        self.ended = False
        self.error: HeadraceError | None = None
        """The error that ended the request."""
        self.awaits_first_token = False
        """Whether the reader must wake for the first token, even if it brings no text."""
        self.embedding = b""
        """The embedding as `Part.embedding` has it, once the request has ended with one."""
        self.step = 0
        """How many steps of its picture have ended, of the latest attempt."""
        self.preview = b""
        """The latest preview of its picture that the reader has not taken. Empty if there is none."""
        self._stepped = False
        """Whether a step has ended that the reader does not know."""
        self._file = _FileBytes()
        self.output = request.output
        self.spans = None if request.trace is None else request.trace.attempts(request.id)
        """Makes the spans of the attempts. None if the request is not traced."""
        self._selector = StreamSelector() if selector is None else selector
        self._waiting: list[Delta] = []
        self._encode: Callable[[Delta], Any] | None = None
        self._send: Callable[[Any], bool] | None = None
        self._stopped = False

    # --- for the service

    def add_tokens(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bool:
        """Pass new tokens on as text; return whether they completed a stop string."""
        if self.request.prompt_only:
            return False
        self._pass_on(self.output.push(tokens, logprobs))
        return self._stopped

    def add_prompt_logprobs(self, given: PromptLogprobs) -> None:
        """Pass the log-probabilities of prompt tokens on."""
        assert self.request.prompt_entries is not None, "the session takes only what was asked for"
        self._pass_on(Delta("", self.request.prompt_entries.push(given)))

    def show_step(self, shown: EmitStep) -> None:
        """Note that a step of the picture has ended, or what has come of its file, and wake the reader."""
        self.step, self.preview = shown.step, shown.preview or self.preview
        self._file.put(shown.first, shown.content)
        self._stepped = True
        self._selector.mark_ready(self)

    def end(self, last: Finish | Fail) -> None:
        """End the stream. A stop string in the last tokens takes precedence over the worker's reason."""
        if self._stopped:
            self.finish = "stop"
        elif isinstance(last, Fail):
            self.error = last.error
        elif self.request.prompt_only:
            self.finish = "length"
        else:
            short = last.reason == "length"
            self._pass_on(self.output.finish(short=short, stop_token=last.stop_token, stop_logprob=last.stop_logprob))
            self.finish = "stop" if self._stopped else last.reason
            self.embedding = last.embedding
        if self.finish == "stop" and self.output.calls:
            self.finish = "tool_calls"
        self.ended = True
        self._selector.mark_ready(self)

    def _pass_on(self, delta: Delta) -> None:
        self._stopped = delta.stopped
        if not (delta.text or delta.entries or delta.calls or delta.reasoning or delta.token_ids):
            if self.awaits_first_token:
                self._selector.mark_ready(self)
            return
        waiting = self._selector.waiting
        if waiting and self._send is not None and self._encode is not None and self._send(self._encode(delta)):
            return
        self._waiting.append(delta)
        self._selector.mark_ready(self)

    # --- for the reader

    def send_directly(self, encode: Callable[[Delta], T], send: Callable[[T], bool]) -> None:
        """Give deltas to `send` at once from now on, while the reader waits. `send` returns whether it took one."""
        self._encode, self._send = encode, send

    def wake(self) -> None:
        """Make the reader get NOTHING, if it waits."""
        self._selector.wake()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield all deltas, and NOTHING after each `wake` and after steps of a picture; then raise the error that ended
        the request, if there was one."""
        while True:
            if (delta := self.pop_delta()) is not None:
                yield delta
            elif self._stepped:
                self._stepped = False
                yield NOTHING
            elif self.ended:
                if self.error is not None:
                    raise self.error
                return
            elif not await self._selector.wait_ready():
                yield NOTHING

    def take_file(self) -> tuple[int, bytes]:
        """Return the bytes of the picture's file that came since the last call, and the index of the first one in the
        file. What was taken from there on counts no longer: an attempt that was lost had made it."""
        return self._file.take()

    @property
    def file_bytes(self) -> int:
        """The bytes of the picture's file that are held here, since they were not taken."""
        return len(self._file)

    def pop_delta(self) -> Delta | None:
        """Remove the deltas that wait and return them as one; None if there are none."""
        if not self._waiting:
            return None
        waiting, self._waiting = self._waiting, []
        return waiting[0] if len(waiting) == 1 else join_deltas(waiting)

    @property
    def outcome(self) -> str:
        """What ended the request: the reason, the name of the error's class, or cancelled."""
        if self.error is not None:
            return type(self.error).__name__
        return self.finish if self.ended else "cancelled"

    @property
    def log_fields(self) -> dict[str, str] | None:
        """The fields of a log line about this request. None if it is not traced, and the line names it itself."""
        return None if self.request.trace is None else {"trace": self.request.trace.id}

    @property
    def prompt_computed(self) -> bool:
        """Whether a worker has computed the prompt: a token has come, or an end without an error."""
        return bool(self.session.tokens) or (self.ended and self.error is None)

    @property
    def usage(self) -> Usage:
        """The tokens counted so far. The tokens of a stop string count; those after it do not."""
        produced = self.output.counted if self._stopped or self.request.prompt_only else len(self.session.tokens)
        session = self.session
        cached = (session.cached_tokens, session.cached_host_tokens, session.cached_disk_tokens)
        return usage_of(self.request.prompt_tokens, produced, *cached, reasoning_tokens=self.output.thinking_tokens)


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Join deltas that follow one another into one."""
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.entries),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=join_pieces([piece for delta in deltas for piece in delta.calls]),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
    )
