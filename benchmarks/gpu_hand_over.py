"""What does handing a prompt over cost, and what does it spare the streams that a worker decodes?

    python -m benchmarks.gpu_hand_over [--model DIRECTORY] [--memory TMPFS] [--tokenizer DIRECTORY] [--tokens 8192]
                                       [--rounds 10] [--device cpu] [--quick] [--json]

A frontend, a router, a kvbm and three workers, each a process, on a real NATS: `prefill` and `decode` with these roles,
and `alone`, an ordinary worker with the same weights
under another name and without the kvbm. This process is the HTTP client, and listens
on NATS to what workers send to the frontend: a token's time is when its step frame was heard. With two GPUs `prefill`
has the second one. The model is of Llama 8B's shape with random weights, in bfloat16.

    hand over     from a prompt's first token to its second, where the first was drawn by `prefill` and the second by
                  `decode`: storing, the second attempt, loading, a step; the median
    alone         the same two tokens from `alone`, which computes the prompt and goes on
    between       the time between two tokens of streams that `decode` decodes, without and with prompts that are asked
                  for without a pause, one and two at a time; the streams begin again each time, since a step takes
                  longer the longer they are. Two at a time are more than `prefill` computes at once, so
                  that the router may have `decode` compute one, in chunks between its streams' tokens: the rows say
                  how many were handed over. The goal is for one at a time. The same streams of `alone`, whose engine
                  exchanges no blocks during its steps, say whether a step of `decode` takes longer for that

STREAMS streams run meanwhile at the worker that is measured: without them routers would not hand over. Every prompt is
new, so that nothing of it is cached.

What could mislead: on one GPU three processes take turns, so `between` says little there and has no goal; the workers
that are not asked do nothing. Times include NATS and this process's own delays. Whether blocks are loaded while the
prompt is computed is up to the router and the workers of this commit. --device cpu runs a tiny model, to try this out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp
import msgspec
import nats
from msgspec import Struct

from benchmarks.gpu.model import add_model, model_in
from benchmarks.gpu.part import gpu_or_exit
from benchmarks.gpu.table import percentile
from benchmarks.report import Goal, report
from shared import subjects
from shared.messages.frames import STEP_FRAME
from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.servers import NatsServer
from tests.tiny_model import write_tiny_model

NAMESPACE = "hand-over"
PAIR, ALONE = "pair", "alone"
"""Names of the model: of the workers with roles, and of the one without."""
STREAMS = 8
STREAM_TOKENS = 8000
"""The length of each of their answers."""
BETWEEN = ((ALONE, 0), (PAIR, 0), (PAIR, 1), (PAIR, 2))
"""The model whose streams are heard, and how many prompts are under way at any time."""
START_LIMIT_S = 400.0
LIMIT_S = 300.0
TINY_TOKENS = 512
MOST_EXTRA_MS, MOST_SLOWER, MOST_OF_ALONE = 10.0, 1.1, 1.01


class HandOverRow(Struct, frozen=True):
    """The first tokens of the answer to one prompt."""

    model: str
    handed_over: bool
    first_ms: float
    second_ms: float
    """From the first token to the second."""
    third_ms: float
    """From the second token to the third."""
    from_memory: int
    """Tokens of the prompt that the worker of the second token loaded from kvbm's memory after the hand-over."""
    storing_ms: float = 0.0
    """From the first token to the hand-over: until kvbm has all blocks; 0 without one."""


class BetweenRow(Struct, frozen=True):
    """Streams that `decode` or `alone` decoded for some seconds."""

    model: str
    at_once: int
    """Prompts that clients had under way at any time."""
    prompts: int
    """Prompts that were answered meanwhile."""
    handed_over: int
    """The number of these that `prefill` computed; `decode` computed the others itself."""
    gaps: int
    p50_ms: float
    p99_ms: float


class _Heard(Struct):
    """One part of a step frame."""

    at_s: float
    instance: str
    first: int
    """The index of its first token in the answer."""
    tokens: int
    from_memory: int


class Wire:
    """What workers send to frontends, by the client's part of the request's id, and when it was heard."""

    def __init__(self) -> None:
        self.parts: dict[str, list[_Heard]] = defaultdict(list)
        self.handed_over_s: dict[str, float] = {}

    async def hear(self, message: Any) -> None:
        now_s = time.perf_counter()
        frame = STEP_FRAME.decode(message.data)
        for part in frame.parts:
            clients_part = part.request.partition("/")[0].rpartition("-")[0]
            if part.finish == "handed_over":
                self.handed_over_s[clients_part] = now_s
            if part.tokens:
                heard = _Heard(now_s, frame.instance, part.first, len(part.tokens) // 4, part.cached_host_tokens)
                self.parts[clients_part].append(heard)


class Client:
    """Asks the frontend over HTTP."""

    def __init__(self, http: aiohttp.ClientSession, url: str, vocabulary: int, wire: Wire) -> None:
        self.wire = wire
        self._http, self._url, self._vocabulary = http, url, vocabulary
        self._numbers = count()

    async def ask(self, model: str, prompt_tokens: int, most: int) -> tuple[list[_Heard], float]:
        """Ask for an answer of `most` tokens to a new prompt; return its parts, and when it was handed over."""
        name = f"asked-{next(self._numbers)}"
        await self._stream(name, model, prompt_tokens, most)
        async with asyncio.timeout(LIMIT_S):
            # Our own subscription may hear the end later than the frontend's.
            while sum(part.tokens for part in self.wire.parts[name]) < most:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.wire.parts.pop(name), self.wire.handed_over_s.pop(name, 0.0)

    @asynccontextmanager
    async def streaming(self, model: str) -> AsyncIterator[list[str]]:
        """Yield the names of STREAMS streams that all decode, until the end."""
        names = [f"stream-{next(self._numbers)}" for _ in range(STREAMS)]
        tasks = [asyncio.create_task(self._again(name, model)) for name in names]
        try:
            async with asyncio.timeout(LIMIT_S):
                while not all(self.wire.parts[name] for name in names):
                    await asyncio.sleep(0.01)
                    for task in tasks:
                        if task.done():
                            task.result()
            yield names
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for name in names:
                self.wire.parts.pop(name, None)

    async def _again(self, name: str, model: str) -> None:
        while True:
            await self._stream(name, model, 32, STREAM_TOKENS)

    async def _stream(self, name: str, model: str, prompt_tokens: int, most: int) -> None:
        draw = Random(name)
        body = {
            "model": model,
            "prompt": [3 + draw.randrange(self._vocabulary - 3) for _ in range(prompt_tokens)],
            "max_tokens": most,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._http.post(f"{self._url}/v1/completions", json=body, headers={"X-Request-Id": name}) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                assert b'"error"' not in line, line


def main() -> int:
    """Print a table, or with --json one object. The exit status is 2 without a GPU."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=0, help="of each prompt; default 8192, or 512 on a CPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long streams are heard, each time")
    parser.add_argument("--pool-bytes", type=int, default=0)
    parser.add_argument("--no-lending", action="store_true", help="blocks go through kvbm, not from engine to engine")
    parser.add_argument("--quick", action="store_true", help="three rounds, streams for two seconds")
    parser.add_argument("--logs", type=Path, help="a new directory for the processes' logs; default: none are kept")
    parser.add_argument("--json", action="store_true")
    add_model(parser)
    flags = parser.parse_args()
    cuda = flags.device == "cuda"
    flags.tokens = flags.tokens or (8192 if cuda else TINY_TOKENS)
    if flags.quick:
        flags.rounds, flags.seconds = 3, 2.0
    machine: dict[str, Any] = gpu_or_exit() if cuda else {"name": "no GPU: a tiny model on the CPU"}
    machine["gpus"] = gpus = _gpus() if cuda else 0
    with tempfile.TemporaryDirectory(prefix="hand-over-", dir=flags.memory) as folder, _model(flags, folder) as model:
        nats_server = NatsServer(Path(folder))
        nats_server.start()
        try:
            rows, between = asyncio.run(_measure(flags, Path(folder), model, nats_server.url, gpus))
        finally:
            nats_server.stop()
    promised = goals(rows, between, gpus)
    if flags.json:
        told = report("gpu_hand_over", sys.argv[1:], promised, [*rows, *between]) | {"gpu": machine}
        print(msgspec.json.encode(told).decode())
        return 0
    print("  ".join(f"{key}: {value}" for key, value in machine.items()))
    both: list[HandOverRow | BetweenRow] = [*rows, *between]
    for row in both:
        print(_line(row))
    for goal in promised:
        print(f"{goal.name}: {goal.value:.2f} {goal.unit} (goal {goal.goal}) {'met' if goal.met else 'NOT MET'}")
    return 0


def _line(row: HandOverRow | BetweenRow) -> str:
    return "  ".join(f"{key} {_said(value)}" for key, value in msgspec.to_builtins(row).items())


def _progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _said(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def goals(rows: Sequence[HandOverRow], between: Sequence[BetweenRow], gpus: int) -> list[Goal]:
    """Compare the rows with the goals."""
    handed = [row.second_ms for row in rows if row.model == PAIR and row.handed_over]
    alone = [row.second_ms for row in rows if row.model == ALONE]
    assert handed, "no prompt was handed over"
    extra_ms = median(handed) - median(alone)
    promised = [Goal("hand over, more than alone", extra_ms, "ms", MOST_EXTRA_MS, extra_ms <= MOST_EXTRA_MS)]
    if gpus > 1:
        of = {(row.model, row.at_once): row for row in between}
        slower = of[PAIR, 1].p99_ms / of[PAIR, 0].p99_ms
        longer = of[PAIR, 0].p50_ms / of[ALONE, 0].p50_ms
        promised += [
            Goal("between tokens beside prompts, p99", slower, "of none", MOST_SLOWER, slower <= MOST_SLOWER),
            Goal("between tokens, no prompts, p50", longer, "of alone's", MOST_OF_ALONE, longer <= MOST_OF_ALONE),
        ]
    return promised


async def _measure(
    flags: argparse.Namespace, folder: Path, model: Path, nats_url: str, gpus: int
) -> tuple[list[HandOverRow], list[BetweenRow]]:
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    logs = flags.logs or folder / "logs"
    logs.mkdir(parents=True)  # old ones would say where processes listened that have ended
    with fleet(logs, nats_url, *where) as services:
        await asyncio.to_thread(_start, services, flags, folder, model, gpus)
        _progress("all is ready")
        wire = Wire()
        bus = await nats.connect(nats_url)
        await bus.subscribe(subjects.stream(NAMESPACE, "*"), cb=wire.hear)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            vocabulary = msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"]
            client = Client(http, services.services["frontend"].url, vocabulary, wire)
            rows: list[HandOverRow] = []
            for name in (ALONE, PAIR):
                async with client.streaming(name):
                    _progress(f"{STREAMS} streams at {name} …")
                    await client.ask(name, flags.tokens, 4)  # what is made at a first step is not measured
                    for _ in range(flags.rounds):
                        rows.append(await _row(client, name, flags.tokens))
                        _progress(_line(rows[-1]))
            _progress("streams, without and with prompts …")
            between: list[BetweenRow] = []
            for name, prompts in BETWEEN:
                async with client.streaming(name) as streams:
                    between.append(await _between(client, name, streams, flags, prompts))
                _progress(_line(between[-1]))
        await bus.close()
    return rows, between


async def _row(client: Client, model: str, tokens: int) -> HandOverRow:
    begun_s = time.perf_counter()
    (first, second, third, *_), handed_over_s = await client.ask(model, tokens, 4)
    return HandOverRow(
        model=model,
        handed_over=first.instance != second.instance,
        first_ms=1e3 * (first.at_s - begun_s),
        second_ms=1e3 * (second.at_s - first.at_s),
        third_ms=1e3 * (third.at_s - second.at_s),
        from_memory=second.from_memory,
        storing_ms=max(0.0, 1e3 * (handed_over_s - first.at_s)),
    )


async def _between(
    client: Client, model: str, streams: Sequence[str], flags: argparse.Namespace, prompts: int
) -> BetweenRow:
    """Hear streams of a model for a while, with `prompts` prompts at a time."""
    handed_over: list[bool] = []

    async def again() -> None:
        while True:
            (first, second, *_), _ = await client.ask(model, flags.tokens, 2)
            handed_over.append(first.instance != second.instance)

    tasks = [asyncio.create_task(again()) for _ in range(prompts)]
    for name in streams:
        client.wire.parts[name].clear()
    try:
        await asyncio.sleep(flags.seconds)
    finally:
        for task in tasks:
            task.cancel()
        failed = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)]
    assert not failed, failed
    gaps = [
        (after.at_s - before.at_s) / after.tokens
        for name in streams
        for before, after in pairwise(client.wire.parts[name])
        if before.instance == after.instance and after.first  # an answer that ends is asked for again
    ]
    handed = sum(handed_over)
    return BetweenRow(
        *(model, prompts, len(handed_over), handed, len(gaps)),
        *(1e3 * percentile(gaps, 50), 1e3 * percentile(gaps, 99)),
    )


def _start(services: Fleet, flags: argparse.Namespace, folder: Path, model: Path, gpus: int) -> None:
    """Start everything, and wait until it is ready."""
    cuda = flags.device == "cuda"
    pool, pool_bytes = folder / "pool", flags.pool_bytes or (8 << 30 if cuda else 256 << 20)
    services.start("router", "router", "--load-ramp-s", "0")
    services.start("kvbm", "kvbm", "--pool-directory", str(pool), "--pool-size-bytes", str(pool_bytes))
    kvbm = ["--kvbm-pool", str(pool)]
    if not cuda:  # such a model computes sooner than it loads
        kvbm += ["--kvbm-wait-s", "20", "--kvbm-timeout-s", "4"]
    shares = {"prefill": 0.9 if gpus > 1 else 0.3, "decode": 0.45 if gpus > 1 else 0.3, "alone": 0.3}
    for name, role in (("prefill", "prefill"), ("decode", "decode"), ("alone", "aggregated")):
        words = ["--model", str(model), "--model-name", ALONE if name == "alone" else PAIR, "--role", role]
        words += [] if name == "alone" else kvbm
        words += ["--kvbm-lending", "false"] if flags.no_lending and name != "alone" else []
        if cuda:
            gpu = int(name == "prefill" and gpus > 1)
            words += ["--device", "cuda", "--cuda-gpu", str(gpu), "--cuda-memory-share", str(shares[name])]
        else:
            words += ["--threads", "1", "--kv-dtype", "bfloat16"]
        services.start("worker", name, *words)
    services.start("frontend", "frontend", "--limits-rescue-s", "120")
    begun_s = time.perf_counter()
    for name, service in services.services.items():
        eventually(service.ready, limit_s=START_LIMIT_S, what=f"{name} is ready")
        _progress(f"{name} is ready after {time.perf_counter() - begun_s:.0f} s")
    for name in ("prefill", "decode"):
        worker = services.services[name]
        eventually(
            lambda: worker.metric("headrace_kvbm_attached") >= 1,  # noqa: B023
            limit_s=LIMIT_S,
            what=f"{name} is attached",
        )
    router = services.services["router"]
    eventually(lambda: router.metric("headrace_kv_sources") >= 4, limit_s=LIMIT_S, what="the router knows all")
    for name in (PAIR, ALONE):  # a frontend is ready with one model while it loads another one's tokenizer
        eventually(
            lambda: _answers(services.services["frontend"].url, name),  # noqa: B023
            limit_s=LIMIT_S,
            what=f"{name} is served",
        )


def _answers(url: str, model: str) -> bool:
    """Whether the frontend serves a model."""
    body = msgspec.json.encode({"model": model, "prompt": [3], "max_tokens": 1})
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=LIMIT_S):
            return True
    except urllib.error.HTTPError as refused:
        if refused.code != 503:
            raise
        return False


@contextmanager
def _model(flags: argparse.Namespace, folder: str) -> Iterator[Path]:
    tiny = write_tiny_model(Path(folder) / "tiny", context_length=8192)
    if flags.device == "cpu" and flags.model is None:
        yield tiny
        return
    flags.tokenizer = flags.tokenizer or tiny  # no text is read
    with model_in(flags) as model:
        yield model


def _gpus() -> int:
    import cupy  # pyright: ignore[reportMissingImports]

    return int(cupy.cuda.runtime.getDeviceCount())


if __name__ == "__main__":
    sys.exit(main())
