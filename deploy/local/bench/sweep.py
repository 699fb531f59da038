"""`headrace bench`: runs a sweep of loads against an OpenAI endpoint; writes a table, PREFIX.json and PREFIX.png.

Each point of the sweep sends unmeasured requests to warm up, then measured ones: in a closed loop (--concurrency) or an
open one (--rate). If the user interrupts, what has been measured so far is written.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

from deploy.local.bench.client import Client, client
from deploy.local.bench.plan import Point, arrivals, prompts
from deploy.local.bench.rows import BenchRow, Result, render, row_of
from deploy.local.terminal import Terminal
from deploy.local.usage import BenchFlags
from shared.errors import ConfigError, Unavailable
from shared.installation import BIN

REFUSED_WAIT_S = 0.5
"""Wait of a closed loop's slot after a refusal without Retry-After."""


class BenchOptions(BenchFlags, frozen=True, kw_only=True):
    """Flags of `bench` that were checked, and what follows from them. `url` ends with /v1."""

    points: list[Point]
    command: str
    given: Sequence[str] = ()
    """Prompts to send instead of generated ones."""
    api_key: str = ""


class Report(Struct, frozen=True):
    """The content of the JSON file."""

    benchmark: str
    machine: str
    command: str
    url: str
    model: str
    when: str
    interrupted: bool
    rows: list[BenchRow]
    goals: list[str] = []


def bench(options: BenchOptions) -> int:
    """Run the sweep and return the exit status. Raise Unavailable if the endpoint cannot be measured at all."""
    sweep = _Sweep(options)
    interrupted = False
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(sweep.run())
    except KeyboardInterrupt:
        interrupted = True
    if not sweep.rows:
        return 130
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    named = (options.command, options.url, sweep.model, when)
    report = Report("headrace bench", machine, *named, interrupted, sweep.rows)
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    print(text if options.json else render(sweep.rows))
    Path(f"{options.out}.json").write_text(text + "\n", encoding="utf-8")
    _draw(sweep.rows, options.out)
    if interrupted:
        return 130
    return 0 if all(row.outcomes.get("done") for row in sweep.rows) else 1


def _draw(rows: Sequence[BenchRow], out: str) -> None:
    try:
        from deploy.local.bench import plot  # imported here because matplotlib is optional
    except ImportError:
        print(f"{out}.json is written; to draw it as well, run `{BIN}pip install matplotlib`", file=sys.stderr)
        return
    plot.draw(rows, Path(f"{out}.png"))
    print(f"{out}.json and {out}.png are written", file=sys.stderr)


class _Sweep:
    """Runs all points one after the other; `rows` has what was measured so far."""

    def __init__(self, options: BenchOptions) -> None:
        self.rows: list[BenchRow] = []
        self.model = options.model
        self._options = options
        self._terminal = Terminal()
        self._prompts = prompts(options.words, options.shared_words, options.given, options.seed)

    async def run(self) -> None:
        options = self._options
        if not self.model:
            async with client(options.url, {}, timeout_s=options.timeout_s, api_key=options.api_key) as one:
                served = await one.models()
            if not served:
                raise Unavailable(f"{options.url} serves no model")
            self.model = served[0]
        body = {
            "model": self.model,
            "max_tokens": options.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **({} if options.may_stop else {"ignore_eos": True}),
        }
        async with client(options.url, body, timeout_s=options.timeout_s, api_key=options.api_key) as one:
            for point in options.points:
                await self._warm_up(one, point)
                await self._measure(one, point)
                self._terminal.clear()

    async def _warm_up(self, one: Client, point: Point) -> None:
        """Send the unmeasured requests. Raise Unavailable if none is answered before the first point."""
        answers = await asyncio.gather(*(one.ask(next(self._prompts)) for _ in range(self._options.warmup)))
        if answers and not self.rows and not any(answer.outcome == "done" for answer in answers):
            raise Unavailable(f"{point.name}: no request of the warm-up was answered: {answers[0].reason}")

    async def _measure(self, one: Client, point: Point) -> None:
        results: list[Result] = []
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as tasks:
                if point.loop == "closed":
                    numbers = iter(range(point.requests))
                    for _ in range(int(point.value)):
                        tasks.create_task(self._slot(one, point, numbers, results))
                else:
                    loop = asyncio.get_running_loop()
                    start_s = loop.time()
                    for at_s in arrivals(point.value, point.requests, self._options.seed):
                        await asyncio.sleep(start_s + at_s - loop.time())
                        tasks.create_task(self._ask(one, point, results))
        finally:
            if results:
                seconds = time.perf_counter() - began_s
                self.rows.append(row_of(point, results, seconds, (time.process_time() - began_cpu_s) / seconds))

    async def _slot(self, one: Client, point: Point, numbers: Iterator[int], results: list[Result]) -> None:
        for _ in numbers:
            result = await self._ask(one, point, results)
            if result.outcome == "refused" and len(results) < point.requests:
                await asyncio.sleep(result.retry_after_s or REFUSED_WAIT_S)

    async def _ask(self, one: Client, point: Point, results: list[Result]) -> Result:
        result = await one.ask(next(self._prompts))
        results.append(result)
        self._terminal.progress(point.name, len(results) / point.requests)
        return result


def run_aiperf(options: BenchOptions) -> int:
    """Run all points with NVIDIA's load generator, if it is installed. Return the exit status of the first run that
    failed, or 0. Each point's files are in a directory below `out`. Raise ConfigError."""
    program = shutil.which("aiperf")
    if program is None:
        raise ConfigError(
            "--driver aiperf: no such program in PATH; run `pip install aiperf` in an environment of its own"
        )
    if not options.model or not options.tokenizer:
        raise ConfigError("--driver aiperf needs --model, and --tokenizer with a directory or a name on the hub")
    if options.given:
        raise ConfigError("--driver aiperf makes its own prompts; remove --prompts")
    if options.api_key:
        raise ConfigError("--driver aiperf takes a key only as a flag, which `ps` shows; give no API key")
    for point in options.points:
        status = subprocess.run([program, *aiperf_arguments(options, point)], check=False).returncode
        if status:
            return status
    return 0


def aiperf_arguments(options: BenchOptions, point: Point) -> list[str]:
    """Return aiperf's arguments for a point. Lengths that are words here are tokens there."""
    load = ["--concurrency", f"{point.value:g}"] if point.loop == "closed" else ["--request-rate", f"{point.value:g}"]
    prefix = ["--shared-system-prompt-length", str(options.shared_words)] if options.shared_words else []
    warmup = ["--warmup-request-count", str(options.warmup)] if options.warmup else []
    return [
        "profile",
        *("--model", options.model, "--tokenizer", options.tokenizer),
        *("--url", options.url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming"),
        *("--use-server-token-count", *([] if options.may_stop else ["--extra-inputs", "ignore_eos:true"])),
        *("--isl", str(options.words - options.shared_words), "--osl", str(options.output_tokens), *prefix),
        *(*load, "--request-count", str(point.requests), *warmup),
        *("--request-timeout-seconds", f"{options.timeout_s:g}", "--random-seed", str(options.seed)),
        *("--output-artifact-dir", f"{options.out}/{point.name.replace(' ', '-')}"),
    ]
