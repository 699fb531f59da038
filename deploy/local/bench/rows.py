"""Sums up the results of `headrace bench`: one row for each load. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from deploy.local.bench.plan import Point, load_name
from deploy.local.bench.terms import Spread, Terms, missed, queue_grows, spread
from deploy.local.table import table

Outcome = Literal["done", "ended early", "refused", "failed", "timed out", "unreadable", "unreachable"]
"""The end of a request. Refused: status 429 or 503. Ended early: the stream ended before its finish reason."""


LATE_S = 0.1
"""If a tenth of an open loop's sessions begin later than planned by more than this, its rate was not as planned."""


class Result(Struct, frozen=True):
    """The result of one request. Times are seconds since it was sent."""

    outcome: Outcome
    reason: str = ""
    first_s: float | None = None
    """Time of the first event with text."""
    last_s: float = 0.0
    """Time of the last event with text."""
    ended_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Times between events with text."""
    events: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """The server's count. None if it sent no usage."""
    retry_after_s: float = 0.0
    cached_tokens: int | None = None
    """The prompt's tokens that were found in a cache. None if the server does not say it."""
    sent_at_s: float = 0.0
    """When it was sent, in seconds of a clock that all requests of a load share."""
    turn: int = 1
    """Which turn of its session it was."""
    late_s: float = 0.0
    """By how much the first request of a session was sent later than an open loop had planned."""
    asked_tokens: int = 0
    """How many tokens the answer was to have."""
    images: int = 0
    """How many images it had."""


class TurnRow(Struct, frozen=True):
    """Some turns of agents' sessions."""

    first: int
    last: int
    """Number of the last of these turns."""
    requests: int
    """The requests of these turns that were done."""
    first_token_s: Spread
    prompt_tokens: float | None
    cached_ratio: float | None


class RowKey(Struct, frozen=True):
    """What was measured, when a bench compares."""

    variant: str = ""
    """The settings that differ between the fleets, such as `policy=kv`. Empty if there is one fleet."""
    round: int = 1
    may_stop: bool = False
    """True if answers may be shorter than asked for."""
    terms: Terms = Terms()


class BenchRow(Struct, frozen=True):
    """The measurement of one load."""

    load: str
    value: float
    requests: int
    """Number of requests that ended, with any outcome."""
    outcomes: Mapping[str, int]
    reasons: Mapping[str, int]
    """Reason → number of requests that were not done because of it; the most frequent ones."""
    seconds: float
    """Time from the first request to the last end."""
    first_token_s: Spread
    inter_token_s: Spread
    """Times between events with text. If events have several tokens, these are fewer and longer than between tokens."""
    time_per_token_s: Spread
    """Time from the first to the last token of each request, divided by the number of tokens after the first; of
    answers that came in more than one piece."""
    whole_s: Spread
    requests_per_s: float
    tokens_per_s: float
    tokens_by: Literal["usage", "events"]
    """Source of the token counts: the server's usage or, if a request had none, the events, one token each."""
    prompt_tokens: float | None
    """Mean number of prompt tokens."""
    driver_cpu: float
    """Share of one core that the driver used. Near 1, the numbers measure the driver and not the server."""
    complete: bool
    """True if all planned requests were sent and have ended."""
    variant: str = ""
    round: int = 1
    scenario: str = "mixed"
    prefix_ratio: float | None = None
    cached_ratio: float | None = None
    """The share of all prompts' tokens that were found in caches. None if the server does not say it."""
    prompt_tokens_per_s: float | None = None
    short_answers: int = 0
    """Answers that have fewer tokens than were asked for with ignore_eos."""
    late_s: float = 0.0
    """By how much sessions of an open loop began later than planned, p90."""
    untimed: int = 0
    """Answers of several tokens that came in one piece, or without text: their tokens have no times."""
    turns: Sequence[TurnRow] = ()
    """Measurements by turn, if sessions have several."""
    missed: Mapping[str, float] = {}
    """The targets that do not hold, such as `ttft_p90`, with the figure divided by the target."""
    good_per_s: float | None = None
    """Goodput: requests a second that were done within the targets, each taken as a limit of single requests. None if
    there are no targets."""
    queue_grows: bool | None = None
    """Whether first tokens came later and later. None in a closed loop."""
    tokens_per_gpu_hour: float | None = None
    """Output tokens. None if no price, power or number of GPUs is known."""
    price_per_million_tokens: float | None = None
    watt_hours_per_million_tokens: float | None = None
    images: int = 0
    """The images of the requests that were done."""
    images_per_s: float | None = None
    """None if there were none."""

    @property
    def name(self) -> str:
        """The load in words."""
        return load_name(self.load, self.value, self.scenario, self.prefix_ratio)

    @property
    def full_name(self) -> str:
        """The load, the fleet and the round in words."""
        return f"{self.name}, {self.variant}, round {self.round}" if self.variant else self.name


def row_of(
    point: Point,
    results: Sequence[Result],
    seconds: float,
    driver_cpu: float,
    *,
    planned: int | None = None,
    key: RowKey = RowKey(),  # noqa: B008 - it is frozen
) -> BenchRow:
    """Return the row of a point, of which `planned` requests were to be sent. Latencies count only requests that were
    done; tokens count all that arrived."""
    done = [result for result in results if result.outcome == "done"]
    counted = [result.completion_tokens for result in results]
    tokens = sum(result.events if count is None else count for result, count in zip(results, counted, strict=True))
    reported = all(result.completion_tokens is not None for result in done)
    prompts = [result.prompt_tokens for result in done if result.prompt_tokens is not None]
    lasting_s, terms = max(seconds, 1e-9), key.terms
    per_gpu_hour = 3600 * tokens / lasting_s / terms.gpus
    first_token_s = spread([result.first_s for result in done if result.first_s is not None])
    inter_token_s = spread([gap for result in done for gap in result.gaps_s])
    firsts = [(result.sent_at_s, result.first_s) for result in done if result.first_s is not None]
    images = sum(result.images for result in done)
    return BenchRow(
        load=point.load,
        value=point.value,
        requests=len(results),
        outcomes=Counter(result.outcome for result in results),
        reasons=dict(Counter(result.reason for result in results if result.outcome != "done").most_common(8)),
        seconds=seconds,
        first_token_s=first_token_s,
        inter_token_s=inter_token_s,
        time_per_token_s=spread([each for result in done if (each := _time_per_token_s(result)) is not None]),
        whole_s=spread([result.ended_s for result in done]),
        requests_per_s=len(done) / lasting_s,
        tokens_per_s=tokens / lasting_s,
        tokens_by="usage" if reported else "events",
        prompt_tokens=_mean(prompts),
        driver_cpu=driver_cpu,
        complete=len(results) == (point.requests if planned is None else planned),
        variant=key.variant,
        round=key.round,
        scenario=point.scenario,
        prefix_ratio=point.prefix_ratio,
        cached_ratio=_cached_ratio(done),
        prompt_tokens_per_s=sum(prompts) / lasting_s if prompts else None,
        short_answers=0 if key.may_stop else sum(_is_short(result) for result in done),
        late_s=spread([result.late_s for result in results if result.turn == 1]).p90 or 0.0,
        untimed=sum(_is_untimed(result) for result in done),
        turns=_by_turn(done),
        missed=missed(terms.targets, first_token_s, inter_token_s),
        good_per_s=sum(_is_good(result, terms) for result in done) / lasting_s if terms.targets else None,
        queue_grows=None if point.loop == "closed" else queue_grows(firsts),
        tokens_per_gpu_hour=per_gpu_hour if terms.price or terms.gpu_watts or terms.gpus > 1 else None,
        price_per_million_tokens=1e6 * terms.price / per_gpu_hour if terms.price and tokens else None,
        watt_hours_per_million_tokens=1e6 * terms.gpu_watts / per_gpu_hour if terms.gpu_watts and tokens else None,
        images=images,
        images_per_s=images / lasting_s if images else None,
    )


def _is_good(result: Result, terms: Terms) -> bool:
    """Return whether a request was done within the limits of single requests. An answer without the times that are
    limited was not."""
    ttft_s, itl_s = terms.limit_s("ttft"), terms.limit_s("itl")
    if ttft_s is not None and (result.first_s is None or result.first_s > ttft_s):
        return False
    each_s = _time_per_token_s(result)
    return itl_s is None or (each_s <= itl_s if each_s is not None else not _is_untimed(result))


def _by_turn(done: Sequence[Result]) -> list[TurnRow]:
    """Return the rows of the turns 1, 2 to 4, 5 to 16 and so on; none if all requests are first ones."""
    groups: dict[int, list[Result]] = {}
    for result in sorted(done, key=lambda result: result.turn):
        groups.setdefault((result.turn - 1).bit_length() + 1 >> 1, []).append(result)
    if max(groups, default=0) < 1:
        return []
    return [
        TurnRow(
            first=group[0].turn,
            last=group[-1].turn,
            requests=len(group),
            first_token_s=spread([result.first_s for result in group if result.first_s is not None]),
            prompt_tokens=_mean([result.prompt_tokens for result in group if result.prompt_tokens is not None]),
            cached_ratio=_cached_ratio(group),
        )
        for group in groups.values()
    ]


def _cached_ratio(done: Sequence[Result]) -> float | None:
    """Return the share of the prompts' tokens that were cached. None if no server said it."""
    said = [(result.cached_tokens, result.prompt_tokens or 0) for result in done if result.cached_tokens is not None]
    return sum(cached for cached, _ in said) / max(1, sum(prompt for _, prompt in said)) if said else None


def _mean(numbers: Sequence[int]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _is_short(result: Result) -> bool:
    return result.completion_tokens is not None and result.completion_tokens < result.asked_tokens


def _is_untimed(result: Result) -> bool:
    return result.events < 2 and (result.completion_tokens or 0) > max(1, result.events)


def _time_per_token_s(result: Result) -> float | None:
    tokens = result.events if result.completion_tokens is None else result.completion_tokens
    if result.first_s is None or result.events < 2 or tokens < 2:
        return None
    return (result.last_s - result.first_s) / (tokens - 1)


def render(rows: Sequence[BenchRow]) -> str:
    """Return the rows as a table with latencies in ms, and notes."""
    head = "LOAD  DONE  FAILED  TTFT MS P50  P99  INTER-TOKEN MS P50  P99  WHOLE MS P50  P99  TOKENS/S  REQ/S  CACHED"
    seen = any(row.images for row in rows)
    head += "  IMAGES  IMAGES/S" if seen else ""
    cells: list[Sequence[object]] = []
    for row in rows:
        done = row.outcomes.get("done", 0)
        spreads = (row.first_token_s, row.inter_token_s, row.whole_s)
        latencies = [_ms(share) for each in spreads for share in (each.p50, each.p99)]
        rates = (f"{row.tokens_per_s:,.0f}", f"{row.requests_per_s:,.1f}")
        cached = "-" if row.cached_ratio is None else f"{row.cached_ratio:.0%}"
        images = (row.images, f"{row.images_per_s or 0:,.1f}") if seen else ()
        cells.append((row.full_name, done, row.requests - done, *latencies, *rates, cached, *images))
    return "\n".join([table(head, cells), *(note for row in rows for note in notes(row))])


def render_turns(rows: Sequence[BenchRow]) -> str:
    """Return the turns of rows as a table."""
    cells = [
        (
            row.full_name,
            f"{turn.first}" if turn.first == turn.last else f"{turn.first} to {turn.last}",
            turn.requests,
            "-" if turn.prompt_tokens is None else f"{turn.prompt_tokens:,.0f}",
            *(_ms(share) for share in (turn.first_token_s.p50, turn.first_token_s.p90, turn.first_token_s.p99)),
            "-" if turn.cached_ratio is None else f"{turn.cached_ratio:.0%}",
        )
        for row in rows
        for turn in row.turns
    ]
    return table("LOAD  TURNS  DONE  PROMPT TOKENS  TTFT MS P50  P90  P99  CACHED", cells)


def render_terms(rows: Sequence[BenchRow]) -> str:
    """Return what rows reach of their targets and what they cost, as a table. Empty if they have neither."""
    power = any(row.watt_hours_per_million_tokens is not None for row in rows)
    cells = [
        (
            row.full_name,
            "-" if row.good_per_s is None else f"{row.good_per_s:,.2f}",
            ", ".join(f"{name} {ratio:.0%}" for name, ratio in row.missed.items()) or "-",
            "-" if row.tokens_per_gpu_hour is None else f"{row.tokens_per_gpu_hour:,.0f}",
            "-" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:,.2f}",
            *([f"{row.watt_hours_per_million_tokens or 0:,.0f}"] if power else []),
        )
        for row in rows
        if row.tokens_per_gpu_hour is not None or row.good_per_s is not None
    ]
    more = "  WH/M TOKENS" if power else ""
    return table(f"LOAD  GOOD REQ/S  MISSED  TOKENS/GPU HOUR  PRICE/M TOKENS{more}", cells) if cells else ""


def notes(row: BenchRow) -> list[str]:
    """Return warnings about a row."""
    failed = {name: number for name, number in row.outcomes.items() if name != "done"}
    found: list[str] = []
    if failed:
        reason = next(iter(row.reasons), "")
        counts = ", ".join(f"{number} {name}" for name, number in failed.items())
        found.append(f"{row.full_name}: {counts}" + (f" ({reason})" if reason else ""))
    if row.short_answers:
        found.append(
            f"{row.full_name}: {row.short_answers} answers have fewer tokens than were asked for: the endpoint ignores "
            "ignore_eos, or prompts leave no room for them; with --may-stop this is not noted"
        )
    if row.untimed:
        found.append(
            f"{row.full_name}: {row.untimed} answers came in one piece, or without text: the times of their tokens are "
            "not known; the endpoint, or a proxy before it, does not stream"
        )
    if row.queue_grows:
        found.append(f"{row.full_name}: first tokens came later and later: the rate is more than is served")
    if row.tokens_by == "events":
        found.append(f"{row.full_name}: the server sent no usage; each event counts as one token")
    if row.late_s > LATE_S:
        found.append(
            f"{row.full_name}: one request of ten was sent {row.late_s:.2f} s late or later: this driver is too slow "
            "for the load, and less than that was measured"
        )
    if row.driver_cpu > 0.8:
        found.append(
            f"{row.full_name}: this driver used {row.driver_cpu:.0%} of a core: it may be the limit, not the server"
        )
    if not row.complete:
        found.append(f"{row.full_name}: not complete")
    return found


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"
