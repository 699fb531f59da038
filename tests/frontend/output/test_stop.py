from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.output.stop import StopScanner

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
