"""vLLM on GPUs: `vllm serve`, Headrace over one vLLM, with a kvbm and without, the native engine next to it, and roles.

    serve      sse_load ──▶ `vllm serve`                                    the same load in turn, round by round
               sse_load ──▶ frontend ──▶ worker ──▶ vLLM                    tokens a second, first token, gaps
               sse_load ──▶ frontend ──▶ worker ──▶ vLLM ◀──▶ kvbm
               sse_load ──▶ frontend ──▶ worker ──▶ native engine ◀──▶ kvbm
    engines    the native engine and vLLM, through the channel of a worker: decode steps, prefill, streams
    connector  prompts that the GPU cannot hold together, asked for in turn: computed, then loaded from the kvbm;
               tokens of 32 streams meanwhile
    split      two vLLMs that do all, against one that computes prompts and one that decodes, a GPU each: streams next
               to prompts of 8,192 tokens, as `benchmarks.vllm_split` asks for them, and whether texts are the same

The model has an 8B Llama's shape with random bfloat16 weights (`benchmarks.gpu.model`). The four servers of `serve`
run all the time, each with the same bytes of KV, which hold 128 streams. An idle engine costs the others nothing, so
they take turns without a start between them, which would put a minute between the sides. Answers are greedy, or with
--top-p P drawn with top_p P and temperature 0.8, by the same fields of the requests to all sides. Each part
runs by itself, within ten minutes, and within five with --rounds 1 and two of --streams; `serve` ends after the round
that begins before --most-s. Rows are printed to stderr as they come, and those that there are count if a part fails.
`split` needs two GPUs, or as many for each vLLM as --tensor-parallel says. All four vLLMs run during all of it, and
the sides are loaded in turn. Texts of `split` are compared with those of `aggregated`, which also answers twice: next
to streams a vLLM in bfloat16 may differ from itself.

With --gptq `engines` also has vLLM with the same shape in 4 bits (`benchmarks.gpu.gptq_model`), and that alone if
--engines names none.

What could mislead: the load generator and all servers have cores of one machine. Engines are driven by this process:
times are those of its reports, for both alike, and include 50 to 100 µs of the channel. A decode step is the time
between tokens of a full batch, without its first tenth, at 2,048 tokens of context on average.

    python -m benchmarks.vllm_gpu PART [--model DIR] [--memory TMPFS] [--rounds 3] [--streams 1 32 64 128] [--top-p P]
                                       [--step-tokens 8192] [--step-s S] [--tensor-parallel 1] [--prompts 8]
                                       [--gptq] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec

from benchmarks.gpu.gptq_model import write_gptq_model
from benchmarks.gpu.llama import block_bytes
from benchmarks.gpu.model import add_model, model_in
from benchmarks.gpu.part import gpu_or_exit
from benchmarks.gpu.serving import GREEDY, NAME, StreamLoad, ask_streams
from benchmarks.gpu.table import percentile
from benchmarks.report import Goal, report
from benchmarks.serving_stacks import RunningStack, launched
from benchmarks.vllm import PYTHON
from benchmarks.vllm_split import Load, goals_of, hand_overs
from benchmarks.vllm_split import row_of as split_row
from deploy.local.stack import servers
from deploy.local.stack.stack import BlockStoreOptions, Gpus, UpOptions
from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Stepped
from services.worker.native.config import read_config
from shared.messages.generate import Sampling
from tests.worker.engine.driven_engine import DrivenEngine

ALONE, HEADRACE, KVBM, NATIVE = SIDES = "vllm serve", "headrace", "headrace and kvbm", "headrace native"
GPTQ = "vllm, 4 bits"
REQUESTS = {1: 8, 32: 160, 64: 320, 128: 512}
"""Streams → requests of a run: 5 to 9 seconds each."""
INPUT_TOKENS, OUTPUT_TOKENS = 512, 128
MAX_RUNNING = 128
CONTEXT = 16_384
KV_BYTES = 12 << 30
"""KV of each server: 98,000 tokens of this shape. Four servers with their weights fit on a GPU of 139 GiB."""
POOL_BYTES = 24 << 30
FEW_BLOCKS = 2700
"""Blocks of the GPU in `connector`: five prompts."""
PROMPTS, PROMPT_TOKENS = 6, 8192
SPLIT_SIDES = {"aggregated": (0, 0), "split": (1, 1)}
"""Sides of `split` → workers that only compute prompts, and that only decode."""
SAME_PROMPTS, SAME_TOKENS = 6, 64
STREAMS_BESIDE = 8
START_LIMIT_S = 300.0
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Variables of all vLLMs: over several GPUs they do not use the multicast of NVLink, which other users of the host's
GPUs share."""


def arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """Return vLLM's arguments, the same for all that run."""
    if flags.device == "cpu":
        dtype = getattr(flags, "dtype", "float32")
        return {"dtype": dtype, "max_model_len": 2048, "max_num_seqs": 8, "block_size": 32, "enforce_eager": True}
    own = {"dtype": "bfloat16", "max_model_len": CONTEXT, "max_num_seqs": MAX_RUNNING, "block_size": 16}
    own |= {"max_num_batched_tokens": flags.step_tokens, "kv_cache_memory_bytes": KV_BYTES}
    own |= {"tensor_parallel_size": flags.tensor_parallel} if flags.tensor_parallel > 1 else {}
    return own | {"gpu_memory_utilization": 0.28}  # read only to see whether that much is free


# --- servers


@contextmanager
def alone(model: Path, directory: Path, flags: argparse.Namespace) -> Iterator[tuple[int, Callable[[], None]]]:
    """Start `vllm serve`; yield its port, and a function that waits until it serves."""
    port = servers.free_ports(1)[0]
    command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in arguments(flags).items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    variables = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = directory / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=directory, env=os.environ | variables, stdout=out, stderr=out, start_new_session=True
        )

    def serves() -> None:
        until_s = time.monotonic() + START_LIMIT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"vllm serve:\n{log.read_text(errors='replace')[-3000:]}") from None
                time.sleep(0.3)

    try:
        yield port, serves
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def stack(
    model: Path,
    directory: Path,
    flags: argparse.Namespace,
    *,
    store: bool,
    blocks: int = 0,
    workers: int = 1,
    roles: tuple[int, int] = (0, 0),
    native: bool = False,
) -> Iterator[RunningStack]:
    """Run Headrace with vLLM workers, or native ones. `blocks` are those of a worker's GPU, if not those of KV_BYTES;
    `roles` are the numbers of workers that only compute prompts, and that only decode."""
    each = flags.tensor_parallel
    gpus = [",".join(map(str, range(worker * each, (worker + 1) * each))) for worker in range(workers)]
    table = directory / "vllm.yaml"
    table.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in arguments(flags).items()))
    cuda = flags.device == "cuda"
    engine: dict[str, Any] = {"engine": "vllm", "vllm_python": str(PYTHON), "vllm_args": str(table)}
    engine |= {"vllm_gpus": tuple(gpus)} if cuda else {}
    if native:
        engine = {"gpus": Gpus(each, 1.0, ranks=each), "tensor_parallel": each} if cuda else {}
        blocks = each * KV_BYTES // block_bytes(read_config(model)) if cuda else 0
    with tempfile.TemporaryDirectory(prefix="vllm-gpu-", dir=flags.memory) as pool:
        options = UpOptions(
            model=str(model),
            model_name=NAME,
            port=servers.free_ports(1)[0],
            workers=workers,
            prefill=roles[0],
            decode=roles[1],
            discovery="file",
            **engine,
            store=BlockStoreOptions(pool, flags.pool_bytes) if store else None,
        )
        worker = {"HEADRACE_MAX_RUNNING": str(arguments(flags)["max_num_seqs"]), "HEADRACE_HEALTH_IDLE_S": "0"}
        worker |= {"HEADRACE_ENGINE_METRICS": '["vllm:headrace_*"]'} if store and not native else {}
        worker |= {"HEADRACE_CAPACITY_BLOCKS": str(blocks)} if blocks else {}
        worker |= {"HEADRACE_STEP_S": str(flags.step_s)} if flags.step_s else {}
        settings = {"router": {"HEADRACE_LOAD_RAMP_S": "0"}, "worker": worker}
        with launched(options, directory, settings, start_limit_s=START_LIMIT_S) as running:
            yield running


def metrics(running: RunningStack, name: str) -> float:
    """Return the sum of a metric over the workers."""
    total = 0.0
    for program, url in running.observed.items():
        if program.startswith("worker"):
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            total += sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)
    return total


# --- serve


class Rows(list[dict[str, Any]]):
    """The rows of a part, each printed as it comes."""

    def show(self, *rows: dict[str, Any]) -> None:
        for row in rows:
            print(json.dumps(row), file=sys.stderr, flush=True)
            self.append(row)


def serve(flags: argparse.Namespace, model: Path, rows: Rows) -> list[Goal]:
    """Load the sides in turn, each round in another order. Add a row for each side and number of streams."""
    found: dict[tuple[str, int], list[StreamLoad]] = {}
    begun_s = time.monotonic()
    with ExitStack() as held:
        directories = [Path(held.enter_context(tempfile.TemporaryDirectory(prefix="vllm-gpu-"))) for _ in SIDES]
        ports: dict[str, int] = {}
        serves: Callable[[], None] | None = None
        if ALONE in flags.sides:
            ports[ALONE], serves = held.enter_context(alone(model, directories[0], flags))
        for side, directory in zip(SIDES[1:], directories[1:], strict=True):
            if side in flags.sides:
                running = stack(model, directory, flags, store=side != HEADRACE, native=side == NATIVE)
                ports[side] = held.enter_context(running).port
        if serves is not None:
            serves()
        print(f"all serve after {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        for port in ports.values():  # the first steps compile
            load(port, model, flags, 8 if flags.device == "cpu" else 32, 32, seed=1)
        rounds = 0
        while rounds < flags.rounds and time.monotonic() - begun_s < flags.most_s:
            rounds += 1
            for streams in flags.streams:
                for side in sorted(ports, key=list(ports).index, reverse=bool(rounds % 2)):
                    run = load(ports[side], model, flags, streams, REQUESTS[streams], seed=1000 * rounds + streams)
                    found.setdefault((side, streams), []).append(run)
                    print(f"{side}, {streams}: {run}", file=sys.stderr, flush=True)
    rows.show(*(row_of(side, streams, runs) for (side, streams), runs in found.items()))
    return serve_goals(rows)


def load(port: int, model: Path, flags: argparse.Namespace, streams: int, requests: int, *, seed: int) -> StreamLoad:
    """Run the load generator once."""
    requests = max(streams, requests // flags.divisor)
    return ask_streams(
        RunningStack(port, {}),
        model,
        streams=streams,
        requests=requests,
        input_tokens=flags.input_tokens,
        output_tokens=OUTPUT_TOKENS,
        sampling={"temperature": 0.8, "top_p": flags.top_p} if flags.top_p else GREEDY,
        seed=seed,
    )


def row_of(side: str, streams: int, runs: Sequence[StreamLoad]) -> dict[str, Any]:
    """Return the medians of some runs, and the spread of their tokens a second. *Pure.*"""
    rates = [run.n * OUTPUT_TOKENS / run.elapsed_s for run in runs]
    names = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")
    medians = {name: round(median(getattr(run, name) for run in runs), 2) for name in names}
    failed = sum(run.cut + sum(run.errors.values()) for run in runs)
    shown = {"out_tok_s": round(median(rates), 1), "spread": [round(min(rates), 1), round(max(rates), 1)]}
    return {"side": side, "streams": streams, "rounds": len(runs), **shown, **medians, "failed": failed}


def serve_goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the goals of each number of streams: of `vllm serve`, and the native engine's also of Headrace over vLLM.
    *Pure.*"""
    of = {(row["side"], row["streams"]): row for row in rows}
    goals: list[Goal] = []
    for (side, streams), row in of.items():
        name = f"{side}, {streams} streams"
        yardstick, over_vllm = of.get((ALONE, streams)), of.get((HEADRACE, streams))
        if side == NATIVE and over_vllm is not None:
            goals.append(rate_goal(f"{name}: tokens a second, of headrace", row, over_vllm))
        if side == ALONE or yardstick is None:
            continue
        for what, key, most in (("first token p50", "ttft_p50_ms", 0.7), ("gap p99", "gap_p99_ms", 1.1)):
            ratio = row[key] / max(1e-3, yardstick[key])  # 0 if all of its tokens came together
            goals.append(Goal(f"{name}: {what}", round(ratio, 3), "times", most, ratio <= most))
        goals.append(rate_goal(f"{name}: tokens a second", row, yardstick))
    return goals


def rate_goal(name: str, row: Mapping[str, Any], yardstick: Mapping[str, Any]) -> Goal:
    """Return the goal of being as fast as the yardstick. *Pure.*"""
    rate = row["out_tok_s"] / yardstick["out_tok_s"]
    return Goal(name, round(rate, 3), "times", 1.0, rate >= 1.0)


# --- engines


class TimedEngine(DrivenEngine):
    """An engine whose tokens are not kept, but when they came."""

    def submit_timed(self, tokens: int, most: int, draw: Random) -> int:
        """Submit a random prompt; return the attempt's number."""
        number = self._numbers + 1
        self.times = getattr(self, "times", {})
        self.ends = getattr(self, "ends", {})
        self.ends[number] = asyncio.get_running_loop().create_future()
        prompt = [draw.randrange(10, self.facts.vocab_size) for _ in range(tokens)]
        self.times[number] = [time.perf_counter()]
        self.submit(str(number), prompt, Sampling(max_tokens=most, temperature=0.0, ignore_eos=True))
        return number

    async def timed(self, tokens: int, most: int, draw: Random) -> list[float]:
        """Return when a request was submitted, and when each of its tokens came, in seconds."""
        number = self.submit_timed(tokens, most, draw)
        end = self.ends[number]
        await asyncio.wait((end, self._following), return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            raise SystemExit(f"the engine: {self.failed or self._following.exception()}")
        del self.ends[number]
        came: list[float] = self.times.pop(number)
        return came

    def _record_step(self, step: Stepped) -> None:
        now_s = time.perf_counter()
        for number in step.one_token_attempts:
            self.times[number].append(now_s)
        for part in step.boundary_parts:
            number = int(part.request)
            self.times[number] += [now_s] * (len(part.tokens) // 4)
            if part.finish is not None:
                assert part.finish == "length", part
                self.ends[number].set_result(None)


def engine_config(name: str, model: Path, flags: argparse.Namespace) -> WorkerConfig:
    """Return the settings of an engine that has the GPU alone."""
    own: dict[str, Any] = {"model": str(model), "engine": name, "max_running": arguments(flags)["max_num_seqs"]}
    if name == "vllm":
        table = {key: value for key, value in arguments(flags).items() if key != "max_num_seqs"}
        if flags.device == "cuda":
            table |= {"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 90 << 30}
        own |= {"vllm": table, "vllm_python": str(PYTHON), "block_size": table["block_size"]}
    else:
        own |= {"device": flags.device} | ({"cuda": {"memory_share": 0.9}} if flags.device == "cuda" else {})
    return msgspec.convert(own | {"health": {"idle_s": 0.0}}, WorkerConfig)


async def engine_rows(name: str, engine_name: str, model: Path, flags: argparse.Namespace, rows: Rows) -> None:
    """Measure one engine, which rows call `name`."""
    begun_s = time.monotonic()
    engine = await TimedEngine.start(engine_config(engine_name, model, flags))
    small = flags.device == "cpu"
    draw = Random(7)
    rows.show({"engine": name, "what": "ready", "s": round(time.monotonic() - begun_s, 1)})
    try:
        for batch in (1, 2) if small else (1, 32, 128):
            context, most = (100, 20) if small else (2048, 160)
            await asyncio.gather(*(engine.timed(64, 8, draw) for _ in range(batch)))
            times = await asyncio.gather(*(engine.timed(context - most // 2, most, draw) for _ in range(batch)))
            rows.show({"engine": name, "what": "decode", "batch": batch, "context": context, **decode_of(times)})
        for tokens in (64, 200) if small else (2048, 8192):
            first = [one[1] - one[0] for one in [await engine.timed(tokens, 1, draw) for _ in range(6)][1:]]
            shown = {
                "ms": round(1e3 * median(first), 2),
                "spread": [round(1e3 * min(first), 2), round(1e3 * max(first), 2)],
            }
            rows.show({"engine": name, "what": "prefill", "tokens": tokens, **shown})
        streams, requests = (2, 4) if small else (64, 512)
        left = iter(range(requests))

        async def stream() -> list[list[float]]:
            return [await engine.timed(flags.input_tokens, OUTPUT_TOKENS, draw) for _ in left]

        begun_s = time.perf_counter()
        loops = await asyncio.gather(*(stream() for _ in range(streams)))
        elapsed_s = time.perf_counter() - begun_s
        times = [one for loop in loops for one in loop]
        first = [1e3 * (one[1] - one[0]) for one in times]
        gaps = [1e3 * (later - sooner) for one in times for sooner, later in pairwise(one[1:])]
        shown = {"out_tok_s": round(len(times) * OUTPUT_TOKENS / elapsed_s, 1)}
        for key, values in (("ttft", first), ("gap", gaps)):
            shown |= {
                f"{key}_p50_ms": round(percentile(values, 50), 2),
                f"{key}_p99_ms": round(percentile(values, 99), 2),
            }
        rows.show({"engine": name, "what": "streams", "streams": streams, "requests": requests, **shown})
    finally:
        await engine.close()


def decode_of(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the milliseconds of a step while all requests decode, without the first tenth of that time. *Pure.*"""
    begin, end = max(one[1] for one in times), min(one[-1] for one in times)
    begin += (end - begin) / 10
    inside = [[at for at in one[1:] if begin <= at <= end] for one in times]
    gaps = [1e3 * (later - sooner) for one in inside for sooner, later in pairwise(one)]
    spent = sum(one[-1] - one[0] for one in inside)
    steps = sum(len(one) - 1 for one in inside)
    return {"step_ms": round(1e3 * spent / steps, 3), "gap_p99_ms": round(percentile(gaps, 99), 3)}


def engines(flags: argparse.Namespace, model: Path, rows: Rows) -> list[Goal]:
    """Measure both engines, one after the other, and vLLM with 4 bits if that was asked for."""
    for name in flags.engines:
        asyncio.run(engine_rows(name, name, model, flags, rows))
    if flags.gptq:
        with tempfile.TemporaryDirectory(prefix="gptq-", dir=flags.memory) as directory:
            flags.dtype = "bfloat16"
            asyncio.run(engine_rows(GPTQ, "vllm", write_gptq_model(Path(directory), model), flags, rows))
    steps = {(row["engine"], row["batch"]): row["step_ms"] for row in rows if row["what"] == "decode"}
    goals = []
    for (name, batch), step_ms in steps.items():
        if name == "native" and ("vllm", batch) in steps:
            speed = steps["vllm", batch] / step_ms
            goals.append(Goal(f"native: decode at batch {batch}", round(speed, 3), "times", 1.0, speed >= 1.0))
    return goals


# --- connector


def ask(port: int, prompt: Sequence[int], most: int = 16) -> tuple[float, float, int]:
    """Return milliseconds to the first token and of a step after it, and how many tokens were not computed."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": most, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    url = f"http://127.0.0.1:{port}/v1/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    times: list[float] = []
    usage: dict[str, Any] = {}
    begun_s = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("choices"):
                    times.append(time.perf_counter())
                usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    step_s = (times[-1] - times[0]) / max(1, most - 1)
    return 1e3 * (times[0] - begun_s), 1e3 * step_s, int(details.get("cached_tokens") or 0)


def connector(flags: argparse.Namespace, model: Path, rows: Rows) -> list[Goal]:
    """Measure first tokens of computed and of loaded prompts, the rates of both copies, and streams meanwhile."""
    small = flags.device == "cpu"
    count, blocks = (512, 70) if small else (PROMPT_TOKENS, FEW_BLOCKS)
    draw = Random(3)
    prompts = [[draw.randrange(100, 300 if small else 48_000) for _ in range(count)] for _ in range(PROMPTS)]
    with (
        tempfile.TemporaryDirectory(prefix="vllm-gpu-") as directory,
        stack(model, Path(directory), flags, store=True, blocks=blocks) as running,
    ):
        ask(running.port, prompts[0][::-1])
        for turn in range(1 + flags.rounds):
            before = copied(running)
            told = [ask(running.port, prompt) for prompt in prompts]
            hit = [ask(running.port, prompts[-1]) for _ in range(3)]
            time.sleep(6.0)  # vLLM's own metrics are up to 5 seconds old
            row: dict[str, Any] = {
                "what": "computed" if turn == 0 else "loaded",
                "ttft_ms": [round(each[0], 1) for each in told],
            }
            row |= {"ttft_p50_ms": round(median(each[0] for each in told), 2), "cached": [each[2] for each in told]}
            row |= {"step_p50_ms": round(median(each[1] for each in told), 2)}
            row |= {"on_the_device_ms": round(median(each[0] for each in hit), 2)}
            rows.show(row | {name: value - before[name] for name, value in copied(running).items()})
        turns = ((), prompts, (), prompts)
        for asked in turns:
            rows.show(streams_beside(running, model, flags, asked))
    loaded = [row["ttft_p50_ms"] for row in rows if row["what"] == "loaded"]
    quiet, busy = ([row["gap_p50_ms"] for row in rows if row["what"] == what] for what in ("streams", "streams, loads"))
    ratio = median(busy) / median(quiet)
    goals: list[Goal] = []
    if not small:
        pinned = pinned_rates()
        rows.show({"what": "pinned copies", **pinned})
        for way, turn, name in (("save", 0, "saved_bytes"), ("load", 1, "loaded_bytes")):
            share = rows[turn][name] / max(1e-9, rows[turn][f"{way}_seconds"]) / pinned[way]
            goals.append(Goal(f"{way}: of the pinned rate", round(share, 3), "times", 0.9, share >= 0.9))
    goals += [
        Goal("first token of a hit in the kvbm", median(loaded), "ms", 45.0, median(loaded) <= 45.0),
        Goal("step while prompts are loaded", round(ratio, 3), "times", 1.1, ratio <= 1.1),
    ]
    return goals


def copied(running: RunningStack) -> dict[str, float]:
    """Return what the connector has copied so far."""
    names = ("saved_bytes", "save_seconds", "loaded_bytes", "load_seconds", "loaded_blocks", "bad_blocks")
    return {name: metrics(running, f"vllm:headrace_{name}_total") for name in names}


def pinned_rates() -> dict[str, float]:
    """Return the bytes a second of plain copies of pinned memory from the GPU, `save`, and to it, `load`."""
    import cupy  # pyright: ignore[reportMissingImports]

    runtime, size_bytes = cupy.cuda.runtime, 1 << 30
    host, device = cupy.cuda.alloc_pinned_memory(size_bytes), cupy.zeros(size_bytes, cupy.uint8)
    rates: dict[str, float] = {}
    for way, to, source in (("save", host.ptr, device.data.ptr), ("load", device.data.ptr, host.ptr)):
        times: list[float] = []
        for _ in range(6):
            begun_s = time.perf_counter()
            runtime.memcpy(to, source, size_bytes, runtime.memcpyDefault)
            times.append(time.perf_counter() - begun_s)
        rates[way] = size_bytes / min(times)
    return rates


def streams_beside(
    running: RunningStack, model: Path, flags: argparse.Namespace, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Run streams, and ask for the prompts in turn meanwhile, if there are any."""
    over = threading.Event()

    def loads() -> None:
        while not over.is_set():
            for prompt in prompts:
                ask(running.port, prompt, 1)

    asking = threading.Thread(target=loads) if prompts else None
    if asking is not None:
        asking.start()
    try:
        streams = 2 if flags.device == "cpu" else 32
        run = load(running.port, model, flags, streams, streams * 4, seed=int(time.time()))
    finally:
        over.set()
        if asking is not None:
            asking.join()
    return {"what": "streams, loads" if prompts else "streams"} | row_of(KVBM, streams, [run])


# --- split


def split(flags: argparse.Namespace, model: Path, rows: Rows) -> list[Goal]:
    """Compare texts of both sides; then stream next to long prompts, the sides in turn, each round in another order."""
    begun_s, small = time.monotonic(), flags.device == "cpu"
    asked = argparse.Namespace(
        prompts=flags.prompts, streams=STREAMS_BESIDE, isl=256 if small else PROMPT_TOKENS, osl=512
    )
    # A stack ends with the thread that started it.
    with ThreadPoolExecutor(len(SPLIT_SIDES)) as threads, ExitStack() as held:
        begun = {}
        for side, roles in SPLIT_SIDES.items():
            directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="vllm-gpu-")))
            starting = stack(model, directory, flags, store=True, workers=2, roles=roles)
            begun[side] = threads.submit(held.enter_context, starting)
        wait(begun.values())
        ports = {side: each.result().port for side, each in begun.items()}
        print(f"all serve after {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        for port in ports.values():  # the first steps compile
            load(port, model, flags, 8, 16, seed=1)
        rows.show(texts_of(ports, model, flags, asked.isl))
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in ports}
        for number in range(flags.rounds):
            for side in sorted(ports, reverse=bool(number % 2)):
                before = hand_overs(ports[side])
                found = asyncio.run(Load(ports[side], 1 + number, asked, NAME).run())
                runs[side].append(found | {"hand_overs": hand_overs(ports[side]) - before})
                print(f"{side}: {runs[side][-1]}", file=sys.stderr, flush=True)
    found_rows = [split_row(side, each) for side, each in runs.items()]
    rows.show(*found_rows)
    return goals_of(found_rows)


def texts_of(ports: Mapping[str, int], model: Path, flags: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Ask both sides for the same texts next to streams; return how many are the same, and were handed over."""
    draw = Random(11)
    prompts = [[draw.randrange(100, 300) for _ in range(tokens)] for _ in range(SAME_PROMPTS)]
    texts: dict[str, list[list[str]]] = {}
    before = hand_overs(ports["split"])
    for side, port in ports.items():
        over = threading.Event()
        streams = threading.Thread(target=stream_until, args=(over, port, model, flags))
        streams.start()
        try:
            texts[side] = [[text_of(port, prompt) for prompt in prompts] for _ in range(2)]
        finally:
            over.set()
            streams.join()
    first, again = texts["aggregated"]
    same = {
        name: sum(one == other for one, other in zip(first, others, strict=True))
        for name, others in (("same_as_aggregated", texts["split"][0]), ("aggregated_again", again))
    }
    return {"what": "texts", "prompts": SAME_PROMPTS, **same, "hand_overs": hand_overs(ports["split"]) - before}


def stream_until(over: threading.Event, port: int, model: Path, flags: argparse.Namespace) -> None:
    """Keep some streams running."""
    while not over.is_set():
        load(port, model, flags, STREAMS_BESIDE, STREAMS_BESIDE, seed=int(time.time()))


def text_of(port: int, prompt: Sequence[int]) -> str:
    """Return the text that continues a prompt."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": SAME_TOKENS, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return str(json.loads(answer.read())["choices"][0]["text"])


PARTS = {"serve": serve, "engines": engines, "connector": connector, "split": split}


def main() -> int:
    """Run one part. Print its rows and goals, or with --json one object."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", choices=REQUESTS, default=list(REQUESTS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--engines", nargs="*", choices=("native", "vllm"), default=["native", "vllm"])
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--step-s", type=float, default=0.0, help="`serve`, `connector`: step_s of Headrace's worker")
    parser.add_argument("--top-p", type=float, default=0.0, help="top_p of drawn answers; 0: greedy ones")
    parser.add_argument("--input-tokens", type=int, default=INPUT_TOKENS)
    parser.add_argument("--divisor", type=int, default=1, help="divides the numbers of requests")
    parser.add_argument("--pool-bytes", type=int, default=POOL_BYTES)
    parser.add_argument("--most-s", type=float, default=420.0, help="seconds after which no round begins")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each vLLM, with KV_BYTES on each")
    parser.add_argument("--prompts", type=int, default=8, help="`split`: long prompts of each side and round")
    parser.add_argument("--gptq", action="store_true", help="`engines`: also vLLM with weights of 4 bits")
    parser.add_argument("--json", action="store_true")
    add_model(parser)
    flags = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit("./headrace install-vllm makes vLLM's environment")
    machine = gpu_or_exit() if flags.device == "cuda" else {}
    os.environ.update(WITHOUT_MULTICAST)
    rows, goals, failed = Rows(), list[Goal](), ""
    with model_in(flags) as model:
        try:
            goals = PARTS[flags.part](flags, model, rows)
        except (Exception, SystemExit) as wrong:  # noqa: BLE001 - the rows so far are shown all the same
            failed = f"{type(wrong).__name__}: {wrong}"[-3000:]
            print(failed, file=sys.stderr)
    found = report("vllm_gpu", sys.argv[1:], goals, rows) | {"gpu": machine, "failed": failed}
    if flags.json:
        print(msgspec.json.encode(found).decode())
        return 1 if failed else 0
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    for goal in goals:
        print(f"{goal.name}: {goal.value} {goal.unit}, goal {goal.goal:g}: {'met' if goal.met else 'missed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
