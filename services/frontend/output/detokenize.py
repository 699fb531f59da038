"""Turns token ids back into text, one token at a time, never half a character. Pure.

    tokenizer.json ──▶ TokenBytes: id → the bytes it stands for (special tokens: none)
    ids ──▶ bytes ──▶ incremental UTF-8 decoder ──▶ text;   an unfinished character waits for its rest

An answer that continues a text is decoded after that text's end: `TokenBytes.end_of(prompt)`. So prompt and answer
together read as the tokenizer decodes both: "Hello" and "▁world" are "Hello world", and a character that the prompt
begins ends in the answer. The answer of a chat begins a text, as the messages of its history do.

A table and Python's UTF-8 decoder take a third of the time of the `tokenizers` package's DecodeStream. The bytes of a
single token are what OpenAI's `logprobs` want. Two families of tokenizers are supported:

    byte level     GPT-2's alphabet: one character a byte               (Llama 3, Qwen 2, SmolLM)
    byte fallback  SentencePiece: "▁" is a space, <0xE4> is a byte      (Llama 2, Mistral)

The text equals `tokenizers`' full decode, with two exceptions. If byte-fallback tokens do not form valid UTF-8,
`tokenizers` turns the whole run of them into U+FFFD, valid characters included; here only the invalid bytes become it.
Its Metaspace decoder drops all spaces of a text's first token; here one is dropped.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from services.frontend.output.tokenizer_json import BYTE_OF_CHARACTER, DecoderStep, TokenizerJson
from shared.errors import ModelError
from shared.hashing import token_array

END_LIMIT_TOKENS = 32
"""The number of tokens in which the end of a prompt's text is looked for."""
_UNFINISHED_BYTES = 3
"""The number of bytes that an unfinished character has at most."""
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Struct, frozen=True):
    """The bytes that each token id stands for."""

    table: Sequence[bytes]
    """The bytes by id; empty for special tokens and unused ids."""
    names: Sequence[bytes]
    """The bytes by id, special tokens in their written form; for log-probabilities."""
    strip_first_space: bool
    """Whether one space at the beginning of a text is dropped (SentencePiece)."""
    numbered: bool = False
    """Whether log-probabilities name tokens by their ids, as vLLM writes them."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; empty for ids beyond the table (padding rows of the embedding)."""
        return self.table[token] if token < len(self.table) else b""

    def showing(self, marks: Collection[str]) -> TokenBytes:
        """Return a table in which the special tokens with these written forms stand for them."""
        shown = {mark.encode() for mark in marks}
        table = [
            name if not text and name in shown else text for text, name in zip(self.table, self.names, strict=True)
        ]
        return msgspec.structs.replace(self, table=table)

    def end_of(self, prompt: bytes) -> bytes:
        """Return the last bytes of a packed prompt's text: as many as an unfinished character may have. Empty if it has
        no text, or if that is followed by END_LIMIT_TOKENS special tokens."""
        end = b""
        for token in reversed(token_array(prompt[-4 * END_LIMIT_TOKENS :])):
            end = self.bytes_of(token) + end
            if len(end) >= _UNFINISHED_BYTES:
                break
        return end[-_UNFINISHED_BYTES:]


def name_by_id(token: int) -> bytes:
    """Return the name of a token in log-probabilities if tokens are named by their ids."""
    return b"token_id:%d" % token


class Detokenizer:
    """The text of one output as it grows."""

    def __init__(self, tokens: TokenBytes, before: bytes = b"") -> None:
        """Create it. `before`: the end of the text that the output continues, as `end_of` returns it; empty if the
        output begins a text."""
        self._tokens = tokens
        self._decoder = _Utf8Decoder("replace")
        self._decoder.decode(before)
        self._strip = tokens.strip_first_space and not before
        unfinished, _ = self._decoder.getstate()
        self._plain = not (unfinished or self._strip)
        """Whether ASCII bytes can be passed on as they are: no character is unfinished, no space has to be dropped."""

    def name(self, token: int) -> bytes:
        """Return the bytes by which log-probabilities name a token that comes next; empty for ids beyond the table. A
        space that the text drops is not in its name."""
        if self._tokens.numbered:
            return name_by_id(token)
        names = self._tokens.names
        name = names[token] if token < len(names) else b""
        return name.removeprefix(b" ") if self._strip else name

    def push(self, tokens: Sequence[int]) -> str:
        """Return the characters that `tokens` complete."""
        of = self._tokens.bytes_of
        piece = of(tokens[0]) if len(tokens) == 1 else b"".join(map(of, tokens))
        if self._plain and piece.isascii():  # nearly always, and in a quarter of the decoder's time
            return piece.decode()
        return self._decoded(piece)

    def finish(self) -> str:
        """Return what still waits: a character without its rest becomes U+FFFD."""
        return self._decoded(b"", final=True)

    def _decoded(self, piece: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(piece, final)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        unfinished, _ = self._decoder.getstate()
        self._plain = not (unfinished or self._strip)
        return text


# --- from tokenizer.json


def read_token_bytes(file: TokenizerJson) -> TokenBytes:
    """Return the table of a tokenizer.json. Raise ModelError if its decoder is of neither known family."""
    byte_level, strip_first_space = _family(file.decoder)
    vocab = file.model.vocab
    ids = vocab if isinstance(vocab, dict) else {text: number for number, (text, _) in enumerate(vocab)}
    size = 1 + max((*ids.values(), *(token.id for token in file.added_tokens)), default=-1)
    if size > 1 << 24 or min(ids.values(), default=0) < 0:
        raise ModelError("tokenizer.json: token ids are negative or beyond 2^24")
    table = [b""] * size
    read = _read_byte_level if byte_level else _read_byte_fallback
    for text, number in ids.items():
        table[number] = read(text)
    names = list(table)
    for token in file.added_tokens:
        table[token.id] = b"" if token.special else read(token.content)
        names[token.id] = token.content.encode()
    return TokenBytes(table, names, strip_first_space)


def _family(decoder: DecoderStep | None) -> tuple[bool, bool]:
    """Return whether the tokens are byte level, and whether the first space is dropped."""
    if decoder is None:
        raise ModelError("tokenizer.json: it has no decoder")
    steps = decoder.decoders if decoder.type == "Sequence" else [decoder]
    kinds = [step.type for step in steps if step.type != "Fuse"]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds in (["Metaspace"], ["ByteFallback", "Metaspace"]) and steps[len(kinds) - 1].replacement == "▁":
        return False, steps[len(kinds) - 1].prepend_scheme != "never"
    if kinds[:2] == ["Replace", "ByteFallback"] and steps[0].pattern == {"String": "▁"} and steps[0].content == " ":
        rest = steps[-1]
        if len(kinds) == 2:
            return False, False
        if kinds[2:] == ["Strip"] and (rest.content, rest.start, rest.stop) == (" ", 1, 0):
            return False, True
    raise ModelError(f"tokenizer.json: its decoder ({', '.join(kinds)}) is neither byte level nor SentencePiece's")


def _read_byte_level(text: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return text.encode()


def _read_byte_fallback(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
