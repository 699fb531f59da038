"""What one frontend takes on at once, against its bounds. Pure.

    enter ──▶ arriving ──body there──▶ begin ──▶ tokenising ──weigh──▶ running ──▶ leave
       │         │                       │                       │
       └─────────┴──── at a bound: Overloaded, before more work is done; leaving gives everything back

A request whose body is still on its way takes none of the places: else slow senders would keep all others out. What it
has sent counts, and connections are bounded elsewhere. A request that is alone is never refused for its size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from services.frontend.config import LimitsConfig
from shared.errors import Overloaded, Unavailable

Bound = Literal["requests", "body_bytes", "tokenising_bytes", "tokens"]
"""Named as in the settings."""


class Admission:
    """The sums over all requests; each is a Place."""

    def __init__(self, limits: LimitsConfig, refused: Callable[[Bound], None]) -> None:
        """`refused` is told of each refusal."""
        self._limits = limits
        self._refused = refused
        self.closed = False
        """No new requests: this process is about to end."""
        self.places: dict[Place, None] = {}
        """Arriving, tokenising and running; the first come first."""
        self.begun = 0
        self.body_bytes = 0
        self.tokenising_bytes = 0
        self.tokens = 0

    def enter(self) -> Place:
        """A request has come, its body perhaps not. Raises Overloaded, or Unavailable once closed."""
        if self.closed:
            raise Unavailable("this frontend is about to end")
        self._check_requests()
        place = Place(self)
        self.places[place] = None
        return place

    def grow(self, place: Place, size_bytes: int) -> None:
        """So much more of its body is there. Raises Overloaded."""
        if self.body_bytes > place.body_bytes and self.body_bytes + size_bytes > self._limits.body_bytes:
            self._refuse("body_bytes", f"the bodies of other requests fill {self.body_bytes} bytes already")
        place.body_bytes += size_bytes
        self.body_bytes += size_bytes

    def begin(self, place: Place) -> None:
        """Its body is there: it takes one of the places, and waits to be tokenised. Raises Overloaded."""
        assert not place.begun
        self._check_requests()
        if self.tokenising_bytes and self.tokenising_bytes + place.body_bytes > self._limits.tokenising_bytes:
            self._refuse("tokenising_bytes", f"{self.tokenising_bytes} bytes of other requests wait to be tokenised")
        place.begun = place.tokenising = True
        self.begun += 1
        self.tokenising_bytes += place.body_bytes

    def weigh(self, place: Place, tokens: int) -> None:
        """It is tokenised: its prompt, and what may follow, are so many tokens. Raises Overloaded."""
        assert place.tokenising
        self._tokenised(place)
        if self.tokens and self.tokens + tokens > self._limits.tokens:
            self._refuse("tokens", f"running requests may come to {self.tokens} tokens already; this one has {tokens}")
        place.tokens = tokens
        self.tokens += tokens

    def leave(self, place: Place) -> None:
        """It has ended, however far it came."""
        del self.places[place]
        if place.tokenising:
            self._tokenised(place)
        self.begun -= place.begun
        self.body_bytes -= place.body_bytes
        self.tokens -= place.tokens

    def _tokenised(self, place: Place) -> None:
        place.tokenising = False
        self.tokenising_bytes -= place.body_bytes

    def _check_requests(self) -> None:
        if self.begun >= self._limits.requests:
            self._refuse("requests", f"{self.begun} requests are running already")

    def _refuse(self, bound: Bound, why: str) -> None:
        self._refused(bound)
        raise Overloaded(why)

    def validate(self) -> None:
        """Assert every invariant."""
        places = self.places
        assert self.begun == sum(place.begun for place in places) <= self._limits.requests
        assert self.body_bytes == sum(place.body_bytes for place in places)
        assert self.tokenising_bytes == sum(place.body_bytes for place in places if place.tokenising)
        assert self.tokens == sum(place.tokens for place in places)
        assert all(place.begun or not place.tokens for place in places)
        for total, limit, sizes in (
            (self.body_bytes, self._limits.body_bytes, [place.body_bytes for place in places]),
            (self.tokens, self._limits.tokens, [place.tokens for place in places]),
        ):
            assert total <= limit or sum(map(bool, sizes)) == 1


class Place:
    """One request's share; changed by `Admission` alone."""

    __slots__ = ("_admission", "begun", "body_bytes", "tokenising", "tokens")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.body_bytes = 0
        self.begun = False
        self.tokenising = False
        self.tokens = 0

    def grow(self, size_bytes: int) -> None:
        """See `Admission.grow`."""
        self._admission.grow(self, size_bytes)

    def begin(self) -> None:
        """See `Admission.begin`."""
        self._admission.begin(self)

    def weigh(self, tokens: int) -> None:
        """See `Admission.weigh`."""
        self._admission.weigh(self, tokens)
