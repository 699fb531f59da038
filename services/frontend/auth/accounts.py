"""Who asks, by the key that is shown, and what each may have. Pure. The clock is an argument.

    enter ──▶ charge: the prompt, and max_tokens where the client gave them ──▶ leave: what it came to instead
      │          │
      └──────────┴──▶ RateLimited: over what its key may have; told when to come back

As OpenAI counts: prompt and answer together. What an answer without `max_tokens` comes to is known when it ends: it is
owed then, and until it is paid the key's next requests are refused before their body is read.

A request that is refused by `enter` counts for nothing; one refused by `charge` has been read and tokenised, and counts
as a request. Each process counts by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from services.frontend.auth.api_keys import KEY_LIMIT_CHARACTERS, KeyEntry, key_digest
from services.frontend.auth.token_bucket import TokenBucket
from shared.errors import InvalidRequest, RateLimited

RefusalReason = Literal["requests", "tokens", "concurrency", "share"]
"""Why a request with a key is refused; `share`: of what all keys have together (requests/admission.py)."""
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)


class TokenUse(Struct, frozen=True):
    """What one request was charged, and what it came to."""

    charged: int = 0
    prompt: int = 0
    output: int = 0


NO_TOKENS = TokenUse()


class Account:
    """One key's."""

    def __init__(self, name: str, entry: KeyEntry, now: float) -> None:
        self.name = name
        self.entry = entry
        self.running = 0
        """Requests that have entered and not left."""
        self.requests = 0
        """Entered so far; these and the following are for the metrics."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.refused: dict[RefusalReason, int] = dict.fromkeys(REFUSAL_REASONS, 0)
        self._requests = _bucket(None, entry.requests_per_minute, now)
        self._tokens = _bucket(None, entry.tokens_per_minute, now)

    def update(self, entry: KeyEntry, now: float) -> None:
        """The file says something else now; what was spent stays spent."""
        self.entry = entry
        self._requests = _bucket(self._requests, entry.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, entry.tokens_per_minute, now)

    def begin_request(self, now: float) -> None:
        """A request has come. Raises RateLimited."""
        if self.entry.concurrency is not None and self.running >= self.entry.concurrency:
            self.refused["concurrency"] += 1
            raise RateLimited(f"{self.running} requests of the key {self.name} are running already", kind="requests")
        self._check("tokens", self._tokens, 1, now)  # what it owes is known now; its body need not be read for that
        self._check("requests", self._requests, 1, now)
        if self._requests is not None:
            self._requests.spend(1, now)
        self.running += 1
        self.requests += 1

    def charge_tokens(self, tokens: int, now: float) -> None:
        """It is tokenised: its prompt, and what its client wants at most, are so many. Raises RateLimited."""
        self._check("tokens", self._tokens, tokens, now)
        if self._tokens is not None:
            self._tokens.spend(tokens, now)

    def end_request(self, spent: TokenUse, now: float) -> None:
        """It has ended, however far it came."""
        self.running -= 1
        self.prompt_tokens += spent.prompt
        self.output_tokens += spent.output
        if self._tokens is not None:
            self._tokens.spend(spent.prompt + spent.output - spent.charged, now)

    def rate_limit_headers(self, now: float) -> dict[str, str]:
        """What OpenAI's clients know: how much is left, and when all of it is."""
        return {
            name: value
            for of, bucket in (("requests", self._requests), ("tokens", self._tokens))
            if bucket is not None
            for name, value in (
                (f"x-ratelimit-limit-{of}", str(bucket.per_minute)),
                (f"x-ratelimit-remaining-{of}", str(max(0, int(bucket.level(now))))),
                (f"x-ratelimit-reset-{of}", format_duration(bucket.until_full_s(now))),
            )
        }

    def _check(self, bound: Literal["requests", "tokens"], bucket: TokenBucket | None, amount: int, now: float) -> None:
        if bucket is None or not (wait_s := bucket.wait_s(amount, now)):
            return
        self.refused[bound] += 1
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
        for bucket, limit in (
            (self._requests, self.entry.requests_per_minute),
            (self._tokens, self.entry.tokens_per_minute),
        ):
            assert (None if bucket is None else bucket.per_minute) == limit


class Accounts:
    """Those that the keys' file names."""

    def __init__(self) -> None:
        self.by_name: dict[str, Account] = {}
        self._by_digest: dict[bytes, Account] = {}

    def replace(self, entries: Mapping[str, KeyEntry], now: float) -> None:
        """The file has been read. Who is named still keeps what he has spent; who is not is let in no more, and what
        he runs goes on."""
        before, self.by_name, self._by_digest = self.by_name, {}, {}
        for name, entry in entries.items():
            if (account := before.get(name)) is None:
                account = Account(name, entry, now)
            else:
                account.update(entry, now)
            self.by_name[name] = self._by_digest[bytes.fromhex(entry.sha256)] = account

    def authenticate(self, authorization: str | None) -> Account:
        """Whose key it is, of the header `Authorization`. Raises InvalidRequest, with OpenAI's 401.

        How long it takes tells nothing of a key: what is looked up is its digest, and who knew how that of some key
        begins would be no nearer to a key.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not (key := key.strip()):
            raise InvalidRequest(
                "You didn't provide an API key. It belongs into a header, as in `Authorization: Bearer YOUR_KEY`.",
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


def _bucket(before: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if before is None:
        return TokenBucket(per_minute, now)
    before.set_rate(per_minute, now)
    return before


def format_duration(seconds: float) -> str:
    """As OpenAI writes one, rounded up to milliseconds: 350ms, 7.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
