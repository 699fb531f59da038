"""What does a token cost on its way from the engine to the client, compared with Dynamo in the same run?

    load generator ── HTTP, SSE ──▶ a stack: every process's CPU time from /proc, over all tokens of the run

Both stacks (`serving_stacks.py`) are up at once and take turns: ours, peer, ours, peer. Both have two workers that take
an engine's time without its arithmetic, the same model directory, KV routing and events; prompts are 512 tokens and
share nothing, answers 128 tokens, streamed. Every process but the load generator counts, on both sides. The load
generator is the yardstick's own; without a yardstick it is `sse_load.py`, and only ours is measured.

paced     a step takes 20 ms on both sides. Ours has a setting for it; the yardstick's speed-up is calibrated for each
          number of streams until its tokens a second are ours, and a run counts only if they are within 3 % of each
          other. A run with less than 0.98 SSE events a token, or with an error, is refused: it did not do the work.
unpaced   engines 1,000 times as fast as a GPU: everything waits for the serving path, and if that lags, tokens come
          together in fewer events.

To work on the cost, measure ours alone, in half a minute; the last line is the sum:

    python -m benchmarks.serving --ours --streams 128,512 --paced --quick [--peer DIR]
    python -m benchmarks.serving --ours --streams 512 --paced --quick --profile frontend|router|worker

With --peer its model and load generator are used for ours too, as in the comparison: its tokens are longer text.

What could mislead: wall-clock figures (tokens/s, time to first token) on a busy or small machine are the machine's, CPU
per token is less so. The other stack idles meanwhile, which costs the caches a little. The first and last seconds of a
run have fewer streams than the case says, on both sides. CPU time in interrupts (loopback TCP) counts for the process
that they interrupt. Profiled processes cost about twice as much.

    python -m benchmarks.serving --peer DIR [--streams 32,128] [--paced|--unpaced] [--repeats 3] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.serving_load import ENDLESS, NO_TIME, OUTPUT_TOKENS, Generator, GeneratorReport
from benchmarks.serving_stacks import RunningStack, ours, peer

STREAMS = (32, 128, 512)
STEP_S = 0.020
SPEEDUP = 1000
LEAST_EVENTS_A_TOKEN = 0.98
MOST_APART = 0.03
"""The largest difference of the two systems' tokens a second, as a share."""
CALIBRATED = 0.015
CALIBRATIONS = 6
FIRST_SPEEDUP = 0.6
ROUNDS = 6
"""Requests of each stream in a paced run, one after another."""
QUICK_ROUNDS = 3
UNPACED_REQUESTS = 2000
FRONTEND_GOAL_US = 10.0
PACED = NO_TIME | {"HEADRACE_SIMULATED_FIXED_S": str(STEP_S)}
UNPACED = {"HEADRACE_SIMULATED_SPEED": str(SPEEDUP)}
LIMITS = {"HEADRACE_MAX_RUNNING": "256"}
"""A worker's limit, equal to the yardstick's `--max-num-seqs`."""


class ServingRow(Struct, frozen=True):
    """The result of one run of one case."""

    system: str
    pace: str
    streams: int
    us_a_token: float
    """CPU time of all processes, in µs a token."""
    by_kind: dict[str, float]
    rss_mb: dict[str, float]
    load: GeneratorReport
    refused: str
    """Why the run does not count; empty if it counts."""


class StackPair(Struct, frozen=True):
    """A run of ours and the yardstick's run right after it."""

    ours: ServingRow
    peer: ServingRow | None

    @property
    def refused(self) -> str:
        """Why the two runs cannot be compared; empty if they can."""
        if self.peer is None:
            return "no yardstick"
        if self.ours.refused or self.peer.refused:
            return self.ours.refused or self.peer.refused
        if self.ours.pace == "paced" and abs(self.slower - 1) > MOST_APART:
            return f"the yardstick took {self.slower:.2f} times as long"
        return ""

    @property
    def slower(self) -> float:
        """Our tokens a second over the yardstick's, for the same requests."""
        assert self.peer is not None
        return self.peer.load.elapsed_s / self.ours.load.elapsed_s

    @property
    def ratio(self) -> float:
        """Our CPU time a token over the yardstick's."""
        assert self.peer is not None
        return self.ours.us_a_token / self.peer.us_a_token


class Bench:
    """Makes all runs, in order."""

    def __init__(self, flags: argparse.Namespace, directory: Path) -> None:
        self.pairs: list[StackPair] = []
        self._flags = flags
        self._yardstick: Path | None = None if flags.ours else flags.peer
        self._generator = Generator(flags.peer, directory)
        self._directory = directory
        self._streams = [int(word) for word in flags.streams.split(",")]

    def paced(self) -> None:
        """Run with 20 ms a step; the yardstick is restarted and calibrated for each number of streams."""
        with self._ours(PACED) as stack:
            for streams in self._streams:
                with ExitStack() as calibrated:
                    beside = None if self._yardstick is None else self._calibrated(stack, streams, calibrated)
                    self._turns(stack, beside, "paced", streams)

    def unpaced(self) -> None:
        """Run both stacks as fast as they can."""
        with self._ours(UNPACED) as stack, ExitStack() as started:
            beside = None
            if self._yardstick is not None:
                beside = started.enter_context(peer(self._yardstick, self._directory / "peer", speedup=SPEEDUP))
                self._warm(beside)
            for streams in self._streams:
                self._turns(stack, beside, "unpaced", streams)

    @contextmanager
    def _ours(self, worker: dict[str, str]) -> Iterator[RunningStack]:
        directory = self._directory / "ours"
        settings = ENDLESS | LIMITS | worker
        with ours(self._generator.model, directory, worker=settings, profile=self._flags.profile) as stack:
            self._warm(stack)
            yield stack

    def _warm(self, stack: RunningStack) -> None:
        self._generator.run(stack, 16, 100)

    def _calibrated(self, stack: RunningStack, streams: int, started: ExitStack) -> RunningStack:
        """Return the yardstick at the speed-up that gives a stream as many tokens a second as ours.

        Its prefills take time too, and a step's time depends on the batch, so it tries several speed-ups. The last try
        stays, and `StackPair` judges it.
        """
        assert self._yardstick is not None
        speedup = FIRST_SPEEDUP
        for left in reversed(range(CALIBRATIONS)):
            with ExitStack() as tried:
                beside = tried.enter_context(peer(self._yardstick, self._directory / "peer", speedup=speedup))
                self._warm(beside)
                # Ours each time too: what else the machine does slows both.
                mine = self._run(stack, "ours", "paced", streams)
                pair = StackPair(mine, self._run(beside, "peer", "paced", streams))
                self._say(f"calibrating: speed-up {speedup:.3f}, {pair.slower:.3f} times as long as ours")
                if left == 0 or abs(pair.slower - 1) < CALIBRATED:
                    started.push(tried.pop_all())
                    return beside
                speedup *= pair.slower
        raise AssertionError("the last try is kept")

    def _turns(self, stack: RunningStack, beside: RunningStack | None, pace: str, streams: int) -> None:
        for _ in range(1 if self._flags.quick else self._flags.repeats):
            mine = self._run(stack, "ours", pace, streams)
            self._say(line(mine))
            theirs = None if beside is None else self._run(beside, "peer", pace, streams)
            self.pairs.append(StackPair(mine, theirs))
            if theirs is not None:
                self._say(line(theirs))
                self._say(f"{'ratio':5} {pace:8} {streams:4}  {self.pairs[-1].ratio:6.2f}  {self.pairs[-1].refused}")

    def _run(self, stack: RunningStack, system: str, pace: str, streams: int) -> ServingRow:
        """The result of one run of one case."""
        if pace == "paced":
            # Slots start one after another over the time of one request: no waves of requests.
            requests = streams * (QUICK_ROUNDS if self._flags.quick else ROUNDS)
            load, spent = self._generator.run(stack, streams, requests, "--ramp", str(OUTPUT_TOKENS * STEP_S))
        else:
            requests = max(UNPACED_REQUESTS // (4 if self._flags.quick else 1), 2 * streams)
            load, spent = self._generator.run(stack, streams, requests)
        tokens = load.n * OUTPUT_TOKENS
        by_kind = {kind: 1e6 * cost.cpu_s / tokens for kind, cost in spent.items()}
        rss_mb = {kind: cost.rss_mb for kind, cost in spent.items()}
        return ServingRow(system, pace, streams, sum(by_kind.values()), by_kind, rss_mb, load, refusal(load, pace))

    def _say(self, text: str) -> None:
        if not self._flags.json:
            print(text, flush=True)


def refusal(load: GeneratorReport, pace: str) -> str:
    """Return why a run does not count; empty if it counts."""
    if load.errors:
        return f"errors: {load.errors}"
    if pace != "paced":
        return ""
    share = load.ev_per_req / OUTPUT_TOKENS
    return f"{share:.2f} events a token" if share < LEAST_EVENTS_A_TOKEN else ""


def line(row: ServingRow) -> str:
    """Return a row as text."""
    kinds = "  ".join(f"{kind} {us:.1f}" for kind, us in sorted(row.by_kind.items(), key=lambda item: -item[1]))
    load = row.load
    return (
        f"{row.system:5} {row.pace:8} {row.streams:4}  {row.us_a_token:6.1f} µs/token: {kinds}  | "
        f"{load.n * OUTPUT_TOKENS / load.elapsed_s:7.0f} tokens/s  {load.ev_per_req / OUTPUT_TOKENS:.2f} events each  "
        f"step {load.tpot_p50_ms:.1f} ms  gap p99 {load.gap_p99_ms} ms  first {load.ttft_p50_ms:.0f} / "
        f"{load.ttft_p99_ms:.0f} ms  client {1e6 * load.client_cpu_s / load.n / OUTPUT_TOKENS:.1f} µs"
        + (f"  REFUSED: {row.refused}" if row.refused else "")
    )


def goals(pairs: Sequence[StackPair], paces: Sequence[str], streams: Sequence[int]) -> list[Goal]:
    """Take medians over the repeats that count; a goal without any is not met."""
    found: list[Goal] = []
    for pace in paces:
        for count in streams:
            case = [pair for pair in pairs if (pair.ours.pace, pair.ours.streams) == (pace, count)]
            ratios = [pair.ratio for pair in case if not pair.refused]
            goal = 0.8 if pace == "paced" and count >= 128 else 1.0
            value = statistics.median(ratios) if ratios else None
            name = f"CPU a token, {count} streams {pace}, of the yardstick's"
            found.append(Goal(name, value, "times", goal, value is not None and value <= goal))
    alone = [
        pair.ours.by_kind["frontend"]
        for pair in pairs
        if (pair.ours.pace, pair.ours.streams) == ("paced", 512) and not pair.ours.refused
    ]
    if "paced" in paces and 512 in streams:
        value = statistics.median(alone) if alone else None
        met = value is not None and value <= FRONTEND_GOAL_US
        found.append(Goal("frontend alone, 512 streams paced", value, "µs a token", FRONTEND_GOAL_US, met))
    return found


def summary(pairs: Sequence[StackPair]) -> Iterator[str]:
    """Yield a line for each case: medians of the ratios that count, with the spread of all."""
    for case in dict.fromkeys((pair.ours.pace, pair.ours.streams) for pair in pairs):
        taken = [pair for pair in pairs if (pair.ours.pace, pair.ours.streams) == case and pair.peer is not None]
        good = [pair.ratio for pair in taken if not pair.refused]
        if taken:
            every = [pair.ratio for pair in taken]
            median = f"{statistics.median(good):.2f}" if good else "none counts"
            spread = f"{min(every):.2f} to {max(every):.2f}, {len(good)} of {len(every)} count"
            yield f"{case[0]:8} {case[1]:4}  ratio {median}  ({spread})"


def main() -> int:
    """Print a table, or with --json one object."""
    flags = _flags()
    paces = [pace for pace in ("paced", "unpaced") if getattr(flags, pace)] or ["paced", "unpaced"]
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(flags, Path(name))
        for pace in paces:
            bench.paced() if pace == "paced" else bench.unpaced()
    found = goals(bench.pairs, paces, [int(word) for word in flags.streams.split(",")])
    if flags.plot:
        _plot(bench.pairs, flags.plot)
    if flags.json:
        print(msgspec.json.encode(report("serving", sys.argv[1:], found, bench.pairs)).decode())
        return 0
    for text in summary(bench.pairs):
        print(text)
    for goal in [] if flags.ours else found:
        value = "no yardstick, or none counts" if goal.value is None else f"{goal.value:.2f} {goal.unit}"
        print(f"{goal.name}: {value} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--peer", type=Path, help="the yardstick's directory, with stack.py, loadgen.py, model and venv"
    )
    parser.add_argument("--ours", action="store_true", help="ours alone")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--paced", action="store_true", help="only paced")
    parser.add_argument("--unpaced", action="store_true", help="only unpaced")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", default="", choices=("", "frontend", "router", "worker"))
    parser.add_argument("--quick", action="store_true", help="one short run of each case")
    parser.add_argument("--plot", type=Path, help="a PNG")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _plot(pairs: Sequence[StackPair], path: Path) -> None:
    from benchmarks.plot import Curve, Panel, draw  # matplotlib is among the development packages only

    panels: list[Panel] = []
    for pace in dict.fromkeys(pair.ours.pace for pair in pairs):
        rows = [row for pair in pairs for row in (pair.ours, pair.peer) if row is not None and row.pace == pace]
        streams = sorted({row.streams for row in rows})

        def curve(
            system: str, kinds: Sequence[str], rows: Sequence[ServingRow] = rows, xs: Sequence[int] = streams
        ) -> Curve:
            def cost(row: ServingRow) -> float:
                return sum(row.by_kind[kind] for kind in kinds) if kinds else row.us_a_token

            ys = [statistics.median(cost(row) for row in rows if (row.system, row.streams) == (system, x)) for x in xs]
            return xs, ys

        curves = {"ours": curve("ours", ()), "ours: frontend": curve("ours", ["frontend"])}
        curves["ours: shells and engines"] = curve("ours", ["shell", "engine"])
        if any(row.system == "peer" for row in rows):
            curves |= {"Dynamo": curve("peer", ()), "Dynamo: frontend": curve("peer", ["frontend"])}
            curves["Dynamo: mockers"] = curve("peer", ["mocker"])
        panels.append(Panel(f"CPU time a token, {pace}", "streams", "µs", curves))
    draw(panels, path, columns=2)


if __name__ == "__main__":
    sys.exit(main())
