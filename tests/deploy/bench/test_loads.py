from __future__ import annotations

from itertools import islice, pairwise
from statistics import mean, median

from hypothesis import given
from hypothesis import strategies as st

from deploy.local.bench.loads import (
    KEPT_PIECES,
    PIECE,
    SESSION_TURNS,
    TURN_OUTPUT,
    TURN_PROMPT,
    AskShape,
    LoadRequest,
    LoadSession,
    agent_sessions,
    drawn_asks,
    drawn_piece,
    prompt_text,
    prompt_tokens,
    trace_sessions,
)
from deploy.local.size.traffic import Traffic, TrafficRow


def drawn(shape: AskShape, number: int, load: str = "rate 1") -> list[LoadRequest]:
    return list(islice(drawn_asks(shape, (), 1, load), number))


@given(words=st.integers(1, 60), shared=st.integers(0, 60))
def test_made_up_prompts_have_their_length_and_share_their_opening_alone(words: int, shared: int) -> None:
    shared = min(shared, words)
    found = [prompt_text(ask).split() for ask in drawn(AskShape(words, 1, shared=shared), 3)]
    assert [len(prompt) for prompt in found] == [words] * 3
    assert len({tuple(prompt[:shared]) for prompt in found}) == 1
    if words - shared > 40:
        assert len({tuple(prompt) for prompt in found}) == 3


def test_given_prompts_come_in_turn_without_end() -> None:
    asks = drawn_asks(AskShape(512, 1), ["one", " two"], 0, "rate 1")
    assert [prompt_text(ask) for ask in islice(asks, 3)] == ["one", " two", "one"]


def test_two_loads_of_a_sweep_share_their_openings_and_no_whole_prompt() -> None:
    shape = AskShape(100, 1, shared=40)
    one, other = (prompt_text(drawn(shape, 1, load)[0]).split() for load in ("rate 1", "rate 2"))
    assert one[:40] == other[:40]
    assert one != other
    assert drawn(shape, 5) == drawn(shape, 5)


def test_a_shared_ratio_is_one_of_each_prompts_length_and_some_beginnings_are_drawn() -> None:
    asks = drawn(AskShape(1000, 100, spread=0.5, shared_ratio=0.9, beginnings=4), 400)
    lengths = [sum(length for _, length in ask.parts) for ask in asks]
    assert len(set(lengths)) > 200
    assert all(abs(ask.parts[0][1] - 0.9 * length) <= 1 for ask, length in zip(asks, lengths, strict=True))
    assert len({ask.parts[0][0] for ask in asks}) == 4
    mean = sum(lengths) / 400
    deviation = (sum((length - mean) ** 2 for length in lengths) / 400) ** 0.5
    assert 900 < mean < 1100
    assert 0.4 < deviation / mean < 0.6
    assert 90 < sum(ask.output for ask in asks) / 400 < 110


@given(st.integers(0, 50), st.integers(0, 50))
def test_of_one_name_a_shorter_part_is_the_beginning_of_a_longer_one(one: int, other: int) -> None:
    short, long = (LoadRequest((("a", length),), 1) for length in sorted((one, other)))
    ids = range(300, 900)
    assert prompt_tokens(long, ids)[: min(one, other)] == prompt_tokens(short, ids)
    assert prompt_text(long).split()[: min(one, other)] == prompt_text(short).split()


def test_equal_names_of_a_trace_are_equal_beginnings_at_its_times() -> None:
    rows = [
        TrafficRow(1000.0, 1000, 5, [7, 8]),
        TrafficRow(3000.0, 1500, 0, [7, 8, 9]),
        TrafficRow(3000.0, 500, 1, [3]),
    ]
    sessions = list(trace_sessions(Traffic(512, rows), 4.0, "0 one"))
    assert [session.at_s for session in sessions] == [0.0, 0.5, 0.5]
    asks = [session.turns[0].ask for session in sessions]
    assert [ask.output for ask in asks] == [5, 1, 1]
    first, second, third = (prompt_tokens(ask, range(300, 900)) for ask in asks)
    assert [len(first), len(second), len(third)] == [1000, 1500, 500]
    assert second[:1000] == first
    assert third[:16] != first[:16]
    again = next(trace_sessions(Traffic(512, rows), 4.0, "1 one")).turns[0].ask
    assert prompt_tokens(again, range(300, 900))[:16] != first[:16], "another round finds nothing of this one"


def length(ask: LoadRequest) -> int:
    return sum(part for _, part in ask.parts)


def test_sessions_of_agents_are_as_published() -> None:
    sessions = agent_sessions([float(number) for number in range(400)], 1.0, 1.0, 0, "one")
    assert sessions == agent_sessions([float(number) for number in range(400)], 1.0, 1.0, 0, "one")
    assert abs(median(len(session.turns) for session in sessions) - SESSION_TURNS) <= 5
    assert 0.36 < mean(any(turn.awaited for turn in session.turns) for session in sessions) < 0.52
    middle = [session.turns[len(session.turns) // 2].ask for session in sessions if 38 < len(session.turns) < 48]
    assert 0.85 < mean(length(ask) for ask in middle) / TURN_PROMPT < 1.15
    asks = [turn.ask for session in sessions for turn in session.turns]
    assert 0.85 < mean(length(ask) for ask in asks) / TURN_PROMPT < 1.15
    assert 0.95 < mean(ask.output for ask in asks) / TURN_OUTPUT < 1.05
    known = new = 0
    for session in sessions:
        for before, turn in pairwise(session.turns):
            shared = sum(size for _, size in before.ask.parts if turn.ask.parts[:2] == before.ask.parts[:2])
            known += shared or before.ask.parts[0][1]
            new += length(turn.ask) - (shared or before.ask.parts[0][1])
    assert known / (known + new) > 0.95


def test_a_turn_has_the_prompt_before_it_as_its_beginning_and_subagents_are_sessions_too() -> None:
    sessions = agent_sessions([0.0] * 50, 0.01, 10.0, 0, "one")
    inner = [each for session in sessions for turn in session.turns for each in turn.awaited]
    assert inner
    for session in [*sessions, *inner]:
        assert session.turns[0].pause_s == 0
        assert [turn.ask.turn for turn in session.turns] == list(range(1, len(session.turns) + 1))
        for before, turn in pairwise(session.turns):
            assert turn.ask.parts[:-1] in (before.ask.parts, before.ask.parts[:1])
            assert turn.pause_s > 0
    names = [part for session in [*sessions, *inner] for part in session.turns[-1].ask.parts]
    own = [name for name, _ in names if "system" not in name]
    assert len(own) == len(set(own))
    assert {name for name, _ in names if "system" in name} == {"system 0", "subagents' system 0"}
    assert max(length(turn.ask) for session in sessions for turn in session.turns) < 0.025 * TURN_PROMPT
    assert sum(session.requests for session in sessions) == sum(len(each.turns) for each in [*sessions, *inner])


def test_two_loads_of_agents_share_their_system_prompts_alone() -> None:
    one, other = (
        {part for turn in agent_sessions([0.0], 0.01, 1.0, 0, load)[0].turns for part in turn.ask.parts}
        for load in ("concurrency 1", "concurrency 8")
    )
    assert len(one) == len(other) > 1
    assert {name for name, _ in one & other} == {"system 0"}


def test_pieces_that_are_kept_are_bounded_however_long_a_prompt_is() -> None:
    drawn_piece.cache_clear()
    first = prompt_tokens(LoadRequest((("long", 3 * PIECE + 5),), 1), range(300, 900))
    assert len(first) == 3 * PIECE + 5
    assert first[:PIECE] != first[PIECE : 2 * PIECE]
    assert drawn_piece.cache_info().currsize == 4
    assert drawn_piece.cache_info().maxsize == KEPT_PIECES


def test_a_session_counts_the_requests_of_its_subagents() -> None:
    [session] = agent_sessions([3.0], 0.01, 1.0, 3, "one")
    assert isinstance(session, LoadSession)
    assert session.at_s == 3.0
    assert session.requests >= len(session.turns)
