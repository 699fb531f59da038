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
