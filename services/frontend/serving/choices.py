"""The choices of one chat or completion: several streams, read and answered as one.

    a prompt's first choice ── its first token ──▶ the prompt's other choices       all of them ──▶ one StreamSelector
    another prompt's first choice ── …                 find its blocks in a cache

    Choices ─▶ deltas, each of one choice ─▶ serving/reply.py

Each choice is a request of its own to routers and workers. So all that can happen to a request happens to one choice:
it is routed by itself, and continues elsewhere if its worker is lost. The client sees one answer: it fails once a
choice has failed for good.

One sequence that forks after its prompt would need all of that again inside one request, and would decode all choices
on one worker while another is idle. The price is the tokens after the prompt's last full block, once for each further
choice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from services.frontend.output.output import Delta
from services.frontend.protocol.chat_chunks import Usage, usage_of
from services.frontend.requests.stream import NOTHING, InferenceRequest, Stream, StreamSelector
from shared.errors import HeadraceError

OpenStream = Callable[[InferenceRequest, StreamSelector], AbstractContextManager[Stream]]
"""Starts a request, as `RequestService.open` does; leaving the context cancels it."""


class Choices:
    """The choices in the order of the request: the choices of one prompt follow one another."""

    def __init__(
        self, open_stream: OpenStream, prompts: Sequence[Sequence[InferenceRequest]], stack: ExitStack
    ) -> None:
        self.streams: dict[int, Stream] = {}
        """The streams of the choices that were started, by the choice's index."""
        self._open = open_stream
        self._stack = stack
        self._selector = StreamSelector()
        self._pending = dict(enumerate(request for prompt in prompts for request in prompt))
        """The choices that were not started yet, by index."""
        self._index: dict[Stream, int] = {}
        self._counts: dict[int, int] = {}
        """The index of each prompt's first choice → the number of the prompt's choices."""
        for prompt in prompts:
            self._counts[sum(self._counts.values())] = len(prompt)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def start(self) -> None:
        """Start the first choice of each prompt."""
        for first, count in self._counts.items():
            self._start(first)
            self.streams[first].awaits_first_token = count > 1

    def wake(self) -> None:
        """Make the reader get NOTHING, if it waits."""
        self._selector.wake()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta | None]]:
        """Yield the next delta of any choice with its index; None for its end; NOTHING after `wake`. Raise the error
        that ended a choice.

        While the client does not read, the choices that wait for another one's first token wait too.
        """
        unfinished = set(range(len(self)))
        while unfinished:
            if not (ready := await self._selector.wait_ready()):
                yield 0, NOTHING
            for stream in ready:
                index = self._index[stream]
                if stream.awaits_first_token and stream.prompt_computed:
                    stream.awaits_first_token = False
                    for other in range(index + 1, index + self._counts[index]):
                        self._start(other)
                while (delta := stream.pop_delta()) is not None:
                    yield index, delta
                if stream.ended and index in unfinished:
                    if stream.error is not None:
                        raise stream.error
                    unfinished.remove(index)
                    yield index, None

    def _start(self, index: int) -> None:
        stream = self._stack.enter_context(self._open(self._pending.pop(index), self._selector))
        self.streams[index] = stream
        self._index[stream] = index

    @property
    def errors(self) -> list[HeadraceError]:
        """The errors that ended choices."""
        return [stream.error for stream in self.streams.values() if stream.error is not None]

    @property
    def usage(self) -> Usage:
        """The tokens counted so far. Each prompt counts once, with the cached tokens of its first choice."""
        usages = {index: stream.usage for index, stream in self.streams.items()}
        prompts = [usages[index] for index in self._counts]
        tiers = [usage.prompt_tokens_details.cached_tokens_by_tier for usage in prompts]
        return usage_of(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages.values()),
            sum(tier.device + tier.host + tier.disk for tier in tiers),
            sum(tier.host for tier in tiers),
            sum(tier.disk for tier in tiers),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages.values()),
        )

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._index == {stream: index for index, stream in self.streams.items()}
        assert self.streams.keys() | self._pending.keys() == set(range(len(self)))
        assert not self.streams.keys() & self._pending.keys()
        assert self._counts.keys() <= self.streams.keys()
        for first, count in self._counts.items():
            others = set(range(first + 1, first + count))
            waits = self.streams[first].awaits_first_token
            assert others <= (self._pending if waits else self.streams).keys()
        assert all(index in self._counts for index, stream in self.streams.items() if stream.awaits_first_token)


@contextmanager
def open_choices(open_stream: OpenStream, prompts: Sequence[Sequence[InferenceRequest]]) -> Iterator[Choices]:
    """Start the choices of each prompt, at least one; leaving cancels all that have not ended. Raise what `open_stream`
    raises."""
    with ExitStack() as stack:
        choices = Choices(open_stream, prompts, stack)
        choices.start()
        yield choices
