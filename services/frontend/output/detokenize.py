"""Token ids back to text, one token at a time, never half a character. Pure.

    tokenizer.json ──▶ TokenBytes: id → the bytes it stands for (special tokens: none)
    ids ──▶ bytes ──▶ incremental UTF-8 decoder ──▶ text;   an unfinished character waits for its rest

A table and Python's UTF-8 decoder take a third of the time of the `tokenizers` package's DecodeStream, and the bytes of
a single token are what OpenAI's `logprobs` want. Two families are known, those of the models that are served:

    byte level     GPT-2's alphabet: one character a byte               (Llama 3, Qwen 2, SmolLM)
    byte fallback  SentencePiece: "▁" is a space, <0xE4> is a byte      (Llama 2, Mistral)

The text equals `tokenizers`' full decode, with one exception: where byte-fallback tokens do not form valid UTF-8,
`tokenizers` turns the whole run of them into U+FFFD, valid characters included; here only the invalid bytes do.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from shared.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Struct, frozen=True):
    """What each token id stands for."""

    table: Sequence[bytes]
    """By id; empty for special tokens and ids that nobody uses."""
    names: Sequence[bytes]
    """The same, but special tokens by their written form; for logprobs."""
    strip_first_space: bool
    """Whether one space at the very beginning of an output is dropped (SentencePiece)."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of `token`; empty for ids beyond the table (padding rows of the embedding)."""
        return self.table[token] if token < len(self.table) else b""

    def showing(self, marks: Collection[str]) -> TokenBytes:
        """The same, but for special tokens of these written forms, which stand for them."""
        shown = {mark.encode() for mark in marks}
        table = [
            name if not text and name in shown else text for text, name in zip(self.table, self.names, strict=True)
        ]
        return msgspec.structs.replace(self, table=table)

    def name(self, token: int) -> bytes:
        """The bytes that name `token` to people."""
        return self.names[token] if token < len(self.names) else b""


class Detokenizer:
    """The text of one output as it grows."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokens.strip_first_space
        self._plain = not self._strip
        """Whether ASCII stands for itself: no character is unfinished, no space to be dropped."""

    def push(self, tokens: Sequence[int]) -> str:
        """The characters that `tokens` complete."""
        of = self._tokens.bytes_of
        piece = of(tokens[0]) if len(tokens) == 1 else b"".join(map(of, tokens))
        if self._plain and piece.isascii():  # nearly always, and in a quarter of the decoder's time
            return piece.decode()
        return self._decoded(piece)

    def finish(self) -> str:
        """What still waits: a character without its rest becomes U+FFFD."""
        return self._decoded(b"", final=True)

    def _decoded(self, piece: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(piece, final)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        unfinished, _ = self._decoder.getstate()
        self._plain = not (unfinished or self._strip)
        return text


# --- tokenizer.json


class _AddedToken(Struct):
    id: int
    content: str
    special: bool = False


class _Vocabulary(Struct):
    type: str | None = None
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Decoder(Struct):
    type: str
    decoders: list[_Decoder] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0


class _TokenizerFile(Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []
    decoder: _Decoder | None = None


def read_token_bytes(tokenizer_json: bytes) -> TokenBytes:
    """The table of a tokenizer.json. Raises ModelError where its decoder is of neither known family."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise ModelError(f"tokenizer.json: {wrong}") from None
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


def _family(decoder: _Decoder | None) -> tuple[bool, bool]:
    """(whether byte level, whether the first space is dropped)."""
    if decoder is None:
        raise ModelError("tokenizer.json: it has no decoder")
    steps = decoder.decoders if decoder.type == "Sequence" else [decoder]
    kinds = [step.type for step in steps if step.type != "Fuse"]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds[:2] == ["Replace", "ByteFallback"] and steps[0].pattern == {"String": "▁"} and steps[0].content == " ":
        rest = steps[-1]
        if len(kinds) == 2:
            return False, False
        if kinds[2:] == ["Strip"] and (rest.content, rest.start, rest.stop) == (" ", 1, 0):
            return False, True
    raise ModelError(f"tokenizer.json: its decoder ({', '.join(kinds)}) is neither byte level nor byte fallback")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _read_byte_level(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return text.encode()


def _read_byte_fallback(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
