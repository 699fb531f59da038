"""Text to token ids through a table of words: the same ids as `tokenizers` gives, at a fifth of its time. Pure.

    text ──▶ cut ──▶ sections: special tokens, and slices of some 2,000 characters
    section ──▶ pre-tokenizer's regex ──▶ words ──▶ table: word → its ids, packed; a new word is asked of the BPE model

`tokenizers` takes about 1.1 µs a token, for it runs its merges over every word of every text. A BPE model's ids of a
word depend on the word alone, so words are looked up: 0.2 µs a token. Where this is known to be exact:

    model           byte-level BPE without dropout
    pre-tokenizer   a known one, whose Unicode classes are written out for the characters of PLAIN
    normalizer      none, or NFC, which leaves those characters as they are; other normal forms leave ASCII
    added tokens    plain ones, matched in the raw text, the longest of those that begin first

All else is left to `tokenizers`: other models, and sections with other characters. A text may be cut before a space
between two ASCII letters: no pattern looks over it, no normal form joins over it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct

from shared.hashing import pack_tokens

SLICE_CHARACTERS = 2048
"""At least, of a section: 0.1 to 0.2 ms."""
WORD_CHARACTERS = 64
"""Longer words are not kept."""
WORDS_LIMIT = 65_536
"""Words kept, 40 MB at the most; then the table starts anew: a few hundred words are most of any text."""

PLAIN = "\\x00-\\u017e\\u0180-\\u024f\\u0400-\\u0482\\u048a-\\u052f\\u2010-\\u2027\\u2030-\\u205e"
"""Latin, Cyrillic and punctuation, as a regex class: their categories are the same in every version of Unicode in use.
Not U+017F, which is an `s` where case is ignored; no combining characters, which NFC would join."""
_SPACE = "\\t-\\r \\x85\\xa0"

_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?[L]+| ?[N]+| ?[^SLN]+|[S]+(?![^S])|[S]+"
_DIGITS = r"[N]|'(?:[stmd]|re|ve|ll)| ?[L]+| ?[^SLN]+|[S]+(?![^SN])|[S]+"
_SPLIT = r"'(?i:[stmd]|re|ve|ll)|[^\r\nLN]?[L]+|%s| ?[^SLN]+[\r\n]*|[S]*[\r\n]+|[S]+(?![^S])|[S]+"
_GIVEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_GIVEN % r"\p{N}{1,3}": _SPLIT % "[N]{1,3}", _GIVEN % r"\p{N}": _SPLIT % "[N]"}
"""The regex of a `Split`, as Llama 3 and Qwen 2 write it → the same in our letters: L for letters, N for numbers, S for
white space, within classes."""

_CUT = re.compile(r"[A-Za-z] [A-Za-z]")
_NOT_PLAIN = re.compile(f"[^{PLAIN}]")
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_BYTE_LEVEL = {byte: 0x100 + at for at, byte in enumerate((*range(0x21), *range(0x7F, 0xA1), 0xAD))}
"""GPT-2's alphabet: how bytes that are no visible Latin-1 are written in the vocabulary."""


class _Added(Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class _Step(Struct):
    """A pre-tokenizer, or several."""

    type: str
    pretokenizers: list[_Step] = []
    add_prefix_space: bool = True
    use_regex: bool = True
    individual_digits: bool = False
    pattern: dict[str, str] = {}
    behavior: str = ""
    invert: bool = False


class _Model(Struct):
    type: str = ""
    dropout: float | None = None


class _Normalizer(Struct):
    type: str


class _File(Struct):
    model: _Model
    added_tokens: list[_Added] = []
    normalizer: _Normalizer | None = None
    pre_tokenizer: _Step | None = None


class _Table(dict[str, bytes]):
    """Word → packed ids; one that is not there is asked for where it is looked up."""

    def __init__(self, ids: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._ids = ids

    def __missing__(self, word: str) -> bytes:
        packed = pack_tokens(self._ids(word.encode().decode("latin-1").translate(_BYTE_LEVEL)))
        if len(word) <= WORD_CHARACTERS:
            if len(self) >= WORDS_LIMIT:
                self.clear()
            self[word] = packed
        return packed


class Words:
    """One tokenizer's table. It grows with use, up to its limit."""

    def __init__(
        self, word: str, added: dict[str, int], ids: Callable[[str], Sequence[int]], *, ascii_only: bool = False
    ) -> None:
        """`word` is a regex in the letters of SPLITS, `ids` the BPE model: a word in the byte-level alphabet to its
        token ids."""
        self._find_ascii = re.compile(_written_out(word, range(0x80))).findall
        plain = (number for number in range(0x2060) if not _NOT_PLAIN.match(chr(number)))
        self._find = None if ascii_only else re.compile(_written_out(word, plain)).findall
        self._added = {text: pack_tokens([token]) for text, token in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._table = _Table(ids)

    def cut(self, text: str) -> Iterator[str]:
        """The text's sections, in order."""
        for part in (text,) if self._special is None else self._special.split(text):
            start = 0
            while len(part) - start > 2 * SLICE_CHARACTERS:
                cut = _CUT.search(part, start + SLICE_CHARACTERS)
                if cut is None:
                    break
                yield part[start : cut.start() + 1]
                start = cut.start() + 1
            if start < len(part):
                yield part[start:] if start else part

    def encode(self, section: str) -> bytes | None:
        """The packed ids of one section; None where it has other than plain characters, or is too long, having no place
        to be cut. Raises what the BPE model does."""
        special = self._added.get(section)
        if special is not None:
            return special
        find = self._find_ascii
        if not section.isascii():
            if self._find is None or _NOT_PLAIN.search(section):
                return None
            find = self._find
        if len(section) > 4 * SLICE_CHARACTERS:
            return None
        return b"".join(map(self._table.__getitem__, find(section)))

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._table) <= WORDS_LIMIT
        assert all(len(word) <= WORD_CHARACTERS and not _NOT_PLAIN.search(word) for word in self._table)


def read_words(tokenizer_json: bytes, ids: Callable[[str], Sequence[int]]) -> Words | None:
    """The table of a tokenizer.json; None where it would not be exact."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=_File)
    except msgspec.MsgspecError:  # a form not known here; whether it is one at all is the package's to say
        return None
    if file.model.type != "BPE" or file.model.dropout:
        return None
    if file.normalizer is not None and file.normalizer.type not in _NORMAL_FORMS:
        return None
    if any(token.single_word or token.lstrip or token.rstrip or token.normalized for token in file.added_tokens):
        return None
    word = None if file.pre_tokenizer is None else _word(file.pre_tokenizer)
    if word is None:
        return None
    ascii_only = file.normalizer is not None and file.normalizer.type != "NFC"
    return Words(word, {token.content: token.id for token in file.added_tokens}, ids, ascii_only=ascii_only)


def _word(step: _Step) -> str | None:
    """The regex of a word, where the pre-tokenizer is a known one."""
    first, last = (None, step) if step.type != "Sequence" else (step.pretokenizers[:-1], step.pretokenizers[-1])
    if last.type != "ByteLevel" or last.add_prefix_space:
        return None
    match first:
        case None | []:
            return _GPT2 if last.use_regex else None
        case [_Step(type="Digits", individual_digits=True)]:
            return _DIGITS if last.use_regex else None
        case [_Step(type="Split", behavior="Isolated", invert=False, pattern=pattern)]:
            return None if last.use_regex else SPLITS.get(pattern.get("Regex", ""))
        case _:
            return None


def _written_out(word: str, characters: Iterable[int]) -> str:
    """The regex with the characters that L, N and S stand for, of those given."""
    letters: list[int] = []
    numbers: list[int] = []
    for number in characters:
        category = unicodedata.category(chr(number))
        if category[0] in "LN":
            (letters if category[0] == "L" else numbers).append(number)
    classes = {"L": _ranges(letters), "N": _ranges(numbers), "S": _SPACE}
    return re.sub("[LNS]", lambda found: classes[found[0]], word)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending code points as the inside of a regex class."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in ranges)
