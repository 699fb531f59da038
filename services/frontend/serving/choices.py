"""The choices of one request, read as one.

    a prompt's first choice ── its first token ──▶ the prompt's other choices         all of them ──▶ one Reader
    another prompt's first choice ── …                 with its blocks in a cache

Each is a request of its own to routers and workers, so that whatever can happen to a request happens to one choice: it
is routed, and continues elsewhere when its worker is lost, by itself. For the reader they end as one: where one has
failed for good, the request has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from msgspec import Struct

from services.frontend.output.output import Delta, Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.protocol.chat_chunks import Usage, usage_of
from services.frontend.requests.stream import InferenceRequest, Stream, StreamSelector


class Planned(Struct, frozen=True):
    """One choice, before it is asked for."""

    job: InferenceRequest
    output: Output | ParsedOutput


Open = Callable[[Planned, StreamSelector], AbstractAsyncContextManager[Stream]]
"""Asks for a choice; leaving cancels it."""


class Choices:
    """In the order of the request: a prompt's choices together."""

    def __init__(self, open_one: Open, prompts: Sequence[Sequence[Planned]], stack: AsyncExitStack) -> None:
        self.streams: dict[int, Stream] = {}
        """Those that were asked for, by the choice's index."""
        self._open = open_one
        self._stack = stack
        self._reader = StreamSelector()
        self._planned = dict(enumerate(one for prompt in prompts for one in prompt))
        self._index: dict[Stream, int] = {}
        self._leaders: dict[int, int] = {}
        """The first choice of each prompt → how many there are of it."""
        for prompt in prompts:
            self._leaders[sum(self._leaders.values())] = len(prompt)

    def __len__(self) -> int:
        return sum(self._leaders.values())

    async def begin(self) -> None:
        """Ask for the first choice of each prompt."""
        for first, count in self._leaders.items():
            await self._ask(first)
            self.streams[first].awaits_first_token = count > 1

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta | None]]:
        """What comes next of a choice, with its index; None: it has ended. Raises the error that ended one of them.

        Where the client does not take what is there, the choices that wait for a first token wait for it too.
        """
        unfinished = set(range(len(self)))
        while unfinished:
            for stream in await self._reader.wait_ready():
                index = self._index[stream]
                if stream.awaits_first_token and stream.prompt_computed:
                    stream.awaits_first_token = False
                    for other in range(index + 1, index + self._leaders[index]):
                        await self._ask(other)
                while (delta := stream.pop_delta()) is not None:
                    yield index, delta
                if stream.ended and index in unfinished:
                    stream.raise_error()
                    unfinished.remove(index)
                    yield index, None

    async def _ask(self, index: int) -> None:
        stream = await self._stack.enter_async_context(self._open(self._planned.pop(index), self._reader))
        self.streams[index] = stream
        self._index[stream] = index

    @property
    def failed(self) -> bool:
        """Whether one of them has ended with an error."""
        return any(stream.failed for stream in self.streams.values())

    @property
    def late(self) -> bool:
        """Whether the time of one was over before its end."""
        return any(stream.timed_out for stream in self.streams.values())

    @property
    def usage(self) -> Usage:
        """Tokens counted so far: each prompt once, with what was cached of it for its first choice."""
        usages = {index: stream.usage for index, stream in self.streams.items()}
        prompts = [usages[index] for index in self._leaders]
        tiers = [usage.prompt_tokens_details.cached_tokens_by_tier for usage in prompts]
        return usage_of(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages.values()),
            sum(tier.device + tier.host + tier.disk for tier in tiers),
            sum(tier.host for tier in tiers),
            sum(tier.disk for tier in tiers),
        )

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self._index == {stream: index for index, stream in self.streams.items()}
        assert self.streams.keys() | self._planned.keys() == set(range(len(self)))
        assert not self.streams.keys() & self._planned.keys()
        assert self._leaders.keys() <= self.streams.keys()
        for first, count in self._leaders.items():
            others = set(range(first + 1, first + count))
            waits = self.streams[first].awaits_first_token
            assert others <= (self._planned if waits else self.streams).keys()
        assert all(index in self._leaders for index, stream in self.streams.items() if stream.awaits_first_token)


@asynccontextmanager
async def ask(open_one: Open, prompts: Sequence[Sequence[Planned]]) -> AsyncIterator[Choices]:
    """For each prompt its choices, at least one; leaving cancels all that have not ended. Raises what opening does."""
    async with AsyncExitStack() as stack:
        choices = Choices(open_one, prompts, stack)
        await choices.begin()
        yield choices
