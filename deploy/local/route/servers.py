"""Decides which servers have a worker, and what is said of each. Pure.

    out ──due──▶ asked ──it fits──▶ joined ──its worker has given up──▶ leaving ──Gone──▶ out
     ▲             │                  │
     └─────────────┘ no answer, or    └────── not wanted any more ────▶ leaving ──Gone──▶ forgotten
                     another model

While a server has a worker, that worker asks for it again if it goes away; what the worker's /health says is repeated
here. A reason is said once, until another one holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec import Struct

from deploy.local.route.answers import Found, describe, misfit, pick
from deploy.local.route.targets import Target

FIRST_DELAY_S = 1.0
"""Seconds until a server that was left out is asked again, doubling to LAST_DELAY_S."""
LAST_DELAY_S = 10.0
GIVEN_UP_DELAY_S = 60.0
"""Seconds until a server is asked again whose worker has given up: each start of a worker costs processor time."""
REMIND_S = 60.0
"""Seconds between two lines that say that no server serves."""


class Wanted(Struct, frozen=True):
    """The servers that are wanted, and no others."""

    targets: Sequence[Target]


class ServerAnswered(Struct, frozen=True):
    """A server that was asked has answered: what was found, or why it is left out."""

    name: str
    found: Found | None
    fault: str = ""


class Seen(Struct, frozen=True):
    """What the worker of a joined server says."""

    name: str
    ready: bool
    reason: str = ""
    """Why it is not ready; empty if it says nothing yet."""
    given_up: bool = False
    """True if it cannot work as configured, and has ended."""


class Gone(Struct, frozen=True):
    """The worker of a server that leaves has ended."""

    name: str


class TimePassed(Struct, frozen=True):
    """Time has passed."""


Event = Wanted | ServerAnswered | Seen | Gone | TimePassed


class Ask(Struct, frozen=True):
    """Ask a server what it is; ServerAnswered follows."""

    target: Target


class Join(Struct, frozen=True):
    """Start a worker for a server."""

    target: Target
    found: Found
    model: str
    """The model's name on the server."""


class LeaveServer(Struct, frozen=True):
    """Drain the worker of a server; Gone follows."""

    target: Target


class Say(Struct, frozen=True):
    """Show a line."""

    line: str


Action = Ask | Join | LeaveServer | Say


@dataclass(slots=True)
class _Server:
    target: Target
    due_s: float
    state: Literal["out", "asked", "joined", "leaving"] = "out"
    wanted: bool = True
    ready: bool = False
    away: bool = False
    """True while its worker has lost it."""
    asked_again: bool = False
    """True while a server that was away, and serves again, is asked whether it is as it was."""
    delay_s: float = FIRST_DELAY_S
    fault: str = ""
    """Why it is left out, as it was said."""
    described: str = ""
    found: Found | None = None
    """What its worker knows of it. None while it has none."""

    @property
    def block_size(self) -> int:
        """Tokens of a block of the server, while it has a worker. 0 if unknown."""
        return 0 if self.found is None else self.found.block_size


class Servers:
    """The servers of one `route`. Times are seconds on a monotonic clock."""

    def __init__(
        self, names: Collection[str] | None, former: Servers | None = None, *, text: bool | None = None
    ) -> None:
        """`names` are those under which servers may know the model. None means that any will do. What `former` has
        said of servers is not said again. `text`: whether all must take text, or all token ids; None if either will
        do."""
        self._names, self._text = names, text
        self._servers: dict[str, _Server] = {}
        self._former = {} if former is None else former._servers
        self._reminded_s: float | None = None
        """When it was said last that none serves. None while one does."""

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Apply an event and return the actions to do. States change only here."""
        actions: list[Action] = []
        match event:
            case Wanted(targets):
                actions += self._want(targets, now_s)
            case ServerAnswered(name, found, fault):
                if name in self._servers:
                    actions += self._answered(self._servers[name], found, fault, now_s)
            case Seen():
                actions += self._seen(self._servers[event.name], event, now_s)
            case Gone(name):
                self._servers[name].state = "out"
                if not self._servers[name].wanted:
                    del self._servers[name]
            case TimePassed():
                pass
            case _:
                assert_never(event)
        for server in self._servers.values():
            if server.state == "out" and now_s >= server.due_s:
                server.state = "asked"
                actions.append(Ask(server.target))
        return actions + self._remind(now_s)

    @property
    def joined(self) -> list[Target]:
        """The servers with a worker that stays."""
        return [server.target for server in self._servers.values() if server.state == "joined"]

    @property
    def leaving(self) -> list[Target]:
        """The servers whose worker is being drained."""
        return [server.target for server in self._servers.values() if server.state == "leaving"]

    def validate(self) -> None:
        """Assert every invariant."""
        for name, server in self._servers.items():
            assert server.target.name == name
            assert server.state == "joined" or not server.ready
            assert server.wanted or server.state in ("asked", "leaving")
            assert FIRST_DELAY_S <= server.delay_s <= LAST_DELAY_S
        assert len({server.block_size for server in self._servers.values() if server.block_size}) <= 1

    def _want(self, targets: Sequence[Target], now_s: float) -> list[Action]:
        actions: list[Action] = []
        for target in targets:
            server = self._servers.get(target.name)
            if server is None:
                server = self._servers[target.name] = _Server(target, now_s)
                if before := self._former.pop(target.name, None):
                    server.fault, server.described = before.fault, before.described
            if not server.wanted:  # it is being drained, or asked still
                server.wanted, server.due_s = True, now_s
        wanted = {target.name for target in targets}
        for name, server in list(self._servers.items()):
            if name in wanted or not server.wanted:
                continue
            server.wanted = False
            actions.append(Say(f"{name}: not wanted any more"))
            if server.state == "joined":
                actions += self._leave(server)
            elif server.state == "out":
                del self._servers[name]
        return actions

    def _answered(self, server: _Server, found: Found | None, fault: str, now_s: float) -> list[Action]:
        if server.asked_again:
            return self._compare(server, found, now_s)
        if server.state != "asked":
            return []
        server.state = "out"
        if not server.wanted:
            del self._servers[server.target.name]
            return []
        model = None
        if found is not None:
            block_size = max(one.block_size for one in self._servers.values())
            fault = misfit(found, self._names, block_size, text=self._text)
            model = pick(found, self._names)
        if fault or found is None or model is None:
            return self._left_out(server, fault, now_s)
        server.state, server.found = "joined", found
        described, before = describe(found, model.id), server.described
        server.described = described
        return [
            *([] if described == before else [Say(f"{server.target.name}: {described}")]),
            Join(server.target, found, model.id),
        ]

    def _seen(self, server: _Server, seen: Seen, now_s: float) -> list[Action]:
        if server.state != "joined":
            return []
        if seen.given_up:
            return [*self._left_out(server, seen.reason, now_s, GIVEN_UP_DELAY_S), *self._leave(server)]
        if seen.ready and not server.ready:
            again = server.away and not server.asked_again
            server.ready, server.away, server.fault, server.delay_s = True, False, "", FIRST_DELAY_S
            server.asked_again = server.asked_again or again
            return [Say(f"{server.target.name}: serves"), *([Ask(server.target)] if again else [])]
        if seen.ready or not seen.reason:
            return []
        server.ready, server.away = False, True
        return self._say_left_out(server, seen.reason)

    def _compare(self, server: _Server, found: Found | None, now_s: float) -> list[Action]:
        """Replace the worker of a server that came back otherwise than it went."""
        server.asked_again = False
        if server.state != "joined" or found is None or found == server.found:
            return []
        server.due_s = now_s
        return self._leave(server)

    def _left_out(self, server: _Server, fault: str, now_s: float, delay_s: float = 0.0) -> list[Action]:
        server.due_s = now_s + (delay_s or server.delay_s)
        server.delay_s = min(2 * server.delay_s, LAST_DELAY_S)
        return self._say_left_out(server, fault)

    def _say_left_out(self, server: _Server, fault: str) -> list[Action]:
        if server.fault == fault:
            return []
        server.fault = fault
        return [Say(f"{server.target.name}: left out: {fault}")]

    def _leave(self, server: _Server) -> list[Action]:
        server.state, server.ready, server.away, server.found = "leaving", False, False, None
        return [LeaveServer(server.target)]

    def _remind(self, now_s: float) -> list[Action]:
        """Say that none serves, once each has been asked, and again every REMIND_S."""
        servers = self._servers.values()
        if any(server.ready for server in servers):
            self._reminded_s = None
        elif all(server.fault and (server.state != "joined" or server.away) for server in servers) and (
            self._reminded_s is None or now_s - self._reminded_s >= REMIND_S
        ):
            self._reminded_s = now_s
            return [Say(f"waiting: none of the servers ({len(servers)}) serves; they are asked again and again")]
        return []
