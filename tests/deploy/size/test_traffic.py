"""Loads of a plan: traces that are read, and requests that are drawn."""

from __future__ import annotations

import json

import pytest

from deploy.local.size.traffic import Lengths, drawn_traffic, read_traffic
from shared.errors import ConfigError

LENGTHS = Lengths(rate=5.0, requests=2000, prompt=1000, output=100, spread=0.5, shared=128, seed=1)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


def line(at_ms: float, prompt: int = 1000, output: int = 5, **changes: object) -> str:
    row = {
        "timestamp": at_ms,
        "input_length": prompt,
        "output_length": output,
        "hash_ids": list(range(-(-prompt // 512))),
    }
    return json.dumps({**row, **changes})


def test_requests_that_are_drawn_have_the_rate_and_the_lengths_that_were_asked_for() -> None:
    made = drawn_traffic(LENGTHS)
    assert made == drawn_traffic(LENGTHS)
    assert made.rate == pytest.approx(5.0, rel=0.1)
    assert sum(row.input_length for row in made.rows) / 2000 == pytest.approx(1000, rel=0.05)
    assert sum(row.output_length for row in made.rows) / 2000 == pytest.approx(100, rel=0.05)
    assert all(len(row.hash_ids) == -(-row.input_length // made.block_size) for row in made.rows)
    first = {tuple(row.hash_ids[:2]) for row in made.rows}
    assert len(first) == 1
    assert len({row.hash_ids[2] for row in made.rows if len(row.hash_ids) > 2}) > 1900


def test_time_is_stretched_to_another_rate() -> None:
    assert drawn_traffic(LENGTHS).stretched(2.5).rate == pytest.approx(2.5)


def test_a_trace_of_mooncake_is_read_up_to_a_number_of_requests() -> None:
    made = read_traffic("\n".join(line(1000 * number) for number in range(10)), "t", 4)
    assert len(made.rows) == 4
    assert (made.block_size, made.rate) == (512, 1.0)


def test_a_trace_of_azure_is_read_and_shares_nothing() -> None:
    made = read_traffic(AZURE, "t", 100)
    assert [row.input_length for row in made.rows] == [374, 396]
    assert made.rows[1].timestamp == pytest.approx(4314.579)
    assert not set(made.rows[0].hash_ids) & set(made.rows[1].hash_ids)


def test_times_with_and_without_an_offset_or_a_fraction_are_of_one_clock() -> None:
    made = read_traffic(AZURE + "2023-11-16 18:15:51+00:00,5,1\n2023-11-16 19:15:52.5+01:00,5,1\n", "t", 100)
    assert [round(row.timestamp) for row in made.rows] == [0, 4315, 4319, 5819]


def log_line(second: int, seconds: float, prompt: int, output: int, message: str = "request ended") -> str:
    fields = {"operation": "chat", "status": 200, "seconds": seconds, "prompt_tokens": prompt, "output_tokens": output}
    line = {"time": f"2026-11-24T04:09:{second:02}.500Z", "level": "info", "message": message, "fields": fields}
    return json.dumps(line)


def test_a_log_of_a_frontend_is_read_in_the_order_in_which_requests_began() -> None:
    lines = [
        log_line(10, 1.0, 100, 20),
        log_line(11, 5.0, 300, 40),
        log_line(12, 0.5, 7, 0),  # refused, or an embedding
        log_line(13, 1.0, 9, 9, "the engine is lost"),
        '{"time":"2026-11-24T04:09:14.000Z","level":"info","message":"ready"}',
    ]
    made = read_traffic("\n".join(lines), "t", 100)
    assert [(row.input_length, row.output_length) for row in made.rows] == [(300, 40), (100, 20)]
    assert made.rows[1].timestamp - made.rows[0].timestamp == pytest.approx(3000)
    assert not set(made.rows[0].hash_ids) & set(made.rows[1].hash_ids)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t: a trace has at least two requests, this one 0"),
        (log_line(1, 1.0, 5, 5) + "\n" + log_line(2, 1.0, 5, 5)[:-9], "t:2: "),
        (log_line(1, 1.0, 5, 5), "t: a trace has at least two requests, this one 1"),
        (line(0) + "\n" + line(1)[:-5], "t:2: "),
        (line(0, more=[])[:-2] + "[" * 100_000, "t:1: maximum recursion depth"),
        (line(0, prompt=0), "t:1: 0 tokens in"),
        (line(0, output=-1), "t:1: 1000 tokens in and -1 out"),
        (line(5) + "\n" + line(4), "t:2: time goes back, from 5 to 4 ms"),
        (line(0, hash_ids=[1]), "t:1: 1 hash_ids for 1000 tokens, 2 blocks"),
        (line(0), "t: a trace has at least two requests, this one 1"),
        (line(0) + "\n" + line(0), "t: all 2 requests come at the same time"),
        (AZURE + "2023-11-16 18:15:51,x,1\n", "t:4: expected TIMESTAMP"),
        (AZURE + "2023-11-16 18:15:40,5,1\n", "t:4: time goes back"),
        (AZURE + '2023-11-16 18:15:51,"5,1\n' + "2023-11-16 18:15:52,5,1\n" * 9000, "t:4: expected TIMESTAMP"),
    ],
)
def test_a_torn_trace_is_refused_by_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_traffic(text, "t", 1000)
    assert str(refused.value).startswith(said)
