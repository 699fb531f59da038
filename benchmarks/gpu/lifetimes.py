"""How long do an engine's starts, ends, sleeps and turns take, for a model of Llama 8B's shape on one GPU?

    alone     an engine without a memory service: its start, stage by stage, a sleep of each level, a kill and a start
    service   the same with its weights in a memory service, and what a second engine of the model takes of the GPU
    standby   `up` with one worker, whose engine is killed next to a stream: with a standby, and without
    turns     `up --models` with two models, of which each is asked in turn: with a memory service, and without

    python -m benchmarks.gpu.lifetimes [--only PART …] [--model DIRECTORY] [--memory TMPFS] [--quick] [--json]

The first two parts drive an engine process through its channel; times are those of its reports. A start goes from the
spawn of the process to the first token of a prompt of 64 tokens; its kernels are compiled before. The others ask over
HTTP. A take-over goes from the kill to the next token of the stream, which one worker alone can go on with. A turn goes
from the request to the first token while the other model is awake, idle for 1.5 s. A row has the median of its `all`.

A part that fails is a row that says why, and the others go on. Each row is also printed to stderr as it comes.

What could mislead: weights lie in a tmpfs, so no disk is read. The second model is another name of the same files. The
memory of the second engine is what the device has less for it, without its KV and the buffers of its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from benchmarks.gpu import part
from benchmarks.gpu.model import add_model, model_in
from benchmarks.report import ROOT
from services.worker.config import Device, WorkerConfig
from services.worker.contracts.messages import Failed, Loading, Ready
from services.worker.engine_start import start_engine
from services.worker.limits import MAX_STEP_TOKENS
from shared.messages.generate import Sampling
from tests.integration.stack import Up, eventually, running, with_models
from tests.process_tree import children
from tests.worker.engine.driven_engine import DrivenEngine

KV_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}
SERVICE_BYTES = 48 << 30
PROMPT = [7 + number * 13 % 300 for number in range(64)]
LIMIT_S = 120.0
STREAM_TOKENS, AFTER_TOKENS = 4000, 200
"""Tokens of a stream during which the engine is killed, and how many of them are awaited after that."""
SHARES = {False: 0.85, True: 0.7}
"""The part of the GPU for an `up`, without a memory service and with one, which keeps the weights of both models."""


class LifetimeRow(Struct, frozen=True):
    """One time, or why there is none."""

    part: str
    what: str
    value: float
    """The median of `all`; 0 if it failed."""
    unit: str
    all: list[float] = []
    stages: dict[str, float] = {}
    """Stage of a start → seconds until the next one began."""
    failed: str = ""


Rows = Iterator[LifetimeRow]


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("lifetimes", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=get_args(Device), default="cuda", help="cpu: to try this out")
    add_model(parser)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure all parts that were asked for."""
    rows: list[LifetimeRow] = []
    with model_in(flags) as model:
        for name in flags.only:
            begun_s = time.monotonic()
            for row in _whole(name, PARTS[name](flags, model)):
                print(msgspec.json.encode(row).decode(), file=sys.stderr, flush=True)
                rows.append(row)
            print(f"{name}: {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    figures = {row.what: row.value for row in rows if row.what in FIGURES and not row.failed}
    return part.PartReport(figures, rows, {"weights_gb": 0.0 if not rows else _weights_bytes(model) / 1e9})


def _whole(name: str, rows: Rows) -> Rows:
    """Yield a part's rows, and one more if it fails."""
    try:
        yield from rows
    except (Exception, SystemExit) as wrong:  # noqa: BLE001 - whatever it is, the other parts are measured
        yield LifetimeRow(name, "failed", 0.0, "", failed=f"{type(wrong).__name__}: {wrong}"[-2000:])


def _row(name: str, what: str, unit: str, *values: float, **more: Any) -> LifetimeRow:
    return LifetimeRow(name, what, median(values), unit, [round(value, 4) for value in values], **more)


def _weights_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


# --- one engine, through its channel


class LivingEngine(DrivenEngine):
    """An engine whose start is timed."""

    begun_s = 0.0
    stages: dict[str, float]
    """Stage → when it began, in seconds after the spawn."""

    @classmethod
    async def begin(cls, config: WorkerConfig) -> LivingEngine:
        """Start an engine; return when it is ready."""
        begun_s, stages = time.perf_counter(), {"process and CUDA": 0.0}
        process = await start_engine(config, "llama", "worker")
        try:
            async with asyncio.timeout(LIMIT_S):
                while not isinstance(report := await process.receive(), Ready):
                    if isinstance(report, Failed):
                        raise SystemExit(report.reason)
                    if isinstance(report, Loading):
                        stages.setdefault(report.what, time.perf_counter() - begun_s)
        except BaseException:
            await process.end(0.0, lambda _: None)
            raise
        engine = cls(config.engine, process, report)
        engine.begun_s, engine.stages = begun_s, stages
        engine.stages["the first request"] = time.perf_counter() - begun_s
        return engine

    async def first_token_s(self) -> float:
        """Ask for a token; return when it came, in seconds after the spawn."""
        await self.answer(f"r{self._numbers}", PROMPT, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - self.begun_s

    def spent(self) -> dict[str, float]:
        """Return how long each stage of the start took, in seconds."""
        ends = [*list(self.stages.values())[1:], None]
        return {
            stage: round(end - began, 3)
            for (stage, began), end in zip(self.stages.items(), ends, strict=True)
            if end is not None
        }

    async def operate_s(self, operation: Any, level: int = 1) -> float:
        """Return the seconds of an operation. Raise SystemExit if it was not done."""
        begun_s = time.perf_counter()
        failed = await self.operate(operation, level=level)
        if failed:
            raise SystemExit(failed)
        return time.perf_counter() - begun_s

    async def lose(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        await self.close()


def _config(flags: argparse.Namespace, model: Path, memory: Path | None) -> WorkerConfig:
    own: dict[str, Any] = {"model": str(model), "device": flags.device, "capacity_bytes": KV_BYTES[flags.device]}
    own |= {"cache": str(ROOT / ".headrace" / "models"), "health": {"idle_s": 0.0}}
    if memory is not None:
        own |= {"weights": {"memory": str(memory), "timeout_s": 30.0}}
    return msgspec.convert(own, WorkerConfig)


def alone(flags: argparse.Namespace, model: Path) -> Rows:
    """Measure an engine that has weights of its own."""
    yield from _collected(partial(_engine_rows, flags, model, None, "alone", "without a service"))


def service(flags: argparse.Namespace, model: Path) -> Rows:
    """Measure an engine whose weights are in a memory service, and a second one next to it."""
    with tempfile.TemporaryDirectory(prefix="lifetimes-") as directory:
        memory = Path(directory) / "memory"
        words = ("--directory", str(memory), "--size-bytes", str(SERVICE_BYTES), "--log-level", "warning")
        keeper = subprocess.Popen([sys.executable, "-P", "-m", "services.worker.memory", *words], cwd=ROOT)
        try:
            yield from _collected(partial(_engine_rows, flags, model, memory, "service", "with a service"))
            if flags.device == "cuda":
                yield asyncio.run(_second(flags, model, memory))
        finally:
            keeper.terminate()
            keeper.wait()


def _collected(measured: Callable[[Callable[[LifetimeRow], None]], Any]) -> Rows:
    """Yield the rows that a coroutine hands to its argument; also those before it fails."""
    rows: list[LifetimeRow] = []
    wrong: BaseException | None = None
    try:
        asyncio.run(measured(rows.append))
    except (Exception, SystemExit) as failed:  # noqa: BLE001 - raised below
        wrong = failed
    yield from rows
    if wrong is not None:
        raise wrong


async def _engine_rows(
    flags: argparse.Namespace,
    model: Path,
    memory: Path | None,
    name: str,
    how: str,
    take: Callable[[LifetimeRow], None],
) -> None:
    config = _config(flags, model, memory)
    gigabytes = _weights_bytes(model) / 1e9
    rounds = 1 if flags.quick else 2
    engine = await LivingEngine.begin(config)  # it compiles kernels, and has a service make the weights
    try:
        take(_row(name, f"first start of all, {how}", "s", await engine.first_token_s(), stages=engine.spent()))
        for level in (1, 2):
            slept, woke, first = [], [], []
            for _ in range(rounds):
                slept.append(await engine.operate_s("sleep", level))
                woke.append(await engine.operate_s("wake"))
                begun_s = time.perf_counter()
                await engine.first_token_s()
                first.append(1e3 * (time.perf_counter() - begun_s))
            take(_row(name, f"sleep of level {level}, {how}", "s", *slept))
            if memory is None and level == 1:
                take(_row(name, "sleep of level 1, of the weights", "GB/s", *(gigabytes / each for each in slept)))
            take(_row(name, f"wake from level {level}, {how}", "ms", *(1e3 * each for each in woke)))
            take(_row(name, f"first token after it, level {level}, {how}", "ms", *first))
        starts, loads = [], []
        for _ in range(rounds):
            await engine.lose()
            engine = await LivingEngine.begin(config)
            starts.append(await engine.first_token_s())
            loads.append(sum(value for stage, value in engine.spent().items() if "weights" in stage))
        take(_row(name, f"start to the first token, {how}", "s", *starts, stages=engine.spent()))
        take(_row(name, f"weights of it, {how}", "s", *loads))
    finally:
        await engine.lose()


async def _second(flags: argparse.Namespace, model: Path, memory: Path) -> LifetimeRow:
    """Return what a second engine takes of the GPU beyond its KV and its buffers."""
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    from services.worker.native.config import read_config
    from services.worker.native.cuda.capacity import step_bytes
    from services.worker.native.cuda.runner import step_limits

    config = _config(flags, model, memory)
    first = await LivingEngine.begin(config)
    try:
        await first.first_token_s()
        before = runtime.memGetInfo()[0]
        second = await LivingEngine.begin(config)
        try:
            await second.first_token_s()
            taken = before - runtime.memGetInfo()[0]
        finally:
            await second.lose()
    finally:
        await first.lose()
    limits = step_limits(
        first.facts.context_length, config.block_size, max_running=config.max_running, max_rows=MAX_STEP_TOKENS
    )
    kept = first.facts.capacity_blocks * first.facts.kv_layout.block_bytes + step_bytes(read_config(model), limits, 2)
    return _row("service", "second engine: memory beyond KV and buffers", "GB", (taken - kept) / 1e9)


# --- a whole `up`


@contextmanager
def _up(flags: argparse.Namespace, *more: str, shares_weights: bool) -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="lifetimes-") as state:
        words = ["--discovery", "file", "--kvbm-bytes", "0", "--device", flags.device, *more]
        if flags.device == "cuda":
            words += ["--gpu-memory-share", str(SHARES[shares_weights])]
        if shares_weights:
            words += ["--weights-bytes", str(SERVICE_BYTES)]
        with running(with_models(Path(state)), *words) as up:
            yield up


def _stream(up: Up, model: str, tokens: int) -> Generator[float]:
    """Ask for tokens; yield when each chunk with text came. Raise SystemExit if the answer fails."""
    url = urlsplit(up.url)
    assert url.hostname is not None
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    with closing(http.client.HTTPConnection(url.hostname, url.port, timeout=LIMIT_S)) as connection:
        sent = json.dumps(body | {"ignore_eos": True})
        connection.request("POST", f"{url.path}/completions", sent, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {answer.read(2000)!r}")
        while line := answer.readline():
            if b'"error"' in line:
                raise SystemExit(line.decode())
            if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                yield time.perf_counter()


def _gauge(up: Up, name: str) -> float:
    """Return a metric of the first worker."""
    url = urlsplit(up.record["programs"]["worker-0"]["observe"])
    assert url.hostname is not None
    with closing(http.client.HTTPConnection(url.hostname, url.port, timeout=LIMIT_S)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)


def standby(flags: argparse.Namespace, model: Path) -> Rows:
    """Kill the engine during a stream, with a standby and without."""
    for stands_by in (True, False):
        how, more = ("a standby", ("--standby",)) if stands_by else ("no standby", ())
        gaps: list[float] = []
        words = ("--model", str(model), "--workers", "1", *more)
        with _up(flags, *words, shares_weights=True) as up:
            [name] = _names(up)
            [engine, *_] = _by_age(up.pid("worker-0"))
            for _ in range(3 if stands_by and not flags.quick else 1):
                if stands_by:
                    ready = partial(_gauge, up, "headrace_standby_ready")
                    eventually(ready, limit_s=LIMIT_S, what="an engine stands by")
                gaps.append(_taken_over_s(up, name, engine))
                [engine, *_] = _by_age(up.pid("worker-0"))
            took_over = _gauge(up, "headrace_standby_take_overs_total")
        yield _row("standby", f"killed engine to the stream's next token, {how}", "s", *gaps)
        yield _row("standby", f"take-overs, {how}", "", took_over)


def _names(up: Up) -> list[str]:
    url = urlsplit(up.url)
    assert url.hostname is not None
    with closing(http.client.HTTPConnection(url.hostname, url.port, timeout=LIMIT_S)) as connection:
        connection.request("GET", f"{url.path}/models")
        return [model["id"] for model in json.load(connection.getresponse())["data"]]


def _by_age(pid: int) -> list[int]:
    """Return a process's children, the oldest first: an engine is older than the one that stands by for it."""
    return sorted(
        children(pid), key=lambda child: int(Path(f"/proc/{child}/stat").read_text().rsplit(")")[1].split()[19])
    )


def _taken_over_s(up: Up, model: str, engine: int) -> float:
    """Kill the engine during a stream; return the seconds until its next token."""
    stream = _stream(up, model, STREAM_TOKENS)
    with closing(stream):
        for _ in islice(stream, 40):
            pass
        os.kill(engine, signal.SIGKILL)
        times = [time.perf_counter(), *islice(stream, AFTER_TOKENS)]
    # What was on its way when the engine was killed comes first; the pause is the longest gap.
    return max(later - sooner for sooner, later in pairwise(times))


def turns(flags: argparse.Namespace, model: Path) -> Rows:
    """Ask two models in turn, with a memory service and without."""
    with tempfile.TemporaryDirectory(prefix="lifetimes-", dir=model.parent) as directory:
        pair = [Path(directory) / name for name in ("first", "second")]
        for copy in pair:
            copy.mkdir()
            for file in model.iterdir():
                if file.is_file():
                    os.link(file, copy / file.name)
        for shares_weights in (True, False):
            how = "with a service" if shares_weights else "without a service"
            words = ("--models", ",".join(map(str, pair)), "--set", "turns.least_awake_s=0.1")
            with _up(flags, *words, shares_weights=shares_weights) as up:
                times: list[float] = []
                for number, copy in enumerate(islice(cycle(pair), 4 if flags.quick else 8)):
                    time.sleep(1.5)
                    begun_s = time.perf_counter()
                    took_s = next(_stream(up, copy.name, 1)) - begun_s
                    if number >= 2:  # the first of each wakes it from its start
                        times.append(took_s)
            yield _row("turns", f"turn of two models to the first token, {how}", "s", *times)


PARTS: dict[str, Callable[[argparse.Namespace, Path], Rows]] = {
    "alone": alone,
    "service": service,
    "standby": standby,
    "turns": turns,
}
FIGURES = (
    "sleep of level 1, of the weights",
    "weights of it, without a service",
    "start to the first token, without a service",
    "start to the first token, with a service",
    "wake from level 1, without a service",
    "wake from level 2, without a service",
    "wake from level 1, with a service",
    "wake from level 2, with a service",
    "second engine: memory beyond KV and buffers",
    "killed engine to the stream's next token, a standby",
    "killed engine to the stream's next token, no standby",
    "turn of two models to the first token, with a service",
    "turn of two models to the first token, without a service",
)


if __name__ == "__main__":
    sys.exit(main())
