from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Delta, Output
from shared.hashing import pack_tokens
from shared.messages import TokenLogprob

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
