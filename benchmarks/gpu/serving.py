"""Everything on one GPU: NATS, a frontend, a router, two workers and kvbm, asked over HTTP by 64 streams.

    python -m benchmarks.gpu.serving [--gpus 1] [--model DIRECTORY] [--memory TMPFS] [--tokenizer DIRECTORY] [--quick]
                                     [--json]

`stack` is what `headrace up --device cuda --workers 2` runs, each worker with half of the GPU's memory, over a closed
loop of 64 streams of 512 tokens in and 128 out (`benchmarks.sse_load`); no two prompts share anything, and every block
is stored in kvbm. `engines` are two engines at once in processes of their own with half of the load each. `engine` is
one with all of the load and all of the GPU. Both run without a network and without kvbm (`benchmarks.gpu.engine`) and
show the rate of the same runner by itself.

With --gpus 2, and no engines by themselves: one worker on one GPU with 64 streams, then two workers that have a GPU
each, with 64 streams and with 128, which is as much for each worker as before. Everything else is the same.

What could mislead: two processes that share a GPU take turns on it, so that two of anything are slower than one; the
load generator, the servers and the frontend have cores of the same machine. Weights are random, and so is the text:
answers end by their length alone. Streams of the stack are counted by their events, engines' by their tokens.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from benchmarks.gpu import part
from benchmarks.gpu.engine import INPUT_TOKENS, OUTPUT_TOKENS, StepTimes
from benchmarks.gpu.model import add_model, model_in
from benchmarks.report import ROOT
from benchmarks.serving_stacks import RunningStack, launched
from deploy.local.stack import servers
from deploy.local.stack.stack import BlockStoreOptions, Gpus, UpOptions
from services.worker.config import Device

NAME = "llama"
STREAMS = 64
WORKERS = 2
MEMORY_SHARE = 0.9
POOL_BYTES = 8 << 30
START_LIMIT_S = 240.0
LIMIT_S = 600.0
GREEDY: Mapping[str, float] = {"temperature": 0.0}
"""Sampling parameters of requests."""
WHOLE, HALVES = "one engine, no network", "two engines, no network"
STACK = "two workers, kvbm, HTTP"


class GpuServingRow(Struct, frozen=True):
    """The result of one closed loop."""

    what: str
    streams: int
    requests: int
    failed: int
    out_tok_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


class StreamLoad(Struct, frozen=True):
    """The part of the load generator's report that is read."""

    n: int
    elapsed_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    client_cpu_s: float
    cut: int
    errors: dict[str, int]


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("serving", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--device", choices=get_args(Device), default="cuda", help="cpu: to try this out")
    parser.add_argument("--pool-bytes", type=int, default=POOL_BYTES)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    add_model(parser)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure the engines, then the stack."""
    requests = flags.requests // 4 if flags.quick else flags.requests
    if flags.gpus > 1:
        return _spread(flags, requests)
    with model_in(flags) as model:
        whole = _engines(flags, model, 1, requests)
        halves = _engines(flags, model, WORKERS, requests)
        [stack], more = _stack(flags, model, STACK, WORKERS, [(STREAMS, requests)])
    figures = {
        "two workers, 64 streams: requests that failed": float(stack.failed),
        "two workers, 64 streams: output": stack.out_tok_s,
        "two engines without a network: output": halves.out_tok_s,
        "one engine without a network: output": whole.out_tok_s,
        "two workers: first token p50": stack.ttft_p50_ms,
        "two workers: first token p99": stack.ttft_p99_ms,
        "two workers: between tokens p50": stack.gap_p50_ms,
        "two workers: between tokens p99": stack.gap_p99_ms,
    }
    return part.PartReport(figures, [stack, halves, whole], more)


def _spread(flags: argparse.Namespace, requests: int) -> part.PartReport:
    """Measure one worker on one GPU, then two on two."""
    loads = [(STREAMS, requests), (2 * STREAMS, 2 * requests)]
    with model_in(flags) as model:
        [one], more_of_one = _stack(flags, model, "one worker, one GPU, kvbm, HTTP", 1, loads[:1])
        (same, twice), more = _stack(flags, model, "two workers, two GPUs, kvbm, HTTP", 2, loads)
    figures = {
        "one worker on one GPU, 64 streams: output": one.out_tok_s,
        "two workers on two GPUs, 64 streams: output": same.out_tok_s,
        "two workers on two GPUs, 128 streams: output": twice.out_tok_s,
        "the same, of one worker's with 64 streams": twice.out_tok_s / one.out_tok_s,
        "two workers, 64 streams: requests that failed": float(one.failed + same.failed + twice.failed),
    }
    yardsticks = {f"one worker: {name}": value for name, value in more_of_one.items()}
    return part.PartReport(figures, [one, same, twice], yardsticks | more)


def _engines(flags: argparse.Namespace, model: Path, count: int, requests: int) -> GpuServingRow:
    """Run `count` engines at once, which share streams and requests."""
    with engines(flags, model, count, MEMORY_SHARE / count) as children:
        return ask_engines(WHOLE if count == 1 else HALVES, children, STREAMS, requests)


@contextmanager
def engines(
    flags: argparse.Namespace, model: Path, count: int, memory_share: float, max_running: int = STREAMS
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `count` engines in processes of their own, each with this share of the GPU; yield them once all are ready
    for `ask_engines`."""
    command = [sys.executable, "-m", "benchmarks.gpu.engine", "--together", "--model", str(model)]
    command += ["--device", flags.device, "--memory-share", str(memory_share), "--max-running", str(max_running)]
    with ExitStack() as held:
        children: list[subprocess.Popen[str]] = []
        for _ in range(count):
            child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            children.append(held.enter_context(child))
            held.callback(child.kill)
        for child in children:
            _line(child)  # ready
        yield children


def ask_engines(what: str, children: Sequence[subprocess.Popen[str]], streams: int, requests: int) -> GpuServingRow:
    """Load the engines at once, each with its part of streams and requests; report the worst percentiles."""
    load = f"{streams // len(children)} {requests // len(children)}\n".encode()
    for child in children:
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # `_line` says that it has ended
            os.write(child.stdin.fileno(), load)
    spent = [msgspec.json.decode(_line(child), type=StepTimes) for child in children]
    tokens = sum(each.requests - each.failed for each in spent) * OUTPUT_TOKENS
    return GpuServingRow(
        what=what,
        streams=streams,
        requests=sum(each.requests for each in spent),
        failed=sum(each.failed for each in spent),
        out_tok_s=tokens / max(each.elapsed_s for each in spent),
        ttft_p50_ms=max(each.ttft_p50_ms for each in spent),
        ttft_p99_ms=max(each.ttft_p99_ms for each in spent),
        gap_p50_ms=max(each.gap_p50_ms for each in spent),
        gap_p99_ms=max(each.gap_p99_ms for each in spent),
    )


def _line(child: subprocess.Popen[str]) -> str:
    """Return the next line of an engine. Raises SystemExit after LIMIT_S, or if it has ended."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], LIMIT_S)
    if not ready:
        raise SystemExit(f"an engine printed nothing for {LIMIT_S:.0f} s")
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"an engine ended: status {child.wait(LIMIT_S)}")
    return line


def _stack(
    flags: argparse.Namespace, model: Path, what: str, workers: int, loads: Sequence[tuple[int, int]]
) -> tuple[list[GpuServingRow], dict[str, float]]:
    """Run the stack with `loads`, streams and requests of each; return a row for each, and what all of it spent and
    stored."""
    with stack_on_gpus(flags, model, Gpus(flags.gpus, MEMORY_SHARE), workers=workers) as running:
        ask_streams(running, model, streams=STREAMS, requests=STREAMS, seed=1)
        before = running.costs()
        loaded = [
            ask_streams(running, model, streams=streams, requests=requests, seed=seed)
            for seed, (streams, requests) in enumerate(loads, 2)
        ]
        spent = {f"cpu_s of {kind}": cost.cpu_s - before[kind].cpu_s for kind, cost in running.costs().items()}
        spent["cpu_s of the load generator"] = sum(load.client_cpu_s for load in loaded)
        spent["blocks saved in kvbm"] = _saved_blocks(running)
    return [stack_row(what, *load, found) for load, found in zip(loads, loaded, strict=True)], spent


@contextmanager
def stack_on_gpus(
    flags: argparse.Namespace, model: Path, gpus: Gpus, *, workers: int, worker: Mapping[str, str] | None = None
) -> Iterator[RunningStack]:
    """Run the stack with kvbm. `worker` are the environment's variables of workers."""
    with (
        tempfile.TemporaryDirectory(prefix="gpu-serving-", dir=flags.memory) as pool,
        tempfile.TemporaryDirectory(prefix="gpu-serving-") as directory,
    ):
        options = UpOptions(
            model=str(model),
            model_name=NAME,
            port=servers.free_ports(1)[0],
            workers=workers,
            discovery="file",
            gpus=gpus if flags.device == "cuda" else None,
            store=BlockStoreOptions(pool, flags.pool_bytes),
        )
        settings = {"router": {"HEADRACE_LOAD_RAMP_S": "0"}, "worker": dict(worker or {})}  # all workers are new
        with launched(options, Path(directory), settings, start_limit_s=START_LIMIT_S) as running:
            yield running


def load_figures(requests: int, load: StreamLoad) -> dict[str, Any]:
    """Return what rows have in common of a load whose answers have OUTPUT_TOKENS. *Pure.*"""
    return {
        "failed": requests - load.n + load.cut,
        "out_tok_s": (load.n - load.cut) * OUTPUT_TOKENS / load.elapsed_s,
        **{name: getattr(load, name) for name in ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")},
    }


def stack_row(what: str, streams: int, requests: int, load: StreamLoad) -> GpuServingRow:
    """Return the row of a load whose answers have OUTPUT_TOKENS. *Pure.*"""
    return GpuServingRow(what, streams, requests, **load_figures(requests, load))


def ask_streams(
    running: RunningStack,
    model: Path,
    *,
    streams: int,
    requests: int,
    input_tokens: int = INPUT_TOKENS,
    output_tokens: int = OUTPUT_TOKENS,
    sampling: Mapping[str, float] = GREEDY,
    seed: int,
) -> StreamLoad:
    """Ask the stack for `requests` answers in a closed loop of `streams`. Raises SystemExit if none ended well."""
    extra = {"ignore_eos": True, **sampling, "stream_options": {"include_usage": True}}
    asked = {
        "--port": running.port,
        "--model": NAME,
        "--tokenizer": model / "tokenizer.json",
        "-c": streams,
        "-n": requests,
        "--isl": input_tokens,
        "--osl": output_tokens,
        "--seed": seed,
        "--extra": msgspec.json.encode(extra).decode(),
    }
    words = [str(word) for pair in asked.items() for word in pair]
    command = [sys.executable, "-m", "benchmarks.sse_load", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    try:
        load = msgspec.json.decode(done.stdout, type=StreamLoad)
    except msgspec.DecodeError:  # it failed, or not one stream ended well and its figures are null
        raise SystemExit(f"the load generator: {done.stdout}{done.stderr[-2000:]}") from None
    if load.errors:
        print(f"the load generator: {load.errors}", file=sys.stderr)
    return load


def _saved_blocks(running: RunningStack) -> float:
    """Return the blocks that all workers saved, from their metrics."""
    saved = 0.0
    for name, url in running.observed.items():
        if name.startswith("worker"):
            with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
            own = [line for line in lines if line.startswith("headrace_kvbm_copied_blocks_total{")]
            saved += sum(float(line.rpartition(" ")[2]) for line in own if 'outcome="saved"' in line)
    return saved


if __name__ == "__main__":
    sys.exit(main())
