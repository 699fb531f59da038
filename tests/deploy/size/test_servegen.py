"""Requests from ServeGen's files of clients; those of the tests are made here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import msgspec
import pytest

from deploy.local.size import files
from deploy.local.size.files import read_trace
from deploy.local.size.servegen import LAST_S, ServeGenClient, drawn_requests
from shared.errors import ConfigError

QUIET = "0,0,0,,0,0\n"
LENGTHS = {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{7: 1.0}"}
LATER = {"input_tokens": "{1000: 1.0}", "output_tokens": "{70: 1.0}"}
EMPTY = {"input_tokens": "{}", "output_tokens": "{}"}


def window(begin_s: float, rate: float, kind: str = "Gamma", shape: float = 1.0) -> str:
    return f"{begin_s:g},{rate},1.0,{kind},{shape},5.0\n"


def client(trace: str, lengths: dict[int, dict[str, str]] | None = None, name: str = "chunk-1") -> ServeGenClient:
    return ServeGenClient(trace.encode(), msgspec.json.encode(lengths or {0: LENGTHS}), name)


def times_s(trace: str) -> list[float]:
    return [at_s for at_s, _ in client(trace).arrivals()]


@pytest.mark.parametrize(
    ("kind", "shape", "variation"), [("Gamma", 0.25, 2.0), ("Gamma", 4.0, 0.5), ("Weibull", 1.0, 1.0)]
)
def test_gaps_have_the_rate_of_their_window_in_the_mean_and_its_burstiness(
    kind: str, shape: float, variation: float
) -> None:
    found = times_s(window(0, 50, kind, shape))
    assert len(found) == pytest.approx(50 * LAST_S, rel=0.05)
    gaps = [after - before for before, after in pairwise(found)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.1)


def test_rates_hold_in_their_windows_and_a_gap_reaches_over_quiet_ones() -> None:
    found = times_s(window(0, 2) + window(600, 20) + "1200,0,0,,0,0\n" + window(1800, 2))
    counts = [sum(begin <= at_s < begin + 600 for at_s in found) for begin in (0, 600, 1200, 1800)]
    assert counts[2] == 0
    assert [counts[0], counts[1], counts[3]] == [
        pytest.approx(1200, rel=0.1),
        pytest.approx(12_000, rel=0.1),
        pytest.approx(1200, rel=0.1),
    ]
    rare = "".join(window(600 * number, 0.0005) for number in range(4000))
    assert len(times_s(rare)) == pytest.approx(1200, rel=0.1), "the rate is below one request a window"
    assert times_s(QUIET) == []


def test_all_clients_come_in_order_of_time_with_lengths_of_their_time() -> None:
    both = [
        client(window(0, 1) + window(600, 1), {0: EMPTY, 300: LENGTHS, 600: LATER}, "chunk-1"),
        client(window(0, 1), {300: LATER}, "chunk-2"),
    ]
    traffic = drawn_requests(both, "DIR", 10_000)
    times = [row.timestamp for row in traffic.rows]
    assert times == sorted(times)
    early = [row for row in traffic.rows if row.timestamp < 600_000]
    assert {(row.input_length, row.output_length) for row in early} == {(100, 7), (300, 7), (1000, 70)}
    assert {row.input_length for row in traffic.rows if row.timestamp >= 600_000} == {1000}
    assert mean(row.input_length == 300 for row in early if row.input_length < 1000) == pytest.approx(0.5, abs=0.1)
    names = [name for row in traffic.rows for name in row.hash_ids]
    assert len(names) == len(set(names)), "no two prompts have a beginning in common"


def test_the_same_files_give_the_same_requests_wherever_they_are() -> None:
    one, two = (drawn_requests([client(window(0, 1), name=name)], "DIR", 100) for name in ("a/chunk-1", "b/chunk-1"))
    assert one == two


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("0,1.0,1.0,Gamma,1.0\n", "chunk-1-trace.csv:1: expected second,rate,cv,pattern,shape,scale"),
        (QUIET + "600,x,0,,0,0\n", "chunk-1-trace.csv:2: expected second,rate,cv,pattern,shape,scale"),
        (window(0, 1, "Pareto"), "chunk-1-trace.csv:1: 1 requests a second of the pattern Pareto with the shape 1.0"),
        (window(0, -1), "chunk-1-trace.csv:1: -1 requests a second"),
        (window(0, float("nan")), "chunk-1-trace.csv:1: nan requests a second"),
        (
            window(0, 1, "Weibull", 0.0),
            "chunk-1-trace.csv:1: 1 requests a second of the pattern Weibull with the shape 0.0",
        ),
        (window(600, 1) + window(0, 1), "chunk-1-trace.csv:2: time goes back, to 0 s"),
    ],
)
def test_a_line_that_is_not_a_window_is_named(trace: str, said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        client(trace)
    assert str(wrong.value).startswith(said)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("{100: 0.5, 300: 0.", "expected {tokens: share, …}: "),
        ("{-5: 1.0}", "a length of -5 tokens is out of range"),
        ("{99999999999: 1.0}", "a length of 99999999999 tokens is out of range"),
        ("{100: -0.5, 300: 1.5}", "shares are at least 0 and make 1, these 1"),
        ("{100: 0.5}", "shares are at least 0 and make 1, these 0.5"),
    ],
)
def test_a_histogram_that_is_none_is_named_with_its_file_and_time(prompts: str, said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        drawn_requests([client(window(0, 1), {0: {**LENGTHS, "input_tokens": prompts}})], "DIR", 10)
    assert str(wrong.value).startswith(f"chunk-1-dataset.json: 0: input_tokens: {said}")


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (b'{"0": {', "chunk-1-dataset.json: Input data was truncated"),
        (b'{"0": {"text_tokens": "{1: 1.0}"}}', "chunk-1-dataset.json: 0: no input_tokens and output_tokens; images"),
        (b"{}", "chunk-1-dataset.json: no lengths, and chunk-1-trace.csv has requests"),
    ],
)
def test_a_dataset_without_lengths_is_named(dataset: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        drawn_requests([ServeGenClient(window(0, 1).encode(), dataset, "chunk-1")], "DIR", 10)
    assert str(wrong.value).startswith(said)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 20):
        (tmp_path / f"chunk-{number}-trace.csv").write_text(window(0, number), encoding="utf-8")
        (tmp_path / f"chunk-{number}-dataset.json").write_bytes(msgspec.json.encode({0: LENGTHS}))
    return tmp_path


def test_a_directory_is_a_trace_of_all_its_clients(folder: Path) -> None:
    traffic = read_trace(folder, 500)
    assert len(traffic.rows) == 500
    assert traffic.rate == pytest.approx(21, rel=0.2)


def test_directories_without_clients_or_with_too_much_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(read: Callable[[], object]) -> str:
        with pytest.raises(ConfigError) as wrong:
            read()
        return str(wrong.value)

    (empty := folder / "empty").mkdir()
    assert refusal(lambda: read_trace(empty, 10)).startswith(
        f"--trace {empty}: a directory has 1 to 4096 clients of ServeGen"
    )
    monkeypatch.setattr(files, "TRACE_LIMIT_BYTES", 150)
    assert refusal(lambda: read_trace(folder, 10)).endswith("chunk-20-dataset.json: larger than 56 bytes")
    (folder / "chunk-1-dataset.json").unlink()
    assert refusal(lambda: read_trace(folder, 10)).endswith("chunk-1-dataset.json: No such file or directory")
    monkeypatch.setattr(files, "CLIENTS_LIMIT", 1)
    assert refusal(lambda: read_trace(folder, 10)).endswith("this one has 2")
