"""Turns text into token ids through a cache of words: the ids of `tokenizers` in a third of its time. Pure.

    text ──▶ sections: special tokens, and slices of some 1,000 characters
    section ──▶ pre-tokenizer's regex ──▶ words ──▶ cache: word → its packed ids; a new word goes through the BPE model

`tokenizers` takes about 1.2 µs a token, because it runs its merges over every word of every text. In a BPE model the
ids of a word depend on the word alone, so a word is looked up: 0.2 to 0.6 µs a token. This is exact for:

    model           byte-level BPE without dropout
    pre-tokenizer   a known one, whose Unicode classes are written out for the characters of PLAIN
    normalizer      none, or NFC, which leaves those characters as they are; other normal forms leave ASCII
    added tokens    plain ones, matched in the raw text, the longest of those that begin first

All else is left to `tokenizers`: other models, and sections with other characters. A text may be cut before a space
between two ASCII letters: no pattern looks across it, and no normal form joins across it. Regexes hold Python's lock,
so a text is searched slice by slice, whatever it contains.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from services.frontend.output.tokenizer_json import CHARACTER_OF_BYTE, TokenizerJson, TokenizerStep
from shared.hashing import pack_tokens

SLICE_CHARACTERS = 1024
"""The smallest section that is cut from a text: less than 0.1 ms, or 1 ms if all its words are new."""
SECTION_CHARACTERS = 4 * SLICE_CHARACTERS
"""The largest section that is looked up."""
LOOK_AHEAD_CHARACTERS = 3
"""The number of characters after a word's end that may decide whether it ends there."""
WORD_CHARACTERS = 64
"""The longest word that is cached."""
WORDS_LIMIT = 65_536
"""The number of cached words, 40 MB at most. Then the cache is cleared: a few hundred words are most of any text."""
NEW_WORD_CHARACTERS = 64
"""The number of characters in known words that take as long as one new word: 4 µs."""

PLAIN = "\\x00-\\u017e\\u0180-\\u024f\\u0400-\\u0482\\u048a-\\u052f\\u2010-\\u2027\\u2030-\\u205e"
"""Latin, Cyrillic and punctuation, as a regex class: their categories are the same in every version of Unicode in use.
U+017F is missing because it is an `s` if case is ignored, and combining characters because NFC would join them."""
_SPACE = "\\t-\\r \\x85\\xa0"

_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?[L]+| ?[N]+| ?[^SLN]+|[S]+(?![^S])|[S]+"
_DIGITS = r"[N]|'(?:[stmd]|re|ve|ll)| ?[L]+| ?[^SLN]+|[S]+(?![^SN])|[S]+"
_SPLIT = r"'(?i:[stmd]|re|ve|ll)|[^\r\nLN]?[L]+|%s| ?[^SLN]+[\r\n]*|[S]*[\r\n]+|[S]+(?![^S])|[S]+"
_GIVEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_GIVEN % r"\p{N}{1,3}": _SPLIT % "[N]{1,3}", _GIVEN % r"\p{N}": _SPLIT % "[N]"}
"""The regex of a `Split`, as Llama 3 and Qwen 2 write it → the same regex in our letters: within classes L stands for
letters, N for numbers, S for white space."""

_CUT = re.compile(r"[A-Za-z] [A-Za-z]")
_NOT_PLAIN = re.compile(f"[^{PLAIN}]")
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class _Table(dict[str, bytes]):
    """Word → packed ids; a missing word goes through the BPE model."""

    def __init__(self, ids: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._ids = ids
        self.asked = 0

    def __missing__(self, word: str) -> bytes:
        self.asked += 1
        packed = pack_tokens(self._ids(word.encode().decode("latin-1").translate(CHARACTER_OF_BYTE)))
        if len(word) <= WORD_CHARACTERS:
            if len(self) >= WORDS_LIMIT:
                self.clear()
            self[word] = packed
        return packed


class WordCache:
    """The cached words of one tokenizer. It grows with use, up to its limit."""

    def __init__(
        self, word: str, added: dict[str, int], ids: Callable[[str], Sequence[int]], *, ascii_only: bool = False
    ) -> None:
        """Create it. `word` is a regex in the letters of SPLITS; `ids` is the BPE model, from a word in the byte-level
        alphabet to its token ids."""
        word = f" [L]++|{word}"  # what each of them finds at a space before a letter, found sooner
        self._find_ascii = re.compile(_written_out(word, range(0x80))).findall
        plain = (number for number in range(0x2060) if not _NOT_PLAIN.match(chr(number)))
        self._find = None if ascii_only else re.compile(_written_out(word, plain)).findall
        self._added = {text: pack_tokens([token]) for text, token in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if added else None
        self._longest = len(longest_first[0]) if added else 0
        self._table = _Table(ids)
        self._searched = 0

    @property
    def work(self) -> int:
        """The work of all texts so far, as characters of known words; each piece adds a millisecond at most."""
        return self._searched + NEW_WORD_CHARACTERS * self._table.asked

    def encode(self, text: str) -> Iterator[bytes | str]:
        """Yield the pieces of a text in order: packed ids, or text that is left to `tokenizers`. Such texts that follow
        one another are one text."""
        start = clear = 0  # of a section; no special token begins in text[start:clear]
        torn = False  # what is before `start` belongs to the same section
        while start < len(text):
            stop = min(clear + SLICE_CHARACTERS, len(text))
            special = self._special and self._special.search(text, clear, stop + self._longest - 1)
            if special and special.start() >= stop:
                special = None  # it may go on after the slice
            self._searched += (special.end() if special else stop) - clear
            clear = special.start() if special else stop
            while clear - start >= 2 * SLICE_CHARACTERS or torn:
                cut = _CUT.search(text, start if torn else start + SLICE_CHARACTERS, clear)
                if cut is None:
                    break
                end = cut.start() + 1
                yield self._section(text[start:end], torn=torn)
                start, torn = end, False
            if special or clear == len(text):
                if start < clear:
                    yield self._section(text[start:clear], torn=torn)
                if special:
                    yield self._added[special[0]]
                    clear = special.end()
                start, torn = clear, False
            elif not torn and clear - start > SECTION_CHARACTERS:
                size = self._whole_words(text[start : start + SECTION_CHARACTERS])
                yield self._section(text[start : start + size], torn=False) if size else text[start:clear]
                start, torn = (start + size, False) if size else (clear, True)
            elif torn:
                yield text[start:clear]
                start, torn = clear, True

    def _whole_words(self, text: str) -> int:
        """Return the number of leading characters that are surely whole words, whatever follows the text; 0 if that is
        not known.

        Patterns look at two more characters, as for the `e` of `'re`, but also through all the white space that
        follows. So the last word is one that ends with another character.
        """
        find = self._find_ascii if text.isascii() else self._find
        if find is None or (find is self._find and _NOT_PLAIN.search(text)):
            return 0
        words, end = find(text), len(text)
        while words and (end > len(text) - LOOK_AHEAD_CHARACTERS or words[-1][-1].isspace()):
            end -= len(words.pop())
        return end

    def _section(self, section: str, *, torn: bool) -> bytes | str:
        find = self._find_ascii if section.isascii() else self._find
        if torn or find is None or len(section) > SECTION_CHARACTERS:
            return section
        if find is self._find and _NOT_PLAIN.search(section):
            return section
        try:
            return b"".join(map(self._table.__getitem__, find(section)))
        except BaseException:  # noqa: BLE001  a BPE model comes with the tokenizer, which reports the error
            return section

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._table) <= WORDS_LIMIT
        assert all(len(word) <= WORD_CHARACTERS and not _NOT_PLAIN.search(word) for word in self._table)


def read_words(
    file: TokenizerJson, ids: Callable[[str], Sequence[int]], token_id: Callable[[str], int | None]
) -> WordCache | None:
    """Return the cache for a tokenizer.json; None if it would not be exact. `ids` is as in WordCache. `token_id`
    returns the id that the tokenizer gives an added token, which may differ from that in the file."""
    word = word_pattern(file)
    if word is None:
        return None
    added = {token.content: token_id(token.content) for token in file.added_tokens}
    known = {content: token for content, token in added.items() if content and token is not None}
    if len(known) < len(added):
        return None
    normalizer, _ = file.steps() or (None, None)
    ascii_only = normalizer is not None and normalizer.type != "NFC"
    return WordCache(word, known, ids, ascii_only=ascii_only)


def word_pattern(file: TokenizerJson) -> str | None:
    """Return the regex of a word in the letters of SPLITS; None if a cache of words would not be exact."""
    steps = file.steps()
    model = file.model
    if steps is None or model.type != "BPE" or model.dropout:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizer, pre_tokenizer = steps
    if normalizer is not None and normalizer.type not in _NORMAL_FORMS:
        return None
    if any(token.single_word or token.lstrip or token.rstrip or token.normalized for token in file.added_tokens):
        return None
    return None if pre_tokenizer is None else _word(pre_tokenizer)


def unknown_regexes(file: TokenizerJson) -> list[str]:
    """Return the regexes of a tokenizer that are not known here, so that a text may take any time. Steps of an unknown
    form count as one."""
    steps = file.steps()
    if steps is None:
        return [""]
    return [regex for step in steps if step is not None for regex in _regexes(step) if regex not in SPLITS]


def _regexes(step: TokenizerStep) -> Iterator[str]:
    if "Regex" in step.pattern:
        yield step.pattern["Regex"]
    for one in (*step.normalizers, *step.pretokenizers):
        yield from _regexes(one)


def _word(step: TokenizerStep) -> str | None:
    """Return the regex of a word; None if the pre-tokenizer is unknown."""
    *first, last = step.pretokenizers if step.type == "Sequence" and step.pretokenizers else [step]
    if last.type != "ByteLevel" or last.add_prefix_space:
        return None
    match first:
        case []:
            return _GPT2 if last.use_regex else None
        case [TokenizerStep(type="Digits", individual_digits=True)]:
            return _DIGITS if last.use_regex else None
        case [TokenizerStep(type="Split", behavior="Isolated", invert=False, pattern=pattern)]:
            return None if last.use_regex else SPLITS.get(pattern.get("Regex", ""))
        case _:
            return None


def _written_out(word: str, characters: Iterable[int]) -> str:
    """Return the regex with L, N and S replaced by the characters that they stand for, out of those given."""
    letters: list[int] = []
    numbers: list[int] = []
    for number in characters:
        category = unicodedata.category(chr(number))
        if category[0] in "LN":
            (letters if category[0] == "L" else numbers).append(number)
    classes = {"L": _ranges(letters), "N": _ranges(numbers), "S": _SPACE}
    return re.sub("[LNS]", lambda found: classes[found[0]], word)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending code points as the inside of a regex class."""
    # Within a run, a number and its place grow alike.
    runs = [[*run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return "".join(f"\\u{run[0][1]:04x}-\\u{run[-1][1]:04x}" for run in runs)
