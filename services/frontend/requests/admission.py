"""What one frontend accepts at the same time, against its limits, and how API keys share it. Pure.

    reserve ──▶ arriving ──body complete──▶ admit ──▶ tokenising ──add_tokens──▶ running ──▶ release
       │           │                          │ check_least            │
       └───────────┴──── at a limit: Overloaded, before more work is done; release gives everything back

A request whose body is still on its way does not count as one of `requests`, so that slow senders keep no other client
out. Its bytes count, and connections are limited elsewhere. A request that is alone is never refused for its size.

With API keys, no key may have all of a limit:

    what one key has  ≤  SHARE_FACTOR * what is free

So a key alone has SHARE_FACTOR / (SHARE_FACTOR + 1) of a limit at most, and n keys that want all they can get have the
same each. A part is always free for a key that comes later, and no one has to count the active keys. Nothing is taken
from a running request: a key with more than its share gets no more until some of its requests end. These are the
dynamic thresholds by which switches share memory between ports (Choudhury and Hahne, IEEE/ACM Transactions on
Networking 6(2), 1998). The first request of a key only has to fit.

The limits that a key has by itself are those of its Account.

Tokens in flight bound one frontend; the whole fleet is bounded by the router's predicted wait, since only routers know
queues and speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from msgspec import Struct, field

from services.frontend.auth.accounts import NO_TOKENS, Account, TokenUse
from services.frontend.config import LimitsConfig
from shared.errors import Overloaded, Unavailable

Bound = Literal["requests", "body_bytes", "tokenising_bytes", "tokens", "unasked", "grammars", "images"]
"""A limit, by its name in the settings; also a label of metrics."""
BOUNDS: tuple[Bound, ...] = get_args(Bound)
Sums = dict[Bound, int]
"""What counts against each limit."""
SHARE_FACTOR = 8
"""How many times what is free one key may have."""


def _zero() -> Sums:
    return dict.fromkeys(BOUNDS, 0)


class Admission:
    """Counts all requests against the limits; each request has a Permit."""

    def __init__(self, limits: LimitsConfig, refused: Callable[[Bound], None]) -> None:
        """Create it; `refused` is called for each refusal."""
        self._limits: Sums = {bound: getattr(limits, bound) for bound in BOUNDS}
        self._refused = refused
        self.closed = False
        """Whether new requests are refused because this process is about to end."""
        self.permits: dict[Permit, None] = {}
        """All requests, arriving, tokenising or running, in the order of their arrival."""
        self.totals = _zero()
        self.by_key: dict[str, Sums] = {}
        """The sums of each key that has something, by its name."""

    def reserve(self, account: Account | None = None) -> Permit:
        """Let a request in whose body may still be on its way. Raise Overloaded, or Unavailable once closed."""
        if self.closed:
            raise Unavailable("this frontend is about to end")
        permit = Permit(self, account)
        self.check(permit, "requests", 1)
        self.permits[permit] = None
        return permit

    def release(self, permit: Permit) -> None:
        """Give back everything that a request has."""
        del self.permits[permit]
        for bound, taken in permit.taken.items():
            if taken:
                self.count(permit, bound, -taken)

    def check(self, permit: Permit, bound: Bound, more: int) -> None:
        """Raise Overloaded if the request may not have `more` of a limit."""
        own, limit = permit.taken[bound], self._limits[bound]
        others = self.totals[bound] - own
        if others + own + more > limit and (others or bound == "requests"):
            self._refuse(bound, _FULL[bound].format(taken=self.totals[bound], more=more))
        if permit.account is not None:
            account = permit.account
            held = self.by_key[account.name][bound] if account.name in self.by_key else 0
            if not may_have(held - own, own + more, others, limit):
                account.refused["share"] += 1
                self._refuse(bound, f"the key {account.name} has its share of limits.{bound}: {held} of {limit}")

    def _refuse(self, bound: Bound, why: str) -> None:
        self._refused(bound)
        raise Overloaded(why)

    def count(self, permit: Permit, bound: Bound, more: int) -> None:
        permit.taken[bound] += more
        self.totals[bound] += more
        if permit.account is not None and more:
            held = self.by_key.setdefault(permit.account.name, _zero())
            held[bound] += more
            if not any(held.values()):
                del self.by_key[permit.account.name]

    def validate(self) -> None:
        """Assert the invariants."""
        by_key: dict[str, Sums] = {}
        for bound in BOUNDS:
            shares = [permit.taken[bound] for permit in self.permits]
            assert self.totals[bound] == sum(shares)
            alone = bound != "requests" and sum(map(bool, shares)) == 1
            assert self.totals[bound] <= self._limits[bound] or alone
        for permit in self.permits:
            assert permit.taken["requests"] <= 1 or (permit.admitted and not permit.tokenising)
            assert permit.taken["tokenising_bytes"] == (permit.taken["body_bytes"] if permit.tokenising else 0)
            assert permit.admitted or not permit.taken["tokens"]
            assert permit.taken["unasked"] <= 1
            assert permit.taken["grammars"] <= 1
            assert permit.taken["images"] <= 1
            if permit.account is not None:
                held = by_key.setdefault(permit.account.name, _zero())
                for bound, taken in permit.taken.items():
                    held[bound] += taken
        assert self.by_key == {name: held for name, held in by_key.items() if any(held.values())}


_FULL: dict[Bound, str] = {
    "requests": "{taken} requests are running already",
    "body_bytes": "the bodies and pictures of other requests fill {taken} bytes already",
    "tokenising_bytes": "{taken} bytes of other requests wait to be tokenised",
    "tokens": "running requests may come to {taken} tokens already; this one has {more}",
    "unasked": "{taken} requests without `stream` run over NATS already; send the header Headrace-Probe, which lets "
    "the frontend ask whether the client still listens",
    "grammars": "{taken} grammars already wait to be compiled",
    "images": "the images of {taken} requests already wait to be decoded",
}
"""What an error says about each limit that is reached."""


INSTANCES_NAMED = 8
"""The number of workers that are named; a request with many choices may have more."""


class Served(Struct):
    """The sums of one request."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None
    """The seconds from its arrival to the first token of any choice; None before."""
    instances: list[str] = field(default_factory=list)
    """The workers that had the last attempt of a choice, each once."""
    attempts: int = 0

    def add(self, *, prompt_tokens: int, output_tokens: int, cached_tokens: int, instance: str, attempts: int) -> None:
        """Add a choice or an input that has ended. `instance` is empty if no worker was found."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.cached_tokens += cached_tokens
        self.attempts += attempts
        if instance and instance not in self.instances and len(self.instances) < INSTANCES_NAMED:
            self.instances.append(instance)

    def begun(self, after_s: float) -> None:
        """Note a first token."""
        if self.first_token_s is None:
            self.first_token_s = after_s


class Permit:
    """What one request has of each limit; `Admission.reserve` makes it. Its methods raise Overloaded at a limit."""

    __slots__ = ("_admission", "account", "made", "model", "served", "spent", "taken", "tokenising")

    def __init__(self, admission: Admission, account: Account | None) -> None:
        self._admission = admission
        self.account = account
        """The account of its API key; None without a key."""
        self.taken = _zero()
        self.tokenising = False
        self.spent = NO_TOKENS
        """The tokens that its key has to pay for. Others set this and `model`."""
        self.made = 0
        """The tokens that were made of its texts."""
        self.served = Served()
        """What it got, for the log."""
        self.model = ""
        """The base model that it asks for, for metrics. Empty if it is not known."""

    @property
    def key(self) -> str:
        """The name of its API key; empty without one."""
        return "" if self.account is None else self.account.name

    @property
    def admitted(self) -> bool:
        """Whether the request counts as one of `requests`."""
        return bool(self.taken["requests"])

    def count_made(self, tokens: int) -> None:
        """Note tokens that were made of its texts; a negative number corrects it. Its key pays for them if the request
        is refused."""
        self.made += tokens

    def add_bytes(self, size_bytes: int) -> None:
        """Count more bytes of its body, or of what belongs to it, such as the pictures that are made for it."""
        self._take({"body_bytes": size_bytes, **({"tokenising_bytes": size_bytes} if self.tokenising else {})})

    def forget_body(self) -> None:
        """Give the bytes of its body back, which is held no longer. Idempotent."""
        assert not self.tokenising
        self._admission.count(self, "body_bytes", -self.taken["body_bytes"])

    def admit(self) -> None:
        """Count it as one of `requests`: its body is complete and waits to be tokenised."""
        assert not self.admitted
        self._take({"requests": 1, "tokenising_bytes": self.taken["body_bytes"]})
        self.tokenising = True

    def check_least(self, tokens: int, choices: int, now: float) -> None:
        """Check the fewest tokens that it can have, before its texts are tokenised. Raise RateLimited, too."""
        self._admission.check(self, "tokens", tokens)
        if choices > 1:
            self._admission.check(self, "requests", choices - 1)
        if self.account is not None:
            self.account.check_tokens(tokens, now)

    def charge(self, tokens: int, now: float) -> None:
        """Charge its key for these tokens, after `add_tokens`. Raise RateLimited."""
        if self.account is not None:
            self.account.charge_tokens(tokens, now, self.made)
            self.spent = TokenUse(tokens, refused=self.made)

    def add_tokens(self, tokens: int, choices: int = 1) -> None:
        """Count the tokens of its prompts and of the longest output, once it is tokenised. Each choice counts as one of
        `requests`."""
        assert self.tokenising
        self.tokenising = False
        self._admission.count(self, "tokenising_bytes", -self.taken["tokenising_bytes"])
        self._take({"tokens": tokens})
        if choices > 1:  # the first choice is counted already, whatever has come since
            self._take({"requests": choices - 1})

    @contextmanager
    def waiting(self, bound: Literal["grammars", "images"]) -> Iterator[None]:
        """Count it, while the context is open, as one whose grammar waits to be compiled, or whose images to be
        decoded."""
        self._take({bound: 1})
        try:
            yield
        finally:
            self._admission.count(self, bound, -1)

    def count_unasked(self) -> None:
        """Count it as one whose client cannot be asked whether it still wants an answer."""
        self._take({"unasked": 1})

    def _take(self, amounts: Sums) -> None:
        """Count all these amounts, or raise Overloaded and count none."""
        for bound, more in amounts.items():
            self._admission.check(self, bound, more)
        for bound, more in amounts.items():
            self._admission.count(self, bound, more)


def may_have(held: int, more: int, taken: int, limit: int) -> bool:
    """Return whether a key that holds `held` of the `taken` may have `more`, as far as its share is concerned. Whether
    that fits into `limit` is another question. A key that holds nothing always may."""
    return not held or held + more <= SHARE_FACTOR * (limit - taken - more)
