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
