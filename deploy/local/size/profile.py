"""`headrace profile`: measures the steps of one engine through its API, and writes the file that `plan` reads.

grid.py decides which points to measure; this module measures them, and writes the file after each.

    prefill   first token of a prompt of x new tokens after y cached ones, less what no step takes
    decode    time a token of x answers at once after prompts of y tokens, all of them cached before

Each point is measured twice at once, and then again in rounds: a machine that is slow for a while is then
not slow for one point alone. With several workers each point is measured at one of them alone, and then at all of them
at the same moment.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from deploy.local.size.files import check_parent, read_given
from deploy.local.size.flags import check_ranges
from deploy.local.size.grid import Place, TimeGrid
from deploy.local.size.profile_file import (
    FILE_LIMIT_BYTES,
    BusyTimes,
    Kind,
    MeasuredPoint,
    Profile,
    Subject,
    check_same,
    decode_profile,
    encode_profile,
)
from deploy.local.size.started_up import UpSizes, sizes_of, started_ups
from deploy.local.size.token_client import TimedAnswer, TokenClient, token_client
from deploy.local.terminal import Terminal
from deploy.local.usage import ProfileFlags
from shared.errors import ConfigError, Unavailable
from shared.measured_times import Point
from shared.version import VERSION

T = TypeVar("T")
WORKERS = 16
"""The most workers of a machine that are measured at once."""
LONGEST, MOST = 8192, 32
"""The tokens of the longest prompt, and the most answers at once, if the worker has room for them."""
LEAST_MOST = 8
"""The answers at once that are to have room before the longest prompt is longer."""
SHORTEST = 64
"""The tokens of the shortest prompt, and of the shortest context."""
PIECE = 16
"""The tokens of the shortest part of a prompt: steps often compute the rest of one."""
ANSWER_TOKENS = 32
LEAST_GAPS = {ANSWER_TOKENS: 8, 96: 8, 256: 1}
"""The tokens of answers → the least times between tokens, of each answer while all are under way. The longer ones are
for steps so short that the first of many answers has nearly ended when the last one begins."""
FIRST_REPETITIONS = 2
"""How often a point is measured at once; the grid's next points follow from these."""
REPETITIONS, MORE_REPETITIONS = 3, 5
"""How often in all, by rounds over all points; and how often one that is unsteady."""
LONG_S = 5.0
"""A point that takes about as long is measured twice alone."""
UNSTEADY = 0.1
"""The spread above which a point is measured more often."""
TOLERANCE = 0.08
"""A point between two others that is off from their line by less adds nothing."""
GRID_POINTS = 20
AGAIN_AFTER_S = (1.0, 5.0)
"""The pauses before a measurement that has failed is made again; after these it has failed."""
CACHED_MISS = 0.1
"""The part of a prompt's beginning that may be missing from the cache."""


class ProfileOptions(Struct, frozen=True, kw_only=True):
    """Checked flags of `profile`."""

    longest: int
    most: int
    """Both are 0 until it is known what the worker has room for, if they were not given."""
    limit_s: float
    out: Path
    url: str
    """The URL of the API; empty if an `up` is started."""
    workers: int
    """The workers of the machine; each has an `up` of its own."""
    model: str
    api_key: str
    state: Path | None
    """The state directory of the `up` that runs at `url`. None if that is elsewhere, or another server."""
    words: Sequence[str] = ()
    """The flags of the `up` to start."""


def check_flags(flags: ProfileFlags) -> None:
    """Raise ConfigError for numbers out of range."""
    ranges: dict[str, tuple[float, float]] = {"longest": (2 * SHORTEST, 1 << 20), "most": (1, 4096)}
    given = {name: limits for name, limits in ranges.items() if getattr(flags, name)}
    check_ranges(flags, {**given, "workers": (1, WORKERS), "limit_s": (1, 86_400)})
    check_parent("--out", flags.out)


def profile(options: ProfileOptions) -> int:
    """Measure and return the exit status. Raise ConfigError or Unavailable."""
    terminal = Terminal()
    if (found := _earlier(options.out, _subject(options))) is not None:  # before anything is started
        options = replace(options, longest=found.subject.longest, most=found.subject.most)
    with _endpoints(options, terminal) as (urls, state), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(_measure(options, urls, state, terminal))
    terminal.clear()
    print(_summary(made, options.out))
    return 0 if made.complete else 1


@contextmanager
def _endpoints(options: ProfileOptions, terminal: Terminal) -> Iterator[tuple[Sequence[str], Path | None]]:
    """Yield the URL of each worker's API, and the state directory of the first one's `up`, if it is of this machine."""
    if options.url:
        yield [options.url], options.state
        return
    with started_ups(options.words, options.workers, terminal) as found:
        yield [url for url, _ in found], found[0][1]


async def _measure(options: ProfileOptions, urls: Sequence[str], state: Path | None, terminal: Terminal) -> Profile:
    url = urls[0]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(token_client(each, options.model, options.api_key)) for each in urls]
        asked = clients[0]
        served = await asked.models()
        asked.model = asked.model or (served[0] if served else "")
        if asked.model not in served:
            has = ", ".join(served) or "none"
            raise Unavailable(f"{url} does not serve {asked.model or 'a model'}; it has {has}")
        sizes = UpSizes() if state is None else await asyncio.to_thread(sizes_of, state, asked.model)
        workers = max(await asked.workers(), sizes.workers) if options.url else 1  # one in each `up` that was started
        _check_workers(workers, asked.model, url)
        if not options.out.exists():  # a sweep that goes on keeps its sizes
            options = fitted(options, sizes)
        terminal.notice(f"prompts of up to {options.longest} tokens, up to {options.most} answers at once")
        subject = _subject(options, asked.model, {"headrace": VERSION, "server": await asked.version()})
        known = _earlier(options.out, subject)
        await asked.learn_ids()
        for client in clients[1:]:
            client.model, client.ids = asked.model, asked.ids
        sweep = Sweep(clients, options, subject, known, terminal, sizes, workers_seen=workers > 0)
        try:
            await sweep.run()
        except asyncio.CancelledError:  # Ctrl-C: the file has what was measured
            terminal.clear()
            terminal.notice(f"{options.out} has {len(sweep.points)} points; the same command goes on with it")
            raise
        return sweep.profile(complete=True) if sweep.finished else sweep.profile(complete=False)


def fitted(options: ProfileOptions, sizes: UpSizes) -> ProfileOptions:
    """Return the options with the sizes that were not given, for which the worker has room. Raise ConfigError if it has
    none for those that were. *Pure.*"""
    kv_tokens = sizes.kv_tokens or 1 << 40
    room, each = min(kv_tokens, sizes.context_tokens or kv_tokens), max(LEAST_GAPS) + sizes.block_size
    fits = min(LONGEST, (room - 1) // 2, kv_tokens // (options.most or LEAST_MOST) - each)
    longest = options.longest or max(2 * SHORTEST, fits // SHORTEST * SHORTEST)
    most = options.most or max(1, min(MOST, kv_tokens // (longest + each)))
    each = ANSWER_TOKENS + sizes.block_size  # what the shortest answers need
    if room <= 2 * longest or most > max(1, kv_tokens // (longest + each)):
        raise ConfigError(
            f"prompts of {longest} tokens after as many, and {most} answers at once after {longest}, take"
            f" {max(2 * longest + 1, most * (longest + each))} tokens; the worker has room for {kv_tokens}, and a"
            f" context of {room} at most: give a shorter --longest, a smaller --most, or leave both out"
        )
    return replace(options, longest=longest, most=most)


def _check_workers(workers: int, model: str, url: str) -> None:
    """Raise ConfigError if an endpoint has several workers."""
    if workers > 1:
        raise ConfigError(
            f"{url}: {workers} workers serve {model}, which share the requests, and a profile has the times of one: "
            "drain the others, or give flags of `up` after --, for one worker that is started (--workers N for N)"
        )


def _subject(options: ProfileOptions, model: str = "", versions: Mapping[str, str] | None = None) -> Subject:
    """Return what is measured, as far as it is known."""
    return Subject(
        model=model,
        server=options.url or " ".join(options.words) or "up",
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {platform.node()}",
        versions=versions or {},
        longest=options.longest,
        most=options.most,
        workers=options.workers,
    )


def _earlier(out: Path, subject: Subject) -> Profile | None:
    """Return the file of an earlier sweep, if there is one. Raise ConfigError if it has something else."""
    if not out.exists():
        return None
    found = decode_profile(read_given(out, FILE_LIMIT_BYTES, "--out"), str(out))
    check_same(found.subject, subject, str(out))
    return found


class Sweep:
    """One sweep; `points` has all that was measured."""

    def __init__(
        self,
        clients: Sequence[TokenClient],
        options: ProfileOptions,
        subject: Subject,
        known: Profile | None,
        terminal: Terminal,
        sizes: UpSizes,
        *,
        workers_seen: bool,
    ) -> None:
        points = () if known is None else known.points
        self._found: dict[tuple[Kind, int, int], MeasuredPoint] = {(each.kind, each.x, each.y): each for each in points}
        self.finished = False
        self._clients = clients
        self._asked = clients[0]
        self._options = options
        self._subject = subject
        self._terminal = terminal
        self._sizes = sizes
        self._workers_seen = workers_seen
        self._overhead_s = 0.0 if known is None else known.overhead_s
        self._cached_seen = known is not None and known.cached_seen
        self._seeds = count(sum(each.repetitions for each in points) * 1000)
        self._until_s = time.monotonic() + options.limit_s
        longest = options.longest
        self._grids: dict[Kind, TimeGrid] = {
            "decode": self._grid("decode", (1, options.most), (SHORTEST, longest), (1, SHORTEST)),
            "prefill": self._grid("prefill", (PIECE, longest), (0, longest), (PIECE, SHORTEST)),
        }

    def _grid(self, kind: Kind, xs: Place, ys: Place, step: Place) -> TimeGrid:
        grid = TimeGrid(xs, ys, step=step, tolerance=TOLERANCE, most=GRID_POINTS)
        for point in self.points:
            if point.kind == kind:
                _note(grid, point)
        return grid

    @property
    def points(self) -> list[MeasuredPoint]:
        """All that was measured, in the order of the first repetitions."""
        return list(self._found.values())

    async def run(self) -> None:
        """Measure until both grids are complete and their points have been measured often enough, or until the time is
        over."""
        if not self._found:
            await self._with_more_tries(self._learn_overhead)
        while ahead := self._ahead():
            _, kind, place = min(ahead)  # in turn, so that soon both have their corners
            await self._point(kind, place, FIRST_REPETITIONS)
            if self._is_over():  # after a point, so that each call gets on
                return
        while places := self._unsure():
            for kind, place in places:
                await self._point(kind, place, 1)
                if self._is_over():
                    return
        self.finished = True
        self._options.out.write_bytes(encode_profile(self.profile(complete=True)))

    def _ahead(self) -> list[tuple[int, Kind, Place]]:
        """Return for each grid that is not complete how many points it has, its kind, and its next point."""
        ahead = list[tuple[int, Kind, Place]]()
        for kind, grid in self._grids.items():
            if (place := grid.next()) is not None:
                ahead.append((len(grid.seconds), kind, place))
        return ahead

    def _is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    def _unsure(self) -> list[tuple[Kind, Place]]:
        """Return the points of both grids that are to be measured once more."""
        unsure: list[tuple[Kind, Place]] = []
        for kind, grid in self._grids.items():
            places = [place for place in grid.places() if _is_unsure(self._found[kind, *place])]
            unsure.extend((kind, place) for place in places)
        return unsure

    def profile(self, *, complete: bool) -> Profile:
        """Return what was measured so far."""
        prefill, decode = self._points_of("prefill"), self._points_of("decode")
        busy = BusyTimes(self._busy("prefill"), self._busy("decode")) if self._several else None
        return Profile(
            subject=self._subject,
            when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            complete=complete,
            overhead_s=self._overhead_s,
            cached_seen=self._cached_seen,
            workers_seen=self._workers_seen,
            block_size=self._sizes.block_size,
            kv_tokens=self._sizes.kv_tokens,
            prefill=prefill,
            decode=decode,
            busy=busy,
            points=self.points,
        )

    @property
    def _several(self) -> bool:
        return self._subject.workers > 1

    def _points_of(self, kind: Kind) -> list[Point]:
        """Return the times of a grid; empty if a corner is missing."""
        return self._filled(kind, lambda point: point.seconds)

    def _busy(self, kind: Kind) -> list[Point]:
        """Return the times of these points while all workers are busy."""
        return self._filled(kind, lambda point: point.busy_s)

    def _filled(self, kind: Kind, time_of: Callable[[MeasuredPoint], float]) -> list[Point]:
        times = {(each.x, each.y): time_of(each) for each in self.points if each.kind == kind}
        return [*self._grids[kind].filled(times)]

    async def _learn_overhead(self) -> None:
        """Measure what a first token takes without its step: that of a prompt of one token, less one decode step."""
        await self._whole(self._asked.prompt("warm-up", SHORTEST), ANSWER_TOKENS)
        firsts = [await self._first_s(1) for _ in range(MORE_REPETITIONS)]
        step_s = median([await self._decode_s((1, SHORTEST), self._clients[:1]) for _ in range(REPETITIONS)])
        self._overhead_s = max(0.0, median(firsts) - step_s)

    async def _point(self, kind: Kind, place: Place, repetitions: int) -> None:
        """Measure a point `repetitions` times more: at one worker and, if they are several, at all of them in turn, so
        that other programs disturb both alike. Write the file."""
        groups = [self._clients[:1], self._clients][: 2 if self._several else 1]
        timed = self._prefill_s if kind == "prefill" else self._decode_s
        found = self._found.get((kind, *place))
        alone, busy = ([], []) if found is None else (list(found.times), list(found.busy_times))
        for _ in range(repetitions):
            for group, seconds in zip(groups, (alone, busy), strict=False):
                seconds.append(max(1e-6, await self._with_more_tries(partial(timed, place, group))))
        point = MeasuredPoint(
            kind,
            *place,
            seconds=median(alone),
            spread=_spread(alone),
            repetitions=len(alone),
            busy_s=median(busy) if busy else 0.0,
            busy_spread=_spread(busy) if busy else 0.0,
            times=alone,
            busy_times=busy,
        )
        self._found[kind, *place] = point
        _note(self._grids[kind], point)
        self._terminal.progress("profile", self._done())
        self._options.out.write_bytes(encode_profile(self.profile(complete=False)))

    async def _with_more_tries(self, measure: Callable[[], Awaitable[T]]) -> T:
        """Return what is measured. What has failed is measured again a few times, as a busy endpoint answers later.
        Raise Unavailable."""
        for pause_s in AGAIN_AFTER_S:
            try:
                return await measure()
            except Unavailable as wrong:
                if self._is_over():
                    raise
                self._terminal.notice(f"measured again in {pause_s:g} s: {' '.join(str(wrong).split())}")
            await asyncio.sleep(pause_s)
        return await measure()

    def _done(self) -> float:
        """Return the part of all repetitions that has been made, as far as they are known."""
        made = sum(min(point.repetitions, REPETITIONS) for point in self.points)
        left = REPETITIONS * sum(grid.left for grid in self._grids.values())
        return made / (left + REPETITIONS * len(self._found))

    # --- what is timed

    async def _prefill_s(self, place: Place, clients: Sequence[TokenClient]) -> float:
        """Return the time of a prompt, the mean of these workers', which all get one at the same moment."""
        tokens, before = place
        beginning = self._asked.prompt("beginning", before)
        if before:  # each time: since the last one other prompts may have taken its room
            end = self._asked.prompt("end", SHORTEST)
            await _all(client.ask([*beginning, *end], 1) for client in self._clients)
        prompt = [*beginning, *self._new_prompt(tokens)]
        answers = await _all(client.ask(prompt, 1) for client in clients)
        for answer in answers:
            self._check_cached(answer, before)
        return fmean(answer.first_s - answer.sent_s for answer in answers) - self._overhead_s

    async def _decode_s(self, place: Place, clients: Sequence[TokenClient]) -> float:
        """Return the time a token of answers that are all under way at once, `batch` at each of these workers. Raise
        Unavailable if they are not."""
        batch, context = place
        prompts = [self._asked.prompt(f"{os.getpid()} decode {context} {number}", context) for number in range(batch)]
        asks = [(client, prompt) for prompt in prompts for client in clients]
        await _all(client.ask(prompt, 1) for client, prompt in asks)
        for tokens, least_gaps in LEAST_GAPS.items():
            answers = await _all(client.ask(prompt, tokens) for client, prompt in asks)
            if (seconds := together_s(answers, least_gaps)) is not None:
                return seconds
        raise Unavailable(
            f"{batch} answers after prompts of {context} tokens do not run at once: "
            "give a smaller --most, or a shorter --longest"
        )

    async def _first_s(self, tokens: int) -> float:
        answer = await self._asked.ask(self._new_prompt(tokens), 1)
        return answer.first_s - answer.sent_s

    async def _whole(self, prompt: Sequence[int], tokens: int) -> TimedAnswer:
        answer = await self._asked.ask(prompt, tokens)
        if answer.tokens != tokens:
            raise Unavailable(f"an answer had {answer.tokens} tokens, not {tokens}: the endpoint ignores ignore_eos")
        return answer

    def _new_prompt(self, tokens: int) -> list[int]:
        """Return a prompt that no cache has, of another run either."""
        return self._asked.prompt(f"{os.getpid()} {next(self._seeds)}", tokens)

    def _check_cached(self, answer: TimedAnswer, before: int) -> None:
        """Raise Unavailable if a prompt's beginning was not cached."""
        if answer.cached_tokens is None or not before:
            return
        self._cached_seen = True
        if before - answer.cached_tokens > CACHED_MISS * before + SHORTEST:
            raise Unavailable(
                f"of {before} tokens that were sent before, {answer.cached_tokens} were cached: "
                "is prefix caching on, and is there room for them? A shorter --longest needs less"
            )


async def _all(asks: Iterable[Coroutine[Any, Any, TimedAnswer]]) -> list[TimedAnswer]:
    """Return all answers to requests that are made at once. Raise the first error when none is under way any longer."""
    answers = await asyncio.gather(*asks, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, TimedAnswer)]


def together_s(answers: Sequence[TimedAnswer], least_gaps: int) -> float | None:
    """Return the time a token while all answers are under way: steps before that have fewer answers, and ends of
    prompts. None if one of them has fewer times between tokens then. *Pure.*"""
    begin_s = max(answer.first_s for answer in answers)
    end_s = min(answer.last_s for answer in answers) - 1e-6  # without the event after a last token, which has none
    each_s = list[float]()
    for answer in answers:
        times_s = [at_s for at_s in accumulate(answer.gaps_s, initial=answer.first_s) if begin_s <= at_s < end_s]
        gaps = len(times_s) - 1
        if gaps < least_gaps:
            return None
        together = max(1.0, (answer.tokens - 1) / len(answer.gaps_s))  # the tokens of a piece
        each_s.append((times_s[-1] - times_s[0]) / gaps / together)
    return median(each_s)


def _is_unsure(point: MeasuredPoint) -> bool:
    """Return whether a point needs another repetition. One of an older version's file gets none."""
    long_s = point.seconds * (ANSWER_TOKENS if point.kind == "decode" else 1)
    if not point.times or point.repetitions >= MORE_REPETITIONS or long_s > LONG_S:
        return False
    return point.repetitions < REPETITIONS or max(point.spread, point.busy_spread) > UNSTEADY


def _spread(times: Sequence[float]) -> float:
    return (max(times) - min(times)) / median(times)


def _note(grid: TimeGrid, point: MeasuredPoint) -> None:
    """Give a grid a point's first repetitions, from which its further points follow: they stay as they are."""
    first = point.times[:FIRST_REPETITIONS]
    place = point.x, point.y
    grid.seconds[place], grid.spread[place] = (
        (median(first), _spread(first)) if first else (point.seconds, point.spread)
    )


def _summary(made: Profile, out: Path) -> str:
    """Return what people read at the end."""
    goes_on = "the same command goes on, and --limit-s gives it longer"
    tables: dict[Kind, list[Point]] = {"prefill": made.prefill, "decode": made.decode}
    unsteady = [point for point in made.points if point.spread > 2 * UNSTEADY]
    lines = [f"{out}: {len(made.prefill)} times of prefills, {len(made.decode)} of decodes, {made.subject.model}"]
    if not all(tables.values()):
        few = f"{len(made.points)} points are too few, as the corners of both grids are needed"
        lines = [f"{out}: {few}; {goes_on}"]
    elif not made.complete:
        times = {(kind, x, y) for kind, rows in tables.items() for x, y, _ in rows}
        follow = len(times - {(point.kind, point.x, point.y) for point in made.points})
        lines.append(
            f"note: the time was over after {len(made.points)} points, and {follow} of these times follow from those"
            f" around them; {goes_on}"
        )
    if not made.cached_seen and any(point.kind == "prefill" and point.y for point in made.points):
        lines.append("note: the server does not report cached tokens: prompts after a cached beginning are unchecked")
    if not made.workers_seen:
        lines.append("note: the server does not say how many workers it has: the times are right if it is one")
    if unsteady:
        share = f"{len(unsteady)} of {len(made.points)} points"
        lines.append(f"note: {share} spread by more than {2 * UNSTEADY:.0%}: was the machine busy?")
    return "\n".join(lines)
