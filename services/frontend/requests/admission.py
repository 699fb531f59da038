"""What one frontend takes on at once, against its bounds, and how keys share it. Pure.

    enter ──▶ arriving ──body there──▶ begin ──▶ tokenising ──weigh──▶ running ──▶ leave
       │         │                       │                       │
       └─────────┴──── at a bound: Overloaded, before more work is done; leaving gives everything back

A request whose body is still on its way takes none of the places: else slow senders would keep all others out. What it
has sent counts, and connections are bounded elsewhere. A request that is alone is never refused for its size.

Where requests have keys, no bound is one key's alone (fair_share.py);
what fits is all that a key's first request is asked.
What a key may have by itself is its Account's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from services.frontend.auth.accounts import NO_TOKENS, Account
from services.frontend.config import LimitsConfig
from services.frontend.requests.fair_share import may_have
from shared.errors import Overloaded, Unavailable

Bound = Literal["requests", "body_bytes", "tokenising_bytes", "tokens", "unasked"]
"""Named as in the settings."""
BOUNDS: tuple[Bound, ...] = get_args(Bound)
Sums = dict[Bound, int]
"""What counts against each bound."""


def _zero() -> Sums:
    return dict.fromkeys(BOUNDS, 0)


class Admission:
    """The sums over all requests; each is a Place."""

    def __init__(self, limits: LimitsConfig, refused: Callable[[Bound], None]) -> None:
        """`refused` is told of each refusal."""
        self._limits: Sums = {bound: getattr(limits, bound) for bound in BOUNDS}
        self._refused = refused
        self.closed = False
        """No new requests: this process is about to end."""
        self.permits: dict[Permit, None] = {}
        """Arriving, tokenising and running; the first come first."""
        self.totals = _zero()
        self.by_key: dict[str, Sums] = {}
        """Of keys that have taken something."""

    def reserve(self, account: Account | None = None) -> Permit:
        """A request has come, its body perhaps not. Raises Overloaded, or Unavailable once closed."""
        if self.closed:
            raise Unavailable("this frontend is about to end")
        place = Permit(self, account)
        self._check(place, "requests", 1)
        self.permits[place] = None
        return place

    def grow(self, place: Permit, size_bytes: int) -> None:
        """So much more of its body is there, or of what belongs to it. Raises Overloaded."""
        self._check(place, "body_bytes", size_bytes)
        if place.tokenising:
            self._check(place, "tokenising_bytes", size_bytes)
            self._count(place, "tokenising_bytes", size_bytes)
        self._count(place, "body_bytes", size_bytes)

    def begin(self, place: Permit) -> None:
        """Its body is there: it takes one of the places, and waits to be tokenised. Raises Overloaded."""
        assert not place.admitted
        self._check(place, "requests", 1)
        self._check(place, "tokenising_bytes", place.taken["body_bytes"])
        self._count(place, "requests", 1)
        self._count(place, "tokenising_bytes", place.taken["body_bytes"])
        place.tokenising = True

    def weigh(self, place: Permit, tokens: int, choices: int = 1) -> None:
        """It is tokenised: its prompts, and what may follow, are so many tokens; each of its choices is computed like a
        request. Raises Overloaded."""
        assert place.tokenising
        place.tokenising = False
        self._count(place, "tokenising_bytes", -place.taken["tokenising_bytes"])
        self._check(place, "tokens", tokens)
        self._count(place, "tokens", tokens)
        if choices > 1:  # else it has its place already, whoever has come since
            self._check(place, "requests", choices - 1)
            self._count(place, "requests", choices - 1)

    def unasked(self, place: Permit) -> None:
        """Its client cannot be asked whether it still wants an answer. Raises Overloaded."""
        self._check(place, "unasked", 1)
        self._count(place, "unasked", 1)

    def release(self, place: Permit) -> None:
        """It has ended, however far it came."""
        del self.permits[place]
        for bound, taken in place.taken.items():
            self._count(place, bound, -taken)

    def _check(self, place: Permit, bound: Bound, more: int) -> None:
        """Raises Overloaded where it may not take so much more."""
        own, limit = place.taken[bound], self._limits[bound]
        others = self.totals[bound] - own
        if others + own + more > limit and (others or bound == "requests"):
            self._refuse(bound, _full(bound, self.totals[bound], more))
        if place.account is not None:
            account = place.account
            held = self.by_key[account.name][bound] if account.name in self.by_key else 0
            if not may_have(held - own, own + more, others, limit):
                account.refused["share"] += 1
                self._refuse(bound, f"the key {account.name} has its share of limits.{bound}: {held} of {limit}")

    def _refuse(self, bound: Bound, why: str) -> None:
        self._refused(bound)
        raise Overloaded(why)

    def _count(self, place: Permit, bound: Bound, more: int) -> None:
        place.taken[bound] += more
        self.totals[bound] += more
        if place.account is not None and more:
            held = self.by_key.setdefault(place.account.name, _zero())
            held[bound] += more
            if not any(held.values()):
                del self.by_key[place.account.name]

    def validate(self) -> None:
        """Assert every invariant."""
        by_key: dict[str, Sums] = {}
        for bound in BOUNDS:
            shares = [place.taken[bound] for place in self.permits]
            assert self.totals[bound] == sum(shares)
            alone = bound != "requests" and sum(map(bool, shares)) == 1
            assert self.totals[bound] <= self._limits[bound] or alone
        for place in self.permits:
            assert place.taken["requests"] <= 1 or (place.admitted and not place.tokenising)
            assert place.taken["tokenising_bytes"] == (place.taken["body_bytes"] if place.tokenising else 0)
            assert place.admitted or not place.taken["tokens"]
            assert place.taken["unasked"] <= 1
            if place.account is not None:
                held = by_key.setdefault(place.account.name, _zero())
                for bound, taken in place.taken.items():
                    held[bound] += taken
        assert self.by_key == {name: held for name, held in by_key.items() if any(held.values())}


def _full(bound: Bound, taken: int, more: int) -> str:
    match bound:
        case "requests":
            return f"{taken} requests are running already"
        case "body_bytes":
            return f"the bodies of other requests fill {taken} bytes already"
        case "tokenising_bytes":
            return f"{taken} bytes of other requests wait to be tokenised"
        case "tokens":
            return f"running requests may come to {taken} tokens already; this one has {more}"
        case "unasked":
            return (
                f"{taken} requests without `stream` run over NATS already; one with the header Headrace-Probe, whose "
                "client can be asked whether it listens, is not bounded so"
            )


class Permit:
    """One request's share; changed by `Admission` alone, but for `spent`."""

    __slots__ = ("_admission", "account", "spent", "taken", "tokenising")

    def __init__(self, admission: Admission, account: Account | None) -> None:
        self._admission = admission
        self.account = account
        """None: it came without a key."""
        self.taken = _zero()
        self.tokenising = False
        self.spent = NO_TOKENS
        """What its key is to pay."""

    @property
    def admitted(self) -> bool:
        """Whether it has one of the places."""
        return bool(self.taken["requests"])

    def add_bytes(self, size_bytes: int) -> None:
        """See `Admission.grow`."""
        self._admission.grow(self, size_bytes)

    def admit(self) -> None:
        """See `Admission.begin`."""
        self._admission.begin(self)

    def count_unasked(self) -> None:
        """See `Admission.unasked`."""
        self._admission.unasked(self)

    def add_tokens(self, tokens: int, choices: int = 1) -> None:
        """See `Admission.weigh`."""
        self._admission.weigh(self, tokens, choices)
