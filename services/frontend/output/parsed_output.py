"""An output whose text is parsed into reasoning, content and tool calls. Pure.

    tokens ─▶ Output ─▶ text ─▶ AnswerParser ─▶ Delta(text, reasoning, calls)

It is used only if a model thinks or a request offers tools; otherwise an Output alone is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from services.frontend.output.output import Delta, LogprobEntry, Output
from services.frontend.tool_parsers.parser import AnswerParser
from shared.messages.frames import TokenLogprob


class ParsedOutput:
    """An Output with a parser. Log-probabilities of all tokens are passed on with the text that came with them."""

    def __init__(self, output: Output, parser: AnswerParser) -> None:
        self._output = output
        self._parser = parser
        self.thinking_tokens = 0
        """The number of tokens up to and including the last one that brought reasoning."""

    @property
    def calls(self) -> int:
        """The number of tool calls that have begun."""
        return self._parser.result.calls_begun

    @property
    def counted(self) -> int:
        """The number of tokens so far, including those that completed the last call if that ended the output."""
        return self._output.counted

    @property
    def stop_string(self) -> str:
        """The stop string that ended the output; empty if none did."""
        return self._output.stop_string

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> Delta:
        """Add tokens, as `Output.push` does."""
        found = self._parser.result
        # Several tokens at once would make it impossible to count those of reasoning, or those after the only call.
        if len(tokens) > 1 and not (found.parallel and (found.content_characters or found.calls_begun)):
            return self._one_by_one(tokens, logprobs)
        delta = self._output.push(tokens, logprobs)
        self._parse(delta.text)
        return self._taken(delta, last=delta.stopped)

    def _one_by_one(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Delta:
        entries: list[LogprobEntry] = []
        token_ids: list[int] = []
        delta = Delta("")
        for at, token in enumerate(tokens):
            delta = self._output.push((token,), None if logprobs is None else (logprobs[at],))
            entries += delta.entries
            token_ids += delta.token_ids
            self._parse(delta.text)
            if delta.stopped or self._parser.at_call_limit:
                break
        return self._taken(replace(delta, entries=tuple(entries), token_ids=tuple(token_ids)), last=delta.stopped)

    def _parse(self, text: str) -> None:
        if not text:
            return
        before = self._parser.result.reasoning_characters
        self._parser.push(text)
        if self._parser.result.reasoning_characters > before:
            self.thinking_tokens = self._output.counted

    def finish(
        self, *, short: bool = False, stop_token: int | None = None, stop_logprob: TokenLogprob | None = None
    ) -> Delta:
        """Return the rest, as `Output.finish` does."""
        delta = self._output.finish(short=short, stop_token=stop_token, stop_logprob=stop_logprob)
        self._parse(delta.text)
        return self._taken(delta, last=True, short=short and not delta.stopped)

    def _taken(self, delta: Delta, *, last: bool, short: bool = False) -> Delta:
        parser = self._parser
        if last and not parser.at_call_limit:
            parser.finish(short=short)
        content, reasoning, calls = parser.result.drain()
        stopped = delta.stopped or parser.at_call_limit
        return Delta(content, delta.entries, stopped, reasoning, calls, delta.token_ids)

    def validate(self) -> None:
        """Assert the invariants."""
        self._output.validate()
        self._parser.validate()
