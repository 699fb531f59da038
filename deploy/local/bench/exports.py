"""Reads what other load generators export, and our own files, as rows of one kind. Pure.

    headrace bench   PREFIX.json
    AIPerf           profile_export_aiperf.json    one load a file
    GuideLLM         benchmarks.json

Both others' times between tokens are means of each request, as our `time_per_token_s` is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from deploy.local.bench.rows import BenchRow
from deploy.local.bench.terms import Spread
from shared.errors import ConfigError


class ReadBench(Struct, frozen=True):
    """The rows of a file, and what they depend on."""

    rows: Sequence[BenchRow]
    machine: str = ""
    commit: str = ""
    model: str = ""


def read_bench(text: bytes, name: str) -> ReadBench:
    """Return the rows of a file. Raise ConfigError if it is of no known kind, or has none."""
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        if "request_throughput" in found:
            read = ReadBench([_aiperf_row(found)])
        elif "benchmarks" in found:
            read = ReadBench([_guidellm_row(each) for each in found["benchmarks"]])
        else:
            read = msgspec.convert(found, ReadBench)
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as wrong:  # msgspec's are ValueErrors
        raise ConfigError(f"{name}: is no export of `headrace bench`, AIPerf or GuideLLM: {wrong}") from None
    if not read.rows:
        raise ConfigError(f"{name}: has no measured load")
    return read


def differences(files: Mapping[str, ReadBench]) -> list[str]:
    """Return a note for each thing in which the environments of files differ."""
    found: list[str] = []
    for what in ("machine", "commit", "model"):
        said = {name: getattr(file, what) for name, file in files.items() if getattr(file, what)}
        if len(set(said.values())) > 1:
            found.append(f"note: files differ in {what}: " + "; ".join(f"{name}: {one}" for name, one in said.items()))
    return found


def _aiperf_row(found: Mapping[str, Any]) -> BenchRow:
    """Return the row of a file of AIPerf 0.13; each metric is an object with its unit."""

    def mean(metric: str) -> float:
        return float(found.get(metric, {}).get("avg") or 0.0)

    def spread(metric: str) -> Spread:
        said = found.get(metric, {})
        factor = 0.001 if said.get("unit") == "ms" else 1.0
        return _spread(said, factor)

    phases = found.get("input_config", {}).get("phases", [])
    phase: Mapping[str, Any] = next((one for one in reversed(phases) if one.get("kind") != "warmup"), {})
    return _row(
        rate=phase.get("rate"),
        slots=phase.get("concurrency"),
        done=int(mean("request_count")),
        failed=int(mean("error_request_count")),
        seconds=mean("benchmark_duration"),
        first_token_s=spread("time_to_first_token"),
        inter_token_s=spread("inter_token_latency"),
        whole_s=spread("request_latency"),
        requests_per_s=mean("request_throughput"),
        tokens_per_s=mean("output_token_throughput"),
        prompt_tokens=mean("input_sequence_length") or None,
    )


def _guidellm_row(found: Mapping[str, Any]) -> BenchRow:
    """Return the row of one benchmark in a file of GuideLLM 0.8."""
    strategy, metrics = found["config"]["strategy"], found["metrics"]

    def mean(metric: str) -> float:
        return float(metrics[metric]["successful"]["mean"])

    def spread(metric: str, factor: float) -> Spread:
        said = metrics[metric]["successful"]
        return _spread({**said["percentiles"], "max": said["max"]}, factor)

    return _row(
        rate=strategy.get("rate"),
        slots=strategy.get("streams"),
        done=metrics["request_totals"]["successful"],
        failed=metrics["request_totals"]["errored"],
        seconds=float(found["duration"]),
        first_token_s=spread("time_to_first_token_ms", 0.001),
        inter_token_s=spread("inter_token_latency_ms", 0.001),
        whole_s=spread("request_latency", 1.0),
        requests_per_s=mean("requests_per_second"),
        tokens_per_s=mean("output_tokens_per_second"),
        prompt_tokens=mean("prompt_token_count"),
    )


def _spread(said: Mapping[str, Any], factor: float) -> Spread:
    return Spread(
        *(None if said.get(share) is None else factor * said[share] for share in ("p50", "p90", "p99", "max"))
    )


def _row(*, rate: float | None, slots: int | None, done: int, failed: int, **fields: Any) -> BenchRow:
    row = BenchRow(
        **fields,
        load="concurrency" if rate is None else "rate",
        value=float((slots or 1) if rate is None else rate),
        requests=done + failed,
        outcomes={name: number for name, number in (("done", done), ("failed", failed)) if number},
        reasons={},
        time_per_token_s=fields["inter_token_s"],
        tokens_by="usage",
        driver_cpu=0.0,
        complete=True,
    )
    return msgspec.convert(msgspec.to_builtins(row), BenchRow)  # numbers that are none are refused
