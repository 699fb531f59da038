"""Tries a tokenizer before it is used. `python -m services.frontend.models.tokenizer_trial` reads a tokenizer.json.

A tokenizer comes with the model, and its regexes, replacements and rules may take minutes or gigabytes for a short
text. So one whose form is not known (bpe_cache.py) first loads in a process of its own and encodes some texts there.
The process ends where that takes more than CPU_LIMIT_S or MEMORY_LIMIT_BYTES, and the model is refused.

A tokenizer that is slow only with other texts is not found: one with an unknown regex, or that took SLOW_S for a text,
therefore never runs on the event loop (preprocess.py).
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from services.frontend.models.bpe_cache import unknown_regexes, word_pattern
from services.frontend.models.trial import CPU_LIMIT_S, begin_step, limit_process, run_trial
from services.frontend.output.tokenizer_json import TokenizerJson, parse_tokenizer_json
from shared.errors import ModelError

LOAD_LIMIT_S = 20.0
"""The processor time in seconds to load a tokenizer; a large one takes some 2 s."""
MEMORY_LIMIT_BYTES = 3 << 30
"""The address space of the process; a large vocabulary takes some 500 MB."""
RUN_CHARACTERS = 4096
"""The length of each text, in characters."""
REGEX_PARTS = 60
"""The number of parts of a tokenizer's own regexes of which there is a text: characters, and pairs of them."""
SLOW_S = 0.02
"""The processor time in seconds for a text from which a tokenizer is slow; others take some 4 ms."""
KNOWN = 32
"""The number of verdicts that are kept."""
_TOO_MUCH = (
    f"loading it, or encoding {RUN_CHARACTERS} characters, takes more than {CPU_LIMIT_S:g} s or "
    f"{MEMORY_LIMIT_BYTES >> 20} MiB"
)
_PARTS = (
    *(
        "a",
        "A",
        "7",
        " ",
        "\n",
        "\r\n",
        "\t",
        ".",
        "-",
        "'",
        "é",
        "e\u0301",
        "水",
        "한",
        "😀",
        "\u200d",
        "\u00a0",
        "\ufdfa",
    ),
    *("a ", "a1", "1.", "ab", "A1 b2, ", "\n ", "It's a short line, isn't it?\n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaa b"),
)
"""What the texts consist of."""


class TrialVerdict(Struct, frozen=True):
    """What a trial found."""

    objection: str = ""
    """Why the tokenizer cannot be used; empty if no reason was found."""
    slow: bool = False
    """Whether a short text may take long."""


_verdicts: dict[str, TrialVerdict] = {}
"""Digest of a tokenizer.json → what its trial found."""


def try_tokenizer(content: bytes, file: TokenizerJson, digest: str = "") -> bool:
    """Try a tokenizer in a process if its form is not known; blocks. Return whether short texts surely take it no
    longer than their length says. `file` is the parsed content, `digest` its SHA-256. Raise ModelError if it takes too
    much, or if the trial failed."""
    if word_pattern(file) is not None:
        return True
    digest = digest or hashlib.sha256(content).hexdigest()
    if digest not in _verdicts:
        output = run_trial("services.frontend.models.tokenizer_trial", content, "the tokenizer")
        _verdicts[digest] = (
            TrialVerdict(_TOO_MUCH) if output is None else msgspec.json.decode(output, type=TrialVerdict)
        )
        while len(_verdicts) > KNOWN:
            del _verdicts[next(iter(_verdicts))]
    verdict = _verdicts[digest]
    if verdict.objection:
        raise ModelError(f"the tokenizer: {verdict.objection}")
    return not verdict.slow and not unknown_regexes(file)


def texts(regexes: list[str]) -> Iterator[str]:
    """Yield the texts to be encoded: runs of one character, of others, and of those that are in the regexes."""
    words = [[character for character in regex if character.isalnum()] for regex in regexes]
    own = dict.fromkeys(part for word in words for part in (*word, *map("".join, pairwise(word))))
    for part in (*_PARTS, *[*own][:REGEX_PARTS]):
        yield part * (RUN_CHARACTERS // len(part))


def judge(content: bytes) -> TrialVerdict:
    """Load a tokenizer and encode the texts. The caller limits memory."""
    regexes, longest_s = unknown_regexes(parse_tokenizer_json(content)), 0.0
    begin_step(LOAD_LIMIT_S)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        begin_step()
        for text in texts(regexes):
            begun_s = time.process_time()
            with suppress(Exception):  # a tokenizer may not know a text
                tokenizer.encode(text)
            longest_s = max(longest_s, time.process_time() - begun_s)
    except Exception:  # noqa: BLE001  loading the model reports it
        return TrialVerdict()
    except BaseException as wrong:  # noqa: BLE001  a panic, which is no Exception
        return TrialVerdict(f"it fails on a text: {wrong}")
    return TrialVerdict(slow=longest_s > SLOW_S)


def main() -> None:
    """Read a tokenizer.json from standard input and write the TrialVerdict."""
    limit_process(MEMORY_LIMIT_BYTES)
    sys.stdout.buffer.write(msgspec.json.encode(judge(sys.stdin.buffer.read())))


if __name__ == "__main__":
    main()
