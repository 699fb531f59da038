from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.frontend.output.detokenize import END_LIMIT_TOKENS, Detokenizer, TokenBytes, read_token_bytes
from services.frontend.output.output import Delta, LogprobEntry, Output, PromptEntries, StopScanner
from services.frontend.output.tokenizer_json import parse_tokenizer_json
from shared.hashing import pack_tokens
from shared.messages.frames import PromptLogprobs, TokenLogprob
from tests.frontend.output.test_detokenize import BYTE_LEVEL
from tests.frontend.sentencepiece import FIRST_BYTE, sentencepiece

TOKENS = TokenBytes([b"", b"a", b"b", b"ab", b" ", b"\xc3", b"\xa9", b"END"], [b"<s>"] + [b"?"] * 7, False)


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(-float(token), pack_tokens([token]), (-float(token),))


@given(
    st.lists(st.lists(st.integers(0, 7), max_size=4), max_size=6),
    st.lists(st.sampled_from(["a", "ba", "é", " END", "bb"]), max_size=3, unique=True),
)
def test_entries_cover_exactly_the_text_that_goes_out(pieces: list[list[int]], stops: list[str]) -> None:
    output = Output(TOKENS, stops)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas.append(output.push(piece, [logprob(token) for token in piece]))
        output.validate()
        if deltas[-1].stopped:
            break
    else:
        deltas.append(output.finish())
    output.validate()
    text = "".join(delta.text for delta in deltas)
    entries = [entry for delta in deltas for entry in delta.entries]
    ids = [token for piece in pieces for token in piece]
    assert [entry.logprob for entry in entries] == [-float(token) for token in ids[: len(entries)]]
    if deltas[-1].stopped:
        assert all(entry.text_offset < len(text) for entry in entries)
    else:
        assert len(entries) == len(ids) == output.counted
    sent = 0
    for delta in deltas:
        sent += len(delta.text)
        assert all(entry.text_offset < sent or delta is deltas[-1] for entry in delta.entries)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    output = Output(TOKENS, ["END"])
    delta = output.push([1, 7, 2, 2])
    assert delta == Delta("a", (), True)
    assert output.counted == 2


@pytest.mark.parametrize(
    ("least", "include", "tokens", "text", "stopped"),
    [
        (0, False, [1, 0, 2], "a", True),
        (0, True, [1, 0, 2], "a<s>", True),
        (0, False, [1, 5, 0], "a\ufffd", True),  # a character without its rest
        (2, False, [1, 0, 2], "ab", False),
    ],
)
def test_a_special_token_may_be_a_stop_string(
    least: int, include: bool, tokens: list[int], text: str, stopped: bool
) -> None:
    output = Output(TOKENS, ["<s>"], min_tokens=least, include_stop=include, special_stops={0: "<s>"})
    delta = output.push(tokens)
    assert (delta.text, delta.stopped, output.stop_string) == (text, stopped, "<s>" if stopped else "")


def test_what_was_held_back_comes_at_the_end() -> None:
    output = Output(TOKENS, ["END"])
    assert output.push([1, 5]).text == "a"
    assert output.finish().text == "�"
    with_begun_stop = Output(TOKENS, ["ab!"])
    assert with_begun_stop.push([3]).text == ""
    assert with_begun_stop.finish().text == "ab"


def test_minus_infinity_becomes_a_number_that_json_can_write() -> None:
    output = Output(TOKENS, [])
    delta = output.push([1], [TokenLogprob(float("-inf"), pack_tokens([2]), (float("-inf"),))])
    [entry] = delta.entries
    assert (entry.logprob, entry.top[0].logprob) == (-9999.0, -9999.0)


def test_a_stop_string_that_is_complete_within_the_least_tokens_is_text() -> None:
    output = Output(TOKENS, ["b"], min_tokens=2)
    assert output.push([3]) == Delta("ab")
    assert output.push([2]) == Delta("b")
    assert output.push([1, 2, 1]) == Delta("a", stopped=True)
    assert output.counted == 4


def test_a_stop_string_may_begin_within_the_least_tokens() -> None:
    output = Output(TOKENS, ["ab"], min_tokens=2)
    assert output.push([3, 1]) == Delta("ab")
    assert output.push([2]) == Delta("", stopped=True)


def test_what_ended_the_output_stays_where_it_is_asked_for() -> None:
    assert Output(TOKENS, ["b"], include_stop=True).push([1, 3, 1]) == Delta("aab", stopped=True)
    for include, token, text in ((True, 7, "END"), (True, 0, ""), (False, 7, "")):
        assert Output(TOKENS, [], include_stop=include).finish(stop_token=token) == Delta(text)
    shown = TokenBytes([b"<s>", *TOKENS.table[1:]], TOKENS.names, False)
    assert Output(shown, ["x"], include_stop=True).finish(stop_token=0) == Delta("<s>")


def test_the_token_that_ended_the_output_has_an_entry_where_it_is_rated() -> None:
    output = Output(TOKENS, [], rates_stop=True, begins_at=5)
    output.push([1], [logprob(1)])
    delta = output.finish(stop_token=0, stop_logprob=logprob(0))
    assert (delta.text, [(one.token, one.text_offset) for one in delta.entries]) == ("", [(TOKENS.names[0], 6)])
    assert Output(TOKENS, []).finish(stop_token=0, stop_logprob=logprob(0)) == Delta("")
    stopped = Output(TOKENS, ["END"], rates_stop=True, include_stop=True)
    stopped.push([1], [logprob(1)])
    assert len(stopped.finish(stop_token=7, stop_logprob=logprob(7)).entries) == 1


def test_every_token_is_named_once_also_where_its_text_waits() -> None:
    output = Output(TOKENS, ["END!"], with_ids=True)
    assert output.push([1, 7]) == Delta("a", token_ids=(1, 7))
    assert output.push([0]) == Delta("", token_ids=(0,))
    assert output.finish(stop_token=4) == Delta("END", token_ids=(4,))
    stopped = Output(TOKENS, ["END"], with_ids=True)
    assert stopped.push([1, 7, 2]) == Delta("a", stopped=True, token_ids=(1, 7))
    plain = Output(TOKENS, [], with_ids=True)
    assert plain.push([1, 7]) == Delta("aEND", token_ids=(1, 7))
    assert plain.push([1], [logprob(1)]).token_ids == (1,)


# --- an answer that continues a text

TOKENIZERS = {
    "byte level": BYTE_LEVEL,
    "prepend": sentencepiece("prepend"),
    "first": sentencepiece("first"),
    "always": sentencepiece("always"),
    "none": sentencepiece("none"),
    "metaspace": sentencepiece("metaspace"),
}
TABLES = {name: read_token_bytes(parse_tokenizer_json(each.to_str().encode())) for name, each in TOKENIZERS.items()}
PIECES = st.lists(
    st.one_of(
        st.text(st.sampled_from("Hello world水é👪 \n"), max_size=8),
        st.sampled_from(["\0<s>", "\0</s>", "\0▁world", "\0▁", "\0<call>", "\0an added token"]),
    ),
    max_size=6,
)
"""Texts, whose characters are tokens or their bytes, and after a \0 tokens by name."""


def ids_of(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        if not piece.startswith("\0"):
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
        elif (token := tokenizer.token_to_id(piece[1:])) is not None:
            ids.append(token)
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(PIECES, st.data(), st.booleans())
def test_prompt_and_answer_read_as_the_tokenizer_decodes_both(
    name: str, pieces: list[str], data: st.DataObject, special: bool
) -> None:
    tokenizer, tokens = TOKENIZERS[name], TABLES[name]
    if special:
        tokens = TokenBytes(tokens.names, tokens.names, tokens.strip_first_space)
    ids = ids_of(tokenizer, pieces)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, answer = ids[:cut], ids[cut:]
    before = Detokenizer(tokens).push(prompt)
    whole = tokenizer.decode(ids, skip_special_tokens=not special)
    stop = data.draw(st.sampled_from(["", "o w", "水é", " world"]))
    output = Output(tokens, [stop] if stop else [], begins_at=len(before), before=tokens.end_of(pack_tokens(prompt)))
    one_by_one, stopped = "", False
    entries: list[LogprobEntry] = []
    for token in answer:
        delta = output.push([token], [logprob(token)])
        one_by_one += delta.text
        entries += delta.entries
        if stopped := delta.stopped:
            break
    if not stopped:
        last = output.finish()
        one_by_one += last.text
        entries += last.entries
    expected = whole[len(before) :]
    assert whole.startswith(before)
    assert one_by_one == (expected[: expected.find(stop)] if stop and stop in expected else expected)
    assert stopped == bool(stop and stop in expected)
    for at, entry in enumerate(entries):  # each is where the text before it ends
        assert entry.text_offset == len(Detokenizer(tokens).push([*prompt, *answer[:at]]))
    if not stopped:
        plain = Output(tokens, (), before=tokens.end_of(pack_tokens(prompt)))
        assert plain.push(answer).text + plain.finish().text == expected


@pytest.mark.parametrize("name", ["prepend", "first", "always", "metaspace"])
def test_names_of_tokens_add_up_to_the_text_of_an_answer_that_begins_one(name: str) -> None:
    tokens, world = TABLES[name], TOKENIZERS[name].token_to_id("▁world")
    assert world is not None
    output = Output(tokens, ())
    delta = output.push([world, world], [logprob(world)] * 2)
    assert delta.text == "world world"
    assert [entry.token for entry in delta.entries] == [b"world", b" world"]
    assert [top.token for entry in delta.entries for top in entry.top] == [b"world", b" world"]


def test_the_end_of_a_prompt_is_looked_for_in_a_bounded_number_of_tokens() -> None:
    tokens, space = TABLES["prepend"], FIRST_BYTE + 32
    assert tokens.end_of(pack_tokens([FIRST_BYTE + 228, *[1] * (END_LIMIT_TOKENS - 1)])) == b"\xe4"
    assert tokens.end_of(pack_tokens([FIRST_BYTE + 228, *[1] * END_LIMIT_TOKENS])) == b""
    assert tokens.end_of(pack_tokens([space] * 4 + [1 << 20])) == b"   "


TEXT = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads character by character; the first stop string that is complete cuts, the longest of several."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(st.lists(TEXT, max_size=6), STOPS)
def test_the_text_is_cut_as_if_it_had_come_at_once(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    got = ""
    for piece in pieces:
        got += scanner.push(piece)
        scanner.validate()
    got += scanner.finish()
    scanner.validate()
    assert (got, scanner.stopped) == naive("".join(pieces), stops)


@given(st.lists(TEXT, max_size=6), STOPS)
def test_only_what_could_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    text = got = ""
    for piece in pieces:
        text += piece
        got += scanner.push(piece)
        if scanner.stopped:
            return
        held = text[len(got) :]
        longer = [text[at:] for at in range(len(got))]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(suffix) for stop in stops for suffix in longer)


def test_nothing_passes_after_a_stop_string() -> None:
    scanner = StopScanner(["."])
    assert scanner.push("one. two") == "one"
    assert scanner.push("three") == ""
    assert scanner.finish() == ""


@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=8), STOPS)
def test_a_stop_string_counts_only_where_its_last_character_may_stop(
    pieces: list[tuple[str, bool]], stops: list[str]
) -> None:
    scanner, got = StopScanner(stops), ""
    for piece, may_stop in pieces:
        got += scanner.push(piece, may_stop=may_stop)
        scanner.validate()
    got += scanner.finish()
    text = "".join(piece for piece, _ in pieces)
    allowed = [may_stop for piece, may_stop in pieces for _ in piece]
    ends = [end for end in range(1, len(text) + 1) if allowed[end - 1] and text[:end].endswith(tuple(stops))]
    longest = max((len(stop) for stop in stops if ends and text[: ends[0]].endswith(stop)), default=0)
    assert (got, scanner.stopped) == (text[: ends[0] - longest] if ends else text, bool(ends))


@given(st.lists(TEXT, max_size=6), STOPS)
def test_the_stop_string_stays_where_it_is_asked_for(pieces: list[str], stops: list[str]) -> None:
    without, scanner = StopScanner(stops), StopScanner(stops, include=True)
    cut = "".join(map(without.push, pieces)) + without.finish()
    assert "".join(map(scanner.push, pieces)) + scanner.finish() == cut + without.found
    assert scanner.found == without.found


TEXTS = [b"", b"Hal", b"lo", "ä".encode()[:1], "ä".encode()[1:], b"!"]
PROMPT_TOKENS = TokenBytes(TEXTS, [b"<s>", *TEXTS[1:]], strip_first_space=False)
PROMPT = [0, 1, 2, 3, 4, 5]


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_offsets_count_characters_and_special_tokens_have_none() -> None:
    entries = PromptEntries(PROMPT_TOKENS, pack_tokens(PROMPT), "Halloä!")
    found = [
        entries.opening(),
        *entries.push(PromptLogprobs(1, floats(-1, -2))),
        *entries.push(PromptLogprobs(3, floats(-3, -4, -5))),
    ]
    assert [one.token for one in found] == [b"<s>", *TEXTS[1:]]
    assert [one.text_offset for one in found] == [0, 0, 3, 5, 5, 6]
    assert [one.logprob for one in found[1:]] == [-1, -2, -3, -4, -5]
    assert [one.opens_prompt for one in found] == [True, *[False] * 5]


def test_the_likeliest_tokens_are_named() -> None:
    entries = PromptEntries(PROMPT_TOKENS, pack_tokens([1, 2]), "Hallo")
    entries.opening()
    [one] = entries.push(PromptLogprobs(1, floats(-3), pack_tokens([5, 2]), floats(-0.5, -3)))
    assert [(top.token, top.logprob) for top in one.top] == [(b"!", -0.5), (b"lo", -3.0)]


def test_offsets_never_pass_the_text() -> None:
    entries = PromptEntries(PROMPT_TOKENS, pack_tokens([1, 2, 5]), "Hall")
    entries.opening()
    assert [one.text_offset for one in entries.push(PromptLogprobs(1, floats(-1, -2)))] == [3, 4]


def test_a_special_token_has_characters_where_the_text_has_it() -> None:
    entries = PromptEntries(PROMPT_TOKENS, pack_tokens([0, 1, 0, 2]), "Hal<s>lo")
    found = [entries.opening(), *entries.push(PromptLogprobs(1, floats(-1, -2, -3)))]
    assert [one.text_offset for one in found] == [0, 0, 3, 6]


def test_the_space_that_a_text_drops_is_in_no_name() -> None:
    spaced = TokenBytes([b"", b" Hello"], [b"<s>", b" Hello"], strip_first_space=True)
    entries = PromptEntries(spaced, pack_tokens([0, 1, 1]), "Hello Hello")
    given = PromptLogprobs(1, floats(-1, -2), pack_tokens([1, 1]), floats(-1, -2))
    found = [entries.opening(), *entries.push(given)]
    assert [one.token for one in found] == [b"<s>", b"Hello", b" Hello"]
    assert [top.token for one in found for top in one.top] == [b"Hello", b" Hello"]
    assert [one.text_offset for one in found] == [0, 0, 5]
