"""Files of other load generators: small ones that they wrote against simulated workers, without the parts not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.local.bench.exports import ReadBench, differences, read_bench
from deploy.local.bench.plan import Point
from deploy.local.bench.rows import Result, row_of
from deploy.local.cli import main
from shared.errors import ConfigError

SAMPLES = Path(__file__).parent
AIPERF, GUIDELLM = SAMPLES / "aiperf.json", SAMPLES / "guidellm.json"


GUIDE: dict[str, Any] = json.loads(GUIDELLM.read_bytes())["benchmarks"][0]
TORN = {**GUIDE, "metrics": {**GUIDE["metrics"], "request_totals": {"successful": "1", "errored": "2"}}}


def own(folder: Path, name: str, first_s: float, **changes: object) -> Path:
    result = Result("done", first_s=first_s, last_s=first_s, ended_s=first_s, events=1, prompt_tokens=10)
    row = msgspec.to_builtins(row_of(Point("closed", 4, 1), [result], 1.0, 0.1))
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"benchmark": "headrace bench", "machine": "m", "rows": [row], **changes}))
    return file


def test_files_of_bench_are_shown_next_to_each_other_with_their_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(own(tmp_path, "a", 0.2)), str(own(tmp_path, "b", 0.1, machine="other", commit="abc"))]
    assert main(["bench", "plot", *files, "--out", "ab.png"]) == 0
    out = capsys.readouterr().out
    ratio = next(line for line in out.splitlines() if "TTFT ms p50" in line)
    assert ratio.split()[-3:] == ["0.50", "0.50", "0.50"]
    assert "note: files differ in machine: " in out
    assert "differ in commit" not in out  # only one file says it
    assert (tmp_path / "ab.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "plot", files[0]]) == 0
    assert (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no export of"),
        ("[1]", "is no export of"),
        ("{}", "is no export of"),
        ('{"rows": []}', "has no measured load"),
        ('{"benchmarks": [{"metrics": 1}]}', "is no export of"),
        ('{"request_throughput": 5}', "is no export of"),
        ('{"request_throughput": {"avg": "a"}}', "is no export of"),
        ('{"request_throughput": {}, "request_count": {"avg": 1e400}}', "is no export of"),
        (json.dumps({"benchmarks": [TORN]}), "is no export of"),
        ('{"rows": ' + "[" * 100_000, "is no export of"),
    ],
)
def test_a_file_of_another_kind_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_bench(text.encode(), "x.json")
    assert str(refused.value).startswith("x.json: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_not_there_or_twice_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plot"]) == 2
    assert main(["bench", "plot", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory" in capsys.readouterr().err
    assert main(["bench", "plot", "a", "a"]) == 2
    assert "1 to 32 different files" in capsys.readouterr().err


def test_environments_that_agree_are_not_noted() -> None:
    assert differences({"a": ReadBench([], "m", "c"), "b": ReadBench([], "m", "c"), "x": ReadBench([])}) == []


def test_a_file_of_aiperf_is_one_load_in_our_units() -> None:
    """aiperf 0.13: --isl 64 --osl 16 --concurrency 4 --request-count 24 --warmup-request-count 2, simulated workers."""
    [row] = read_bench(AIPERF.read_bytes(), "aiperf.json").rows
    assert (row.load, row.value, row.outcomes, row.prompt_tokens) == ("concurrency", 4, {"done": 24}, 81)
    said = json.loads(AIPERF.read_text())
    assert row.first_token_s.p90 == pytest.approx(said["time_to_first_token"]["p90"] / 1000)
    assert row.inter_token_s.p50 == pytest.approx(said["inter_token_latency"]["p50"] / 1000)
    assert row.whole_s.max == pytest.approx(said["request_latency"]["max"] / 1000)
    assert row.tokens_per_s == said["output_token_throughput"]["avg"]
    assert row.tokens_per_s == pytest.approx(16 * row.requests_per_s)
    said["input_config"]["phases"][-1]["rate"] = 2.5
    [row] = read_bench(json.dumps(said).encode(), "aiperf.json").rows
    assert row.name == "rate 2.5"


def test_a_file_of_guidellm_has_a_load_for_each_benchmark() -> None:
    """guidellm 0.8.1: synthetic_text of 64 and 16 tokens, concurrent with 4 streams, 24 requests, simulated workers."""
    [row] = read_bench(GUIDELLM.read_bytes(), "guidellm.json").rows
    assert (row.load, row.value, row.outcomes) == ("concurrency", 4, {"done": 24})
    metrics = json.loads(GUIDELLM.read_text())["benchmarks"][0]["metrics"]
    first = metrics["time_to_first_token_ms"]["successful"]
    assert row.first_token_s.p99 == pytest.approx(first["percentiles"]["p99"] / 1000)
    assert row.first_token_s.max == pytest.approx(first["max"] / 1000)
    assert row.whole_s.p50 == metrics["request_latency"]["successful"]["percentiles"]["p50"]
    assert row.tokens_per_s == metrics["output_tokens_per_second"]["successful"]["mean"]
