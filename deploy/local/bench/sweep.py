"""`headrace bench`: measures loads at an endpoint or at fleets that it starts; writes a table, PREFIX.json and .png.

    an endpoint      each load of the sweep once
    own fleets       rounds: in each, all fleets get the same requests one after the other; A B, B A, …

If the user interrupts, what has been measured so far is written.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

from deploy.local import picture
from deploy.local.bench import plot
from deploy.local.bench.measure import Measurer, measurer
from deploy.local.bench.options import BenchOptions
from deploy.local.bench.plan import Point, open_point
from deploy.local.bench.ratios import Ratio, ratios, render_ratios, unsteady
from deploy.local.bench.rows import BenchRow, RowKey, render, render_terms, render_turns
from deploy.local.bench.saturation import RateSearch, Saturation, render_saturations, saturation_of, why_not
from deploy.local.bench.variants import Variant
from deploy.local.size.started_up import running_up
from deploy.local.terminal import Terminal
from shared.errors import ConfigError
from shared.installation import PACKAGED, TREE
from shared.version import VERSION


class BenchReport(Struct, frozen=True):
    """The content of the JSON file."""

    benchmark: str
    machine: str
    versions: dict[str, str]
    commit: str
    """The checkout's commit, with + if files differ from it. Empty in a package."""
    command: str
    url: str
    """Empty if the fleets were this bench's own."""
    model: str
    when: str
    interrupted: bool
    rows: list[BenchRow]
    ratios: list[Ratio] = []
    saturations: list[Saturation] = []


def bench(options: BenchOptions) -> int:
    """Measure and return the exit status. Raise Unavailable if the endpoint cannot be measured at all, or a fleet does
    not start."""
    sweep = _Sweep(options)
    interrupted = False
    try:
        sweep.run()
    except KeyboardInterrupt:
        interrupted = True
    if not sweep.rows:
        print("interrupted before the first request had ended: nothing is written", file=sys.stderr)
        return 130
    names = [fleet.name for fleet in options.fleets]
    report = BenchReport(
        benchmark="headrace bench",
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {platform.node()}",
        versions={"headrace": VERSION, "python": platform.python_version(), **sweep.versions},
        commit="" if PACKAGED else commit(TREE),
        command=options.command,
        url="" if options.fleets else options.url,
        model=sweep.model,
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        interrupted=interrupted,
        rows=sweep.rows,
        ratios=ratios(sweep.rows, names),
        saturations=sweep.saturations,
    )
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    print(text if options.json else _tables(report, names))
    Path(f"{options.out}.json").write_text(text + "\n", encoding="utf-8")
    draw_rows(sweep.rows, options.out, f"{options.out}.json is written")
    if interrupted:
        return 130
    return 0 if all(row.outcomes.get("done") for row in sweep.rows) else 1


def _tables(report: BenchReport, names: Sequence[str]) -> str:
    parts = [render(report.rows)]
    if any(row.turns for row in report.rows):
        parts += ["", render_turns(report.rows)]
    if terms := render_terms(report.rows):
        parts += ["", terms]
    if report.saturations:
        parts += ["", render_saturations(report.saturations)]
    if report.ratios:
        parts += ["", render_ratios(report.ratios, names[0])]
    return "\n".join([*parts, *unsteady(report.rows)])


def draw_rows(rows: Sequence[BenchRow], out: str, done: str = "") -> None:
    """Draw curves to `out`.png if matplotlib is there, and say what was `done` before."""
    if not picture.can_draw():
        print("; ".join(filter(None, (done, picture.HINT))), file=sys.stderr)
        return
    plot.draw(plot.series(rows), Path(f"{out}.png"))
    print("; ".join(filter(None, (done, f"{out}.png is drawn"))), file=sys.stderr)


def commit(tree: Path) -> str:
    """Return the commit of a checkout. Empty if git does not say it."""
    words = ["git", "-C", str(tree), "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class _Sweep:
    """Runs all loads at all fleets; `rows` has what was measured so far."""

    def __init__(self, options: BenchOptions) -> None:
        self.rows: list[BenchRow] = []
        self.model = options.model
        self.versions: dict[str, str] = {}
        self.saturations: list[Saturation] = []
        self._options = options
        self._terminal = Terminal()

    def run(self) -> None:
        """Measure all loads."""
        fleets = self._options.fleets
        with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if not fleets:
                runner.run(self._measure(self._options.url, self._options.key_of("", 1)))
                return
            side_by_side = not self._options.one_at_a_time
            started = {each.name: stack.enter_context(self._started(each)) for each in fleets if side_by_side}
            for number in range(1, self._options.rounds + 1 if len(fleets) > 1 else 2):
                for fleet in fleets if number % 2 else fleets[::-1]:  # a drift of the machine favours neither side
                    place: AbstractContextManager[str] = (
                        nullcontext(started[fleet.name]) if side_by_side else self._started(fleet)
                    )
                    with place as url:
                        runner.run(self._measure(url, self._options.key_of(fleet.name, number)))

    @contextmanager
    def _started(self, fleet: Variant) -> Iterator[str]:
        with running_up(fleet.words, self._terminal, fleet.name or "this bench") as (url, _):
            yield url

    async def _measure(self, url: str, key: RowKey) -> None:
        async with measurer(url, self._options, self._terminal) as one:
            self.model = one.model
            if one.version:
                self.versions["server"] = one.version
            for point in self._options.points:
                if self._options.saturate:
                    await self._saturate(one, point, key)
                else:
                    await one.run(point, self.rows, key)

    async def _saturate(self, one: Measurer, point: Point, key: RowKey) -> None:
        """Find the highest rate that is sustained, from that of a point on."""
        search, began = RateSearch(point.value), len(self.rows)
        while (rate := search.next()) is not None:
            await one.run(open_point(rate, self._options.requests, point), self.rows, key)
            search.add(rate, sustained=not why_not(self.rows[-1]))
        self.saturations.append(saturation_of(search, self.rows[began:]))


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
    if options.given or options.traffic is not None:
        raise ConfigError("--driver aiperf makes its own prompts; remove --prompts and --trace")
    if options.key:
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
