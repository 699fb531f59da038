"""The log-probability entries of a prompt's tokens, for an answer that begins with its prompt. Pure.

index of the token   0           1  2  3 …
entry                `opening`   one `push` after another, as they come from the worker
"""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from services.frontend.output.detokenize import Detokenizer, TokenBytes, name_by_id
from services.frontend.output.output import LOWEST_LOGPROB, LogprobEntry, TopLogprobEntry
from shared.hashing import token_array
from shared.messages.frames import PromptLogprobs


class PromptEntries:
    """The entries of one prompt; tokens are taken in order."""

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
