"""Writes a plan as one static page: the fleets over price and latency, each with its flags to copy. Pure.

The page has no script and asks no server. Each point of the picture is a link to its fleet below, with a name that
screen readers say; flags stand in a text field, where Ctrl-A selects them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from html import escape
from math import ceil

from msgspec import Struct

from deploy.local.size.flags import TARGETS
from deploy.local.size.plan_files import up_words
from deploy.local.size.plan_report import PlanReport, PlanRow, order_of
from deploy.local.size.search import figures_of

WIDTH, HEIGHT, LEFT, BELOW = 720, 360, 64, 44
COMPARED = "FIGURE  PLANNED  MEASURED  OFF BY"
"""The columns of `compared`."""
TALLEST = 3.0
"""A fleet whose worst figure is more than N times its target is drawn at this height, N."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --back: #fff; --good: #00695c; --bad: #b3261e; --line: #8a8a8a }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --back: #161616; --good: #6fd7c6; --bad: #ffb4ab } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto } svg text { fill: var(--ink); font-size: 12px }
.front { fill: var(--good) } .other { fill: none; stroke: var(--line); stroke-width: 2 }
.misses.front { fill: var(--bad) } .misses.other { stroke: var(--bad) }
a:focus-visible .point, a:hover .point { stroke: var(--ink); stroke-width: 4 }
textarea { width: 100%; font: 14px/1.4 ui-monospace, monospace; box-sizing: border-box }
section:target { outline: 2px solid var(--good); outline-offset: .5rem }
"""


class Measured(Struct, frozen=True):
    """What `headrace bench` measured of a fleet: names of figures and seconds, or tokens a second."""

    name: str
    figures: dict[str, float]


class BenchLoad(Struct, frozen=True):
    """The part of a load of `headrace bench` that is compared."""

    load: str
    value: float
    first_token_s: dict[str, float | None]
    inter_token_s: dict[str, float | None]
    tokens_per_s: float


class BenchFile(Struct, frozen=True):
    """The part of the file of `headrace bench` that is read."""

    rows: list[BenchLoad]


def measured_of(row: BenchLoad) -> Measured:
    """Return the figures of a measured load."""
    spreads = {"ttft": row.first_token_s, "itl": row.inter_token_s}
    found = {_title(name): spreads[name[:-4]].get(name[-3:]) for name in TARGETS}
    figures = {title: seconds for title, seconds in found.items() if seconds is not None}
    return Measured(f"{row.load} {row.value:g}", {**figures, "tokens": row.tokens_per_s})


def front_of(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the fleets of which no other is both as cheap and as good, the cheapest first. Those that were given up
    are left out: their figures are not known."""
    found = list[PlanRow]()
    for row in sorted(rows, key=lambda each: (each.gpus, worst_of(each))):
        if not _is_unknown(row) and (not found or worst_of(row) < worst_of(found[-1])):
            found.append(row)
    return found


def worst_of(row: PlanRow) -> float:
    """Return a fleet's worst figure as a share of its target."""
    return max(row.of_target.values())


def page(made: PlanReport, measured: Sequence[Measured] = ()) -> str:
    """Return the page."""
    front = front_of(made.rows)
    answer = "No fleet of those that were tried meets the targets." if made.best is None else _answer(made.best)
    targets = ", ".join(f"{_title(name)} {limit:g} s" for name, limit in made.targets.items())
    body = [
        f"<h1>Fleets for {escape(made.model)}</h1>",
        f"<p>{made.requests:,} requests, {made.requests_per_s:.3g} a second. Targets: {escape(targets)}. "
        f"<strong>{escape(answer)}</strong></p>",
        *_picture(made, front),
        *_measured(made, measured),
        "<h2>All fleets</h2>",
        *_table(made, front),
        "<h2>How to start each</h2>",
        *(line for number, row in enumerate(made.rows) for line in _section(number, row, made)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Fleets for {escape(made.model)}</title>\n<style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _answer(best: PlanRow) -> str:
    return f"The cheapest that meets them: {best.name}."


def _is_unknown(row: PlanRow) -> bool:
    return row.result.given_up or bool(row.result.failed)


def _title(name: str) -> str:
    kind, share = name.split("_")
    return f"{'first token' if kind == 'ttft' else 'between tokens'} {share}"


def _spoken(row: PlanRow) -> str:
    """Return a fleet in one sentence."""
    says = "meets the targets" if row.meets else "misses the targets"
    at = f"at least {worst_of(row):.0%}" if _is_unknown(row) else f"{worst_of(row):.0%}"
    return f"{row.name}: {row.gpus} {'GPU' if row.gpus == 1 else 'GPUs'}, {at} of its worst target, {says}"


def _picture(made: PlanReport, front: Sequence[PlanRow]) -> Iterator[str]:
    """Yield the picture: GPUs to the right, the worst figure as a share of its target upwards."""
    most = max(row.gpus for row in made.rows)
    tall = min(TALLEST, max(1.2, max(worst_of(row) for row in made.rows)))

    def place(gpus: float, worst: float) -> tuple[float, float]:
        right = LEFT + (WIDTH - LEFT - 20) * gpus / (most * 1.05)
        return right, (HEIGHT - BELOW) - (HEIGHT - BELOW - 16) * min(worst, tall) / tall

    yield f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-labelledby="seen">'
    yield '<title id="seen">GPUs of each fleet, and its worst figure as a share of its target; 100% is just met</title>'
    for share in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        if share <= tall:
            _, y = place(0, share)
            dashes = "" if share == 1 else ' stroke-dasharray="2 6"'
            yield f'<path d="M{LEFT} {y:.0f}H{WIDTH - 20}" stroke="currentColor" opacity=".5"{dashes}/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>'
    for gpus in range(0, most + 1, max(1, ceil(most / 10))):
        x, y = place(gpus, 0)
        yield f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{gpus}</text>'
    yield f'<text x="{WIDTH - 20}" y="{HEIGHT - 4}" text-anchor="end">GPUs</text>'
    if len(front) > 1:
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y in (place(row.gpus, worst_of(row)) for row in front))
        yield f'<polyline points="{line}" fill="none" stroke="currentColor" opacity=".6"/>'
    for number, row in sorted(enumerate(made.rows), key=lambda each: each[1] in front):  # the front lies above
        x, y = place(row.gpus, worst_of(row))
        kind = ("front" if row in front else "other") + ("" if row.meets else " misses")
        said = escape(_spoken(row), quote=True)
        yield f'<a href="#fleet-{number}" aria-label="{said}"><title>{said}</title>'
        yield f'<circle class="point {kind}" cx="{x:.0f}" cy="{y:.0f}" r="7"/></a>'
    yield "</svg><figcaption>Upwards: the worst figure, as a share of its target. Filled: no other fleet is both as"
    yield "cheap and as good. Each point leads to its fleet, whose name begins with the number of its workers."
    yield "</figcaption></figure>"


def _measured(made: PlanReport, measured: Sequence[Measured]) -> Iterator[str]:
    """Yield a table of what the best fleet should do and what `bench` measured."""
    for each in measured:
        yield f"<h2>Planned and measured: {escape(made.rows[0].name)}, {escape(each.name)}</h2>"
        yield '<table><thead><tr><th scope="col">figure</th><th scope="col">planned</th><th scope="col">measured</th>'
        yield '<th scope="col">off by</th></tr></thead><tbody>'
        for name, *cells in compared(made.rows[0], each):
            yield f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        yield "</tbody></table>"


def compared(row: PlanRow, measured: Measured) -> list[tuple[str, str, str, str]]:
    """Return for each figure its name, what the plan says, what was measured, and by how much the plan is off."""
    rows = list[tuple[str, str, str, str]]()
    for name, planned in planned_of(row).items():
        if (seen := measured.figures.get(name)) is not None:
            scale, unit = (1, "/s") if name == "tokens" else (1000, " ms")
            off = f"{planned / max(seen, 1e-9) - 1:+.0%}"
            rows.append((name, f"{planned * scale:,.1f}{unit}", f"{seen * scale:,.1f}{unit}", off))
    return rows


def planned_of(row: PlanRow) -> dict[str, float]:
    """Return a fleet's figures by the names that `Measured` has too."""
    found = {_title(name): seconds for name, seconds in figures_of(row.result).items()}
    return {**found, "tokens": row.result.output_tokens_per_s}


def _table(made: PlanReport, front: Sequence[PlanRow]) -> Iterator[str]:
    price = ["price/h"] if any(row.price_an_hour for row in made.rows) else []
    heads = ["fleet", "GPUs", *price, *(f"{_title(name)}, ms" for name in made.targets), "of target", "on the front"]
    yield (
        "<table><thead><tr>"
        + "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
        + "</tr></thead><tbody>"
    )
    for number, row in enumerate(made.rows):
        least = "over " if _is_unknown(row) else ""
        cells = [f"{row.gpus}", *([f"{row.price_an_hour:,.2f}"] if price else [])]
        cells += [f"{least}{1000 * row.of_target[name] * limit:,.1f}" for name, limit in made.targets.items()]
        cells += [f"{worst_of(row):.0%}{'' if row.meets else ', misses'}", "yes" if row in front else ""]
        yield f'<tr><th scope="row"><a href="#fleet-{number}">{escape(row.name)}</a></th>'
        yield "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table>"


def _section(number: int, row: PlanRow, made: PlanReport) -> Iterator[str]:
    words = shlex.join(["headrace", "up", *up_words(order_of(row, made))])
    yield f'<section id="fleet-{number}" tabindex="-1"><h3>{escape(row.name)}</h3><p>{escape(_spoken(row))}</p>'
    yield f'<label>Flags <textarea readonly rows="3" spellcheck="false">{escape(words)}</textarea></label></section>'
