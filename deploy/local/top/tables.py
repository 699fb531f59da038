"""The tables of `headrace top`: what they are made of, and all of them but the workers'. Pure.

Every table is bounded and says what it leaves out. Texts that other processes have written are made plain.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from deploy.local.show.overview import InstanceRow, ModelRow, event_sources
from deploy.local.table import age
from shared.messages.frontends import RecentRequests, RequestWay
from shared.messages.kvbm import KvbmState
from shared.messages.load import LoadReport
from shared.messages.people import RouterState

LINES_KEPT = 32
"""Lines of a table in one view."""
TEXT_KEPT = 160
"""Characters of a text from another process."""
ACTED_ON = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of characters that move a cursor, turn the writing round or end a line."""


class Bar(Struct, frozen=True):
    """Blocks of a cache: in use, reusable, and all of them."""

    held: int = 0
    cached: int = 0
    total: int = 0


class Line(Struct, frozen=True):
    """One row of a table."""

    cells: tuple[str | Bar, ...]
    old: bool = False
    """Whether its numbers are not those of now."""


class Heading(Struct, frozen=True):
    """The head of a column."""

    title: str
    number: bool = False
    spare: int = 0
    """The larger, the sooner a narrow terminal goes without the column. 0 if it stays."""


class Listing(Struct, frozen=True):
    """One table: its columns and lines."""

    headings: tuple[Heading, ...]
    lines: tuple[Line, ...] = ()
    left_out: int = 0
    """The number of rows that the bound leaves out."""

    def __post_init__(self) -> None:
        assert all(len(line.cells) == len(self.headings) for line in self.lines)


_TIERS = (
    *(Heading("KVBM"), Heading("TIER"), Heading("STATE"), Heading("BLOCKS")),
    *(Heading("HITS", number=True), Heading("MODEL", spare=1)),
)
_MIGRATIONS = (
    *(Heading("AGE", number=True), Heading("MIGRATED", spare=1), Heading("MODEL", spare=2), Heading("WORKERS")),
    *(Heading("ATTEMPT", number=True, spare=3), Heading("END")),
)
_MODELS = (
    *(Heading("MODEL"), Heading("WORKERS", number=True), Heading("CONTEXT", number=True, spare=2)),
    *(Heading("LORAS", number=True, spare=3), Heading("BLOCKS")),
)
_SERVICES = (
    *(Heading("SERVICE"), Heading("INSTANCE"), Heading("STATE"), Heading("AGE", number=True, spare=2)),
    Heading("WHAT", spare=1),
)


def plain(text: str) -> str:
    """Return a text without characters that a terminal would act on, and cut."""
    cut = text if len(text) <= TEXT_KEPT else text[: TEXT_KEPT - 1] + "…"
    return "".join(each for each in cut if unicodedata.category(each) not in ACTED_ON)


def listing(headings: tuple[Heading, ...], lines: Sequence[Line], more: int = 0) -> Listing:
    """Return a table of the first lines; `more` of them were not made."""
    return Listing(headings, tuple(lines[:LINES_KEPT]), max(0, len(lines) - LINES_KEPT) + more)


def tiers(rows: Sequence[InstanceRow], stores: Mapping[str, KvbmState], more: int, *, old: bool) -> Listing:
    """Return the tiers of the block stores that were asked; `more` stores were not."""
    return listing(_TIERS, [Line(cells, old) for row in rows for cells in _tiers(row, stores.get(row.instance))], more)


def _tiers(row: InstanceRow, store: KvbmState | None) -> Iterator[tuple[str | Bar, ...]]:
    if store is None:
        yield (row.instance, "", "silent", Bar(), "-", "")
        return
    if not store.layouts:
        yield (row.instance, "", "no engine uses it", Bar(), "-", "")
    for layout in store.layouts[:LINES_KEPT]:
        for name, tier in (("host", layout.host), ("disk", layout.disk)):
            if tier is not None:
                hits = "-" if tier.hit_rate is None else f"{100 * tier.hit_rate:.0f} %"
                state = f"{tier.state}: {tier.reason}" if tier.reason else tier.state
                bar = Bar(0, tier.blocks, tier.capacity_blocks)
                yield (row.instance, name, plain(state), bar, hits, plain(layout.model))


def migrations(recent: Mapping[str, RecentRequests], older_s: float) -> Listing:
    """Return the latest requests that went on at another worker; the answers are older by `older_s` seconds."""
    ways = [way for each in recent.values() for way in each.requests if way.attempt > 1]
    ways.sort(key=lambda way: (way.age_s, way.name))
    lines = [Line(_migration(way, older_s), old=older_s > 0) for way in ways[:LINES_KEPT]]
    return listing(_MIGRATIONS, lines, len(ways) - len(lines))


def _migration(way: RequestWay, older_s: float) -> tuple[str | Bar, ...]:
    path, end = plain(" > ".join(way.instances[-4:])), plain(way.outcome) or "runs"
    return (age(way.age_s + older_s), plain(way.name), plain(way.model), path, str(way.attempt), end)


def models(rows: Sequence[ModelRow], loads: Mapping[str, LoadReport], *, old: bool) -> Listing:
    """Return the models, with the blocks of the workers whose load is known."""
    lines = [Line(_model(row, loads), old) for row in rows[:LINES_KEPT]]
    return listing(_MODELS, lines, len(rows) - len(lines))


def _model(row: ModelRow, loads: Mapping[str, LoadReport]) -> tuple[str | Bar, ...]:
    known = [loads[each] for each in row.instances if each in loads]
    bar = Bar(sum(one.held_blocks for one in known), sum(one.cached_blocks for one in known), row.total_blocks)
    return (plain(row.model), str(len(row.instances)), str(row.context_length or "-"), str(len(row.lora)), bar)


def services(
    rows: Sequence[InstanceRow],
    routers: Mapping[str, RouterState],
    recent: Mapping[str, RecentRequests],
    more: int,
    *,
    old: bool,
) -> Listing:
    """Return the frontends and routers that were asked, with what they answered; `more` were not asked."""
    lines = []
    for row in rows:
        router, frontend = routers.get(row.instance), recent.get(row.instance)
        said = "" if router is None else _router(router)
        said = f"{frontend.running + frontend.arriving} running, {frontend.begun} begun" if frontend else said
        lines.append(Line((row.service, row.instance, "ready" if said else "silent", age(row.age_s), plain(said)), old))
    return listing(_SERVICES, lines, more)


def _router(state: RouterState) -> str:
    reserved = sum(model.reservations for model in state.models)
    blocks = sum(model.index_blocks for model in state.models)
    events = "off" if state.events == "off" else event_sources(state.sources)
    trouble = f" ({state.policy_trouble})" if state.policy_trouble else ""
    return f"policy {state.policy}{trouble}, {reserved} reserved, {blocks} blocks, events {events}"
