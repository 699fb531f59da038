"""The accounts of API keys: their rate limits, their counts, and the salt of their cached blocks. Pure.

    begin_request ──▶ charge_tokens: the prompt, and max_tokens if given ──▶ end_request: corrected to what was used
      │                │
      └────────────────┴──▶ RateLimited: over the key's limit; says when to try again

Prompt and answer count together, as with OpenAI. How long an answer without `max_tokens` gets is known only when it
ends. The account owes its tokens then, and until they are paid the key's requests are refused before their body is
read.

A request that `begin_request` refuses is not counted. One that is refused later has been read, so it counts as a
request, and it costs the tokens that were made of its texts by then. `check_tokens` refuses before any are made, if the
fewest that it can have are too many already. Each process counts by itself.

To reserve what the context leaves would let a key run one request at a time, to reserve nothing any number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from shared.api_keys import KEY_LIMIT_CHARACTERS, KeyEntry, key_digest
from shared.errors import InvalidRequest, RateLimited

RefusalReason = Literal["requests", "tokens", "concurrency", "share"]
"""The limit for which a request with a key is refused; `share`: its fair share of a limit that all keys have in common
(requests/admission.py)."""
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)


MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Tolerance for float rounding, so that a client that waited for `wait_s` is not refused again."""


class TokenBucket:
    """The rate limit of one key for one unit, requests or tokens.

    Time, in seconds, is an argument.

        per_minute ──────────   full at first, and a minute after it was empty
            │ spend ▼  ▲ refills by per_minute / 60 a second
            0 ───────────────
            │ debt: an amount that is known only afterwards may exceed the level; it is refilled before the next use

    The only state is the time at which the bucket will be full (the generic cell rate algorithm of ITU-T I.371 in its
    virtual scheduling form).
    """

    def __init__(self, per_minute: int, now: float) -> None:
        assert per_minute > 0
        self.per_minute = per_minute
        self._full_at = now

    def level(self, now: float) -> float:
        """Return the amount that is available; a negative one is owed."""
        return self.per_minute - self._spent(now)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is available. More than `per_minute` is granted once the bucket is full,
        since it would never be otherwise; the rest is then owed."""
        missing = min(amount, self.per_minute) - self.level(now)
        return missing / self.per_minute * MINUTE_S if missing > _ROUNDING else 0.0

    def spend(self, amount: float, now: float) -> None:
        """Subtract an amount; a negative one is given back."""
        self._full_at = max(self._full_at, now) + amount / self.per_minute * MINUTE_S

    def until_full_s(self, now: float) -> float:
        """Return the seconds until the bucket is full if nothing more is spent."""
        return max(0.0, self._full_at - now)

    def set_rate(self, per_minute: int, now: float) -> None:
        """Change the limit; what was spent stays spent."""
        assert per_minute > 0
        spent, self.per_minute = self._spent(now), per_minute
        self._full_at = now + spent / per_minute * MINUTE_S

    def _spent(self, now: float) -> float:
        return self.until_full_s(now) * self.per_minute / MINUTE_S


_Unit = Literal["requests", "tokens"]
_UNITS: tuple[_Unit, ...] = get_args(_Unit)


def _rates(entry: KeyEntry) -> dict[_Unit, int | None]:
    return {"requests": entry.requests_per_minute, "tokens": entry.tokens_per_minute}


class TokenUse(Struct, frozen=True):
    """Tokens that one request was charged in advance, and those that it used."""

    charged: int = 0
    prompt: int = 0
    output: int = 0
    refused: int = 0
    """The tokens that were made for a request that was refused then."""


NO_TOKENS = TokenUse()


class Account:
    """The limits, use and counts of one key."""

    def __init__(self, name: str, entry: KeyEntry, now: float) -> None:
        self.name = name
        self.running = 0
        """Requests that have begun and not ended."""
        self.requests = 0
        """Requests that have begun so far. This and the counts below are for the metrics."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.refused: dict[RefusalReason, int] = dict.fromkeys(REFUSAL_REASONS, 0)
        self._buckets: dict[_Unit, TokenBucket] = {}
        """The buckets of the rates that are limited."""
        self.update(entry, now)

    def update(self, entry: KeyEntry, now: float) -> None:
        """Change the limits to those of a new entry; what was used stays used."""
        self.entry = entry
        for unit, per_minute in _rates(entry).items():
            if per_minute is None:
                self._buckets.pop(unit, None)
            else:
                self._buckets.setdefault(unit, TokenBucket(per_minute, now)).set_rate(per_minute, now)

    def begin_request(self, now: float) -> None:
        """Count a request that has come. Raise RateLimited."""
        if self.entry.concurrency is not None and self.running >= self.entry.concurrency:
            self.refused["concurrency"] += 1
            running = f"{self.running} requests of the key {self.name} are running already"
            raise RateLimited(f"{running}; wait for one to end", kind="requests")
        self._check("tokens", 1, now)  # tokens owed are known before the body is read
        self._check("requests", 1, now)
        self._spend("requests", 1, now)
        self.running += 1
        self.requests += 1

    def check_tokens(self, tokens: int, now: float) -> None:
        """Check a request that has at least these tokens and is not tokenised yet. Raise RateLimited."""
        self._check("tokens", tokens, now)

    def charge_tokens(self, tokens: int, now: float, made: int = 0) -> None:
        """Charge a tokenised request for its prompt and the `max_tokens` that its client gave. Raise RateLimited, whose
        time to wait includes the `made` tokens that the refused request is to pay for."""
        self._check("tokens", tokens, now, made)
        self._spend("tokens", tokens, now)

    def end_request(self, spent: TokenUse, now: float) -> None:
        """Count a request that has ended, whether it succeeded or not, and correct its charge to what it used."""
        self.running -= 1
        self.prompt_tokens += spent.prompt
        self.output_tokens += spent.output
        self._spend("tokens", spent.prompt + spent.output + spent.refused - spent.charged, now)

    def rate_limit_headers(self, now: float) -> dict[str, str]:
        """Return OpenAI's rate limit headers: each limit, how much of it is left, and when it will be full again."""
        return {
            name: value
            for unit in _UNITS
            if (bucket := self._buckets.get(unit)) is not None
            for name, value in (
                (f"x-ratelimit-limit-{unit}", str(bucket.per_minute)),
                (f"x-ratelimit-remaining-{unit}", str(max(0, int(bucket.level(now))))),
                (f"x-ratelimit-reset-{unit}", format_duration(bucket.until_full_s(now))),
            )
        }

    def _spend(self, unit: _Unit, amount: int, now: float) -> None:
        if unit in self._buckets:
            self._buckets[unit].spend(amount, now)

    def _check(self, bound: _Unit, amount: int, now: float, lost: int = 0) -> None:
        bucket = self._buckets.get(bound)
        if bucket is None or not (wait_s := bucket.wait_s(amount, now)):
            return
        self.refused[bound] += 1
        wait_s += lost / bucket.per_minute * MINUTE_S
        used = bucket.per_minute - int(bucket.level(now))
        raise RateLimited(
            f"Rate limit reached for the key {self.name} on {bound} per min: Limit {bucket.per_minute}, Used {used}, "
            f"Requested {amount}. Please try again in {format_duration(wait_s)}.",
            kind=bound,
            retry_after_s=wait_s,
        )

    def validate(self) -> None:
        """Assert every invariant."""
        assert 0 <= self.running <= self.requests
        limits = {unit: limit for unit, limit in _rates(self.entry).items() if limit is not None}
        assert {unit: bucket.per_minute for unit, bucket in self._buckets.items()} == limits


class Accounts:
    """The accounts that the keys file names."""

    def __init__(self) -> None:
        self.by_name: dict[str, Account] = {}
        self._by_digest: dict[bytes, Account] = {}

    def replace(self, entries: Mapping[str, KeyEntry], now: float) -> None:
        """Apply a keys file. An account that is still in it keeps its use. One that is not can begin no more requests,
        and those that it runs go on."""
        before, self.by_name, self._by_digest = self.by_name, {}, {}
        for name, entry in entries.items():
            if (account := before.get(name)) is None:
                account = Account(name, entry, now)
            else:
                account.update(entry, now)
            self.by_name[name] = self._by_digest[bytes.fromhex(entry.sha256)] = account

    def authenticate(self, authorization: str | None) -> Account:
        """Return the account whose key the header `Authorization` carries. Raise InvalidRequest with OpenAI's 401.

        The time that this takes reveals nothing about a key: only the key's digest is looked up, and knowing how a
        digest begins does not help to find the key.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not (key := key.strip()):
            raise InvalidRequest(
                "You didn't provide an API key. Send it in the header `Authorization: Bearer YOUR_KEY`.",
                status=401,
            )
        account = None if len(key) > KEY_LIMIT_CHARACTERS else self._by_digest.get(key_digest(key))
        if account is None:
            raise InvalidRequest("Incorrect API key provided.", code="invalid_api_key", status=401)
        return account

    def validate(self) -> None:
        """Assert every invariant."""
        assert {one.name: one for one in self._by_digest.values()} == self.by_name
        assert len(self._by_digest) == len(self.by_name)
        for name, account in self.by_name.items():
            assert name == account.name
            account.validate()


def format_duration(seconds: float) -> str:
    """Format a duration like OpenAI, rounded up to milliseconds: 350ms, 7.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


OWN_SALT = "own"
"""The value of a key's `salt` that stands for the key's name."""
JOINED = "headrace:"
"""How a joined salt begins."""


def cache_salt(account: Account | None, header: str, field: str) -> str:
    """Return the salt of a request; empty if there is none. `header` and `field` are the client's, empty if missing.

        the key's `salt`      the header X-Cache-Salt      the field `cache_salt`
              │                         └────── the client's ──────┘
              └──────────── joined: SHA-256 of both, each with its length ──▶ the salt that routers, engines, kvbm get

    Requests share cached blocks only if their salts are equal. A client must not be able to write down a joined salt as
    its own: all joined ones begin with JOINED, and a client's salt that begins so is joined, too, as one of its kind.
    """
    salt = header or field
    if header and field:
        salt = _joined("both", header, field)  # a proxy may set the header, so the field must not replace it
    elif salt.startswith(JOINED):
        salt = _joined("client", salt)
    of_key = None if account is None else account.entry.salt
    if account is None or of_key is None:
        return salt
    return _joined("key", account.name, salt) if of_key == OWN_SALT else _joined("keys", of_key, salt)


def _joined(*parts: str) -> str:
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in (one.encode() for one in parts))
    return JOINED + hashlib.sha256(framed).hexdigest()
