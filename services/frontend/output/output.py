"""The output of one choice: tokens in, text and log-probabilities out. Pure.

    tokens ─▶ Detokenizer ─▶ StopScanner ─▶ Delta(text, entries)

A log-probability entry is passed on with the text that it belongs to. Entries of text that is held back wait, and
entries of text after a stop string are dropped.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.output.detokenize import Detokenizer, TokenBytes, name_by_id
from services.frontend.tool_parsers.parse_result import CallPiece
from shared.hashing import token_array, unpack_tokens
from shared.messages.frames import PromptLogprobs, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""The log-probability that stands for minus infinity, which JSON cannot write; OpenAI uses the same."""


class TopLogprobEntry(Struct, frozen=True):
    """One of the most probable tokens at a position."""

    token: bytes
    logprob: float


class LogprobEntry(TopLogprobEntry, frozen=True):
    """The log-probabilities of one output token."""

    top: tuple[TopLogprobEntry, ...]
    text_offset: int
    """The index of its first character in the output, and in the prompt before it if that is repeated."""
    opens_prompt: bool = False
    """True for a prompt's first token. Nothing precedes that, so it has no log-probability."""


class Delta(Struct, frozen=True):
    """What one call of `push` added to the output."""

    text: str
    entries: tuple[LogprobEntry, ...] = ()
    stopped: bool = False
    """Whether a stop string was found; the output ends here."""
    reasoning: str = ""
    """Reasoning text, which only ParsedOutput separates."""
    calls: tuple[CallPiece, ...] = ()
    """Pieces of tool calls, which only ParsedOutput separates."""
    token_ids: tuple[int, ...] = ()
    """The new tokens, if they are asked for, also those whose text is held back."""


class StopScanner:
    """Passes text on up to the first stop string, and with `include` that string too.

        emitted before | held: the longest suffix that could begin a stop string | not here yet

    The stop string that is complete first wins; of two that are complete with the same character, the longer one. So it
    does not matter how the text was cut into pieces. One that is complete while stopping is not allowed yet is text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would stop at once"
        self._stops = tuple(stops)
        self._include = include
        self._longest_first = sorted(stops, key=len, reverse=True)
        self._first = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; nothing is passed on after it."""
        self.found = ""
        """The stop string that was found."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return the part of the text that is now known to lie before any stop string and was not returned yet. Without
        `may_stop`, a stop string that this text completes does not count."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        before, text = len(self._held), self._held + text
        found: list[tuple[int, int]] = []
        if may_stop:
            starts = [(stop, max(0, before - len(stop) + 1)) for stop in self._stops]  # so that the end is new
            found = [(at + len(stop), at) for stop, start in starts if (at := text.find(stop, start)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            end, at = min(found)
            self.found = text[at:end]
            return text[:end] if self._include else text[:at]
        keep = self._candidate(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return what was held back; the text has ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _candidate(self, text: str) -> int:
        """Return where the earliest stop string that is still possible would begin."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            begun = text[at:]
            if text[at] in self._first and self._begins(begun):
                return at
        return len(text)

    def _begins(self, begun: str) -> bool:
        """Return whether a longer stop string begins with a text. Shorter ones are not looked at, so that `_candidate`
        compares as many as there are characters in all stop strings."""
        for stop in self._longest_first:
            if len(stop) <= len(begun):
                return False
            if stop.startswith(begun):
                return True
        return False

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._held) < max(1, self._longest)
        assert not (self.stopped and self._held)
        assert not self._held or any(stop.startswith(self._held) for stop in self._stops)


class Output:
    """The output of one choice; it grows by `push` until it is stopped or finished."""

    calls = thinking_tokens = 0
    """The numbers of tool calls and of reasoning tokens; only ParsedOutput finds any."""

    def __init__(
        self,
        tokens: TokenBytes,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        with_ids: bool = False,
        begins_at: int = 0,
        before: bytes = b"",
        special_stops: Mapping[int, str] | None = None,
        rates_stop: bool = False,
    ) -> None:
        """Create it. A stop string counts if a token after the first `min_tokens` completes it. `include_stop`: the
        stop string, or the text of the stop token, stays in the output. `with_ids`: deltas have token ids.
        `begins_at`: the count of characters before the output, as entries count them. `before`: the end of the text
        that the output continues, as `TokenBytes.end_of` returns it; empty if the output begins a text.
        `special_stops`: the stop strings that are special tokens, which stand in no text, by their ids.
        `rates_stop`: the token that ends the output has an entry, too, if its log-probability is given."""
        self._detokenizer = Detokenizer(tokens, before)
        self._scanner = StopScanner(stops, include=include_stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._with_ids = with_ids
        self._one_by_one = bool(stops)
        self._special_stops = special_stops or {}
        self._rates_stop = rates_stop
        self._decoded = self._emitted = begins_at
        self._waiting: deque[LogprobEntry] = deque()
        self.counted = 0
        """The number of tokens so far, up to and including the one that completed a stop string."""

    @property
    def stop_string(self) -> str:
        """The stop string that ended the output; empty if none did."""
        return self._scanner.found

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> Delta:
        """Add tokens. `logprobs` has one item for each token, if they were asked for."""
        assert not self._scanner.stopped, "the output has ended"
        if not self._one_by_one and logprobs is None and not self._waiting:
            self.counted += len(tokens)
            text = self._detokenizer.push(tokens)
            self._emitted += len(text)
            return Delta(text, token_ids=tuple(tokens)) if self._with_ids else Delta(text)
        text, before = "", self.counted
        for at, token in enumerate(tokens):
            self.counted += 1
            if logprobs is not None:
                self._waiting.append(self._entry(token, logprobs[at]))
            piece = self._detokenizer.push((token,))
            self._decoded += len(piece)
            may_stop = self.counted > self._min_tokens
            if may_stop and token in self._special_stops:
                piece += self._detokenizer.finish() + self._special_stops[token]
            text += self._scanner.push(piece, may_stop=may_stop)
            if self._scanner.stopped:
                break
        return self._emit(text, tokens[: self.counted - before])

    def finish(
        self,
        *,
        short: bool = False,  # noqa: ARG002  for ParsedOutput
        stop_token: int | None = None,
        stop_logprob: TokenLogprob | None = None,
    ) -> Delta:
        """Return the rest, if the output ends for another reason than a stop string. `short`: a limit cut it.
        `stop_token`: the token that ended it."""
        if self._rates_stop and stop_token is not None and stop_logprob is not None:
            self._waiting.append(self._entry(stop_token, stop_logprob))
        included = () if stop_token is None or not self._include_stop else (stop_token,)
        piece = self._detokenizer.push(included) + self._detokenizer.finish()
        text = self._scanner.push(piece, may_stop=not included and self.counted > self._min_tokens)
        text = text if self._scanner.stopped else text + self._scanner.finish()
        return self._emit(text, () if stop_token is None else (stop_token,), last=True)

    def _emit(self, text: str, tokens: Sequence[int], *, last: bool = False) -> Delta:
        self._emitted += len(text)
        entries: list[LogprobEntry] = []
        whole = last and not self._scanner.stopped
        while self._waiting and (whole or self._waiting[0].text_offset < self._emitted):
            entries.append(self._waiting.popleft())
        token_ids = tuple(tokens) if self._with_ids else ()
        return Delta(text, tuple(entries), self._scanner.stopped, token_ids=token_ids)

    def _entry(self, token: int, given: TokenLogprob) -> LogprobEntry:
        name, top = self._detokenizer.name, zip(unpack_tokens(given.top_tokens), given.top_logprobs, strict=True)
        return LogprobEntry(
            token=name(token),
            logprob=max(given.logprob, LOWEST_LOGPROB),
            top=tuple(TopLogprobEntry(name(other), max(value, LOWEST_LOGPROB)) for other, value in top),
            text_offset=self._decoded,
        )

    def validate(self) -> None:
        """Assert the invariants."""
        self._scanner.validate()
        offsets = [entry.text_offset for entry in self._waiting]
        assert offsets == sorted(offsets)
        assert all(self._emitted <= offset for offset in offsets)


class PromptEntries:
    """The entries of one prompt; tokens are taken in order.

    index of the token   0           1  2  3 …
    entry                `opening`   one `push` after another, as they come from the worker
    """

    def __init__(self, tokens: TokenBytes, prompt: bytes, text: str) -> None:
        """Create it. `prompt`: its packed token ids; `text`: its text, which is before the answer."""
        self._tokens = tokens
        self._prompt = token_array(prompt)
        self._text = text
        self._detokenizer = Detokenizer(replace(tokens, table=tokens.names, numbered=False))
        self._decoded = 0
        self._taken = 0

    def opening(self) -> LogprobEntry:
        """Return the entry of the first token, which has no log-probability."""
        assert self._taken == 0, "taken twice"
        name, offset = self._take()
        return LogprobEntry(name, 0.0, (), offset, opens_prompt=True)

    def push(self, given: PromptLogprobs) -> tuple[LogprobEntry, ...]:
        """Return the entries of the next tokens."""
        assert given.first == self._taken, "a gap, or a repeat"
        count = given.count
        top_tokens, top_logprobs = token_array(given.top_tokens), array("f", given.top_logprobs)
        each = len(top_tokens) // count
        entries: list[LogprobEntry] = []
        for at, logprob in enumerate(array("f", given.logprobs)):
            top = tuple(
                TopLogprobEntry(self._shown(top_tokens[index]), max(top_logprobs[index], LOWEST_LOGPROB))
                for index in range(at * each, (at + 1) * each)
            )
            name, offset = self._take()
            entries.append(LogprobEntry(name, max(logprob, LOWEST_LOGPROB), top, offset))
        return tuple(entries)

    def _take(self) -> tuple[bytes, int]:
        """Return the name of the next token, and the index of its first character. A special token has characters only
        if the text has it."""
        token, offset = self._prompt[self._taken], min(self._decoded, len(self._text))
        name, shown = self._detokenizer.name(token), self._shown(token)
        if self._tokens.bytes_of(token) or self._text.startswith(name.decode("utf-8", "replace"), self._decoded):
            self._decoded += len(self._detokenizer.push((token,)))
        self._taken += 1
        return shown, offset

    def _shown(self, token: int) -> bytes:
        return name_by_id(token) if self._tokens.numbered else self._detokenizer.name(token)
