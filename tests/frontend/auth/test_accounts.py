from __future__ import annotations

import asyncio
import hashlib
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.frontend.auth.access import HEADER
from services.frontend.auth.accounts import (
    JOINED,
    NO_TOKENS,
    Account,
    Accounts,
    TokenBucket,
    TokenUse,
    cache_salt,
    format_duration,
)
from services.frontend.config import AccessConfig
from services.frontend.serving.request_context import NAME_LIMIT_CHARACTERS, SALT_HEADER
from shared import subjects
from shared.api_keys import KeyEntry, key_digest
from shared.errors import InvalidRequest, RateLimited
from shared.hashing import root_key, seed_of
from shared.messages.generate import Generate
from tests.frontend.peers import MODEL, NAMESPACE, World, clients, world


def entry(key: str = "secret", **limits: Any) -> KeyEntry:
    return KeyEntry(hashlib.sha256(key.encode()).hexdigest(), **limits)


def account(**limits: Any) -> Account:
    return Account("alice", entry(**limits), 0.0)


def accounts(**keys: KeyEntry) -> Accounts:
    made = Accounts()
    made.replace(keys, 0.0)
    return made


def test_a_key_without_limits_is_never_refused_and_has_no_headers() -> None:
    free = account()
    for _ in range(1000):
        free.begin_request(0.0)
        free.charge_tokens(10**9, 0.0)
    assert free.running == 1000
    assert free.rate_limit_headers(0.0) == {}


def test_requests_a_minute_are_refused_with_the_time_until_the_next() -> None:
    limited = account(requests_per_minute=3)
    for _ in range(3):
        limited.begin_request(0.0)
        limited.end_request(NO_TOKENS, 0.0)
    with pytest.raises(RateLimited, match=r"requests per min: Limit 3, Used 3, Requested 1\. .* in 20s\.") as refusal:
        limited.begin_request(0.0)
    assert refusal.value.kind == "requests"
    assert refusal.value.retry_after_s == pytest.approx(20)
    assert limited.refused["requests"] == 1
    limited.begin_request(20.0)
    with pytest.raises(RateLimited):
        limited.begin_request(20.0)


def test_what_was_refused_counts_for_nothing() -> None:
    limited = account(requests_per_minute=1, concurrency=1)
    limited.begin_request(0.0)
    for _ in range(100):
        with pytest.raises(RateLimited):
            limited.begin_request(30.0)
    limited.end_request(NO_TOKENS, 30.0)
    limited.begin_request(60.0)


def test_requests_at_once_are_bounded_and_the_next_one_comes_in_when_one_ends() -> None:
    limited = account(concurrency=2)
    limited.begin_request(0.0)
    limited.begin_request(0.0)
    with pytest.raises(RateLimited, match="2 requests of the key alice are running already"):
        limited.begin_request(0.0)
    assert limited.refused["concurrency"] == 1
    limited.end_request(NO_TOKENS, 0.0)
    limited.begin_request(0.0)


def test_tokens_a_minute_are_those_of_the_prompt_and_of_the_longest_answer_asked_for() -> None:
    limited = account(tokens_per_minute=100)
    limited.begin_request(0.0)
    limited.charge_tokens(70, 0.0)
    limited.begin_request(0.0)
    with pytest.raises(RateLimited, match="on tokens per min: Limit 100, Used 70, Requested 60") as refusal:
        limited.charge_tokens(60, 0.0)
    assert refusal.value.kind == "tokens"
    assert refusal.value.retry_after_s == pytest.approx(18)
    limited.charge_tokens(30, 0.0)


def test_a_refused_request_pays_for_what_was_made_of_it_and_is_accepted_after_its_retry_after() -> None:
    limited = account(tokens_per_minute=100)
    limited.charge_tokens(70, 0.0)
    limited.begin_request(0.0)
    with pytest.raises(RateLimited) as refusal:
        limited.charge_tokens(60, 0.0, made=50)
    limited.end_request(TokenUse(refused=50), 0.0)
    assert refusal.value.retry_after_s == pytest.approx(18 + 30)
    with pytest.raises(RateLimited, match="Used 120"):
        limited.begin_request(0.0)
    limited.begin_request(48.0)
    limited.charge_tokens(60, 48.0, made=50)


def test_what_a_request_has_at_least_is_checked_and_not_charged() -> None:
    limited = account(tokens_per_minute=100)
    for _ in range(3):
        limited.check_tokens(90, 0.0)
    limited.charge_tokens(20, 0.0)
    with pytest.raises(RateLimited, match="Requested 90"):
        limited.check_tokens(90, 0.0)


def test_what_an_answer_did_not_need_is_given_back_and_what_it_took_beyond_is_owed() -> None:
    limited = account(tokens_per_minute=100)
    limited.begin_request(0.0)
    limited.charge_tokens(90, 0.0)
    limited.end_request(TokenUse(charged=90, prompt=10, output=15), 0.0)
    assert limited.rate_limit_headers(0.0)["x-ratelimit-remaining-tokens"] == "75"
    limited.begin_request(0.0)
    limited.charge_tokens(5, 0.0)
    limited.end_request(TokenUse(charged=5, prompt=5, output=120), 0.0)
    assert limited.rate_limit_headers(0.0)["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimited):  # at once: its body is not even read
        limited.begin_request(0.0)
    limited.begin_request(31.0)
    assert (limited.prompt_tokens, limited.output_tokens) == (15, 135)


def test_a_request_that_fails_costs_nothing() -> None:
    limited = account(tokens_per_minute=100)
    limited.begin_request(0.0)
    limited.charge_tokens(90, 0.0)
    limited.end_request(TokenUse(charged=90), 0.0)
    assert limited.rate_limit_headers(0.0)["x-ratelimit-remaining-tokens"] == "100"


def test_a_request_larger_than_a_minute_is_had_when_nothing_else_was() -> None:
    limited = account(tokens_per_minute=100)
    limited.begin_request(0.0)
    limited.charge_tokens(500, 0.0)
    with pytest.raises(RateLimited):
        limited.begin_request(200.0)
    limited.begin_request(241.0)


def test_the_headers_are_openais() -> None:
    limited = account(requests_per_minute=600, tokens_per_minute=1000)
    limited.begin_request(0.0)
    limited.charge_tokens(125, 0.0)
    assert limited.rate_limit_headers(0.0) == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "875",
        "x-ratelimit-reset-tokens": "7.5s",
    }


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0ms"), (0.0001, "1ms"), (0.35, "350ms"), (1, "1s"), (7.5, "7.5s"), (59.9999, "1m0s"), (360, "6m0s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_a_key_is_found_in_its_header_however_the_scheme_is_written() -> None:
    two = accounts(alice=entry("secret"), bob=entry("other"))
    for header, name in (("Bearer secret", "alice"), ("bearer  secret ", "alice"), ("BEARER other", "bob")):
        assert two.authenticate(header).name == name


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "secret", "Basic secret"])
def test_without_a_key_it_is_401_and_says_where_it_belongs(given: str | None) -> None:
    with pytest.raises(InvalidRequest, match="You didn't provide an API key") as refusal:
        accounts(alice=entry("secret")).authenticate(given)
    assert (refusal.value.status, refusal.value.code) == (401, None)


@pytest.mark.parametrize("given", ["Bearer Secret", "Bearer secret2", "Bearer " + "s" * 5000, "Bearer \udcff\ud800"])
def test_a_wrong_key_is_401_and_is_not_repeated(given: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        accounts(alice=entry("secret")).authenticate(given)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
    assert str(refusal.value) == "Incorrect API key provided."


def test_a_reloaded_file_keeps_what_was_used_and_removes_keys_that_it_does_not_name() -> None:
    both = accounts(alice=entry("secret", requests_per_minute=10), bob=entry("other"))
    alice = both.authenticate("Bearer secret")
    for _ in range(4):
        alice.begin_request(0.0)
    both.replace({"alice": entry("a new one", requests_per_minute=5)}, 0.0)
    assert both.authenticate("Bearer a new one") is alice
    assert alice.rate_limit_headers(0.0)["x-ratelimit-remaining-requests"] == "1"
    for gone in ("Bearer secret", "Bearer other"):
        with pytest.raises(InvalidRequest):
            both.authenticate(gone)
    both.replace({"alice": entry("a new one")}, 0.0)
    assert alice.rate_limit_headers(0.0) == {}
    alice.end_request(NO_TOKENS, 0.0)
    both.validate()


class AccountMachine(RuleBasedStateMachine):
    """Drives requests of one key through every stage while its file changes. Tokens are granted as fast as the limit
    allows, except for those that are owed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.accounts = Accounts()
        self.running: list[TokenUse] = []
        self.write(5, 100, 3)

    @property
    def account(self) -> Account:
        return self.accounts.authenticate("Bearer secret")

    @rule(
        requests=st.none() | st.integers(1, 10),
        tokens=st.none() | st.integers(1, 200),
        concurrency=st.none() | st.integers(1, 4),
    )
    def write(self, requests: int | None, tokens: int | None, concurrency: int | None) -> None:
        limits = {"requests_per_minute": requests, "tokens_per_minute": tokens, "concurrency": concurrency}
        self.accounts.replace({"alice": entry("secret", **limits)}, self.now)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(tokens=st.integers(1, 300))
    def ask(self, tokens: int) -> None:
        account, entry = self.account, self.account.entry
        try:
            account.begin_request(self.now)
        except RateLimited:
            return
        assert entry.concurrency is None or account.running <= entry.concurrency
        try:
            account.charge_tokens(tokens, self.now)
        except RateLimited:
            account.end_request(NO_TOKENS, self.now)
        else:
            self.running.append(TokenUse(tokens))

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 10), prompt=st.integers(0, 200), output=st.integers(0, 200))
    def end(self, at: int, prompt: int, output: int) -> None:
        spent = self.running.pop(at % len(self.running))
        self.account.end_request(TokenUse(spent.charged, prompt, output), self.now)

    @invariant()
    def holds(self) -> None:
        self.accounts.validate()
        assert self.account.running == len(self.running)
        for name, value in self.account.rate_limit_headers(self.now).items():
            if "remaining" in name:
                assert (
                    0
                    <= int(value)
                    <= int(self.account.rate_limit_headers(self.now)[name.replace("remaining", "limit")])
                )


TestAccount = AccountMachine.TestCase


def test_a_bucket_is_full_at_first_and_a_minute_after_it_was_emptied() -> None:
    bucket = TokenBucket(60, 100.0)
    assert (bucket.level(100.0), bucket.until_full_s(100.0)) == (60, 0)
    bucket.spend(60, 100.0)
    assert (bucket.level(100.0), bucket.until_full_s(100.0)) == (0, 60)
    assert bucket.level(110.0) == pytest.approx(10)
    assert bucket.level(160.0) == bucket.level(1e6) == 60


def test_waiting_for_wait_s_is_enough() -> None:
    bucket = TokenBucket(7, 0.0)
    bucket.spend(7, 0.0)
    wait_s = bucket.wait_s(1, 0.0)
    assert wait_s == pytest.approx(60 / 7)
    assert bucket.wait_s(1, wait_s / 2) > 0
    assert bucket.wait_s(1, wait_s) == 0


def test_more_than_a_minute_brings_is_granted_when_the_bucket_is_full_and_owed_then() -> None:
    bucket = TokenBucket(100, 0.0)
    assert bucket.wait_s(250, 0.0) == 0
    bucket.spend(250, 0.0)
    assert bucket.level(0.0) == -150
    assert bucket.wait_s(1, 0.0) == pytest.approx(90.6)
    assert bucket.wait_s(250, 0.0) == pytest.approx(150)


def test_what_is_given_back_fills_it_and_no_more_than_that() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.spend(30, 0.0)
    bucket.spend(-20, 0.0)
    assert bucket.level(0.0) == pytest.approx(50)
    bucket.spend(-1000, 0.0)
    assert bucket.level(0.0) == 60
    bucket.spend(1, 0.0)
    assert bucket.level(0.0) == pytest.approx(59), "what was given back beyond the brim is not kept"


def test_under_another_limit_what_was_spent_stays_spent() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.spend(50, 0.0)
    bucket.set_rate(600, 0.0)
    assert bucket.level(0.0) == pytest.approx(550)
    bucket.set_rate(20, 0.0)
    assert bucket.level(0.0) == pytest.approx(-30)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 90), st.integers(1, 1500)), max_size=60),
)
def test_no_period_grants_more_than_the_level_and_the_refill_except_for_one_large_amount(
    per_minute: int, asked: list[tuple[float, int]]
) -> None:
    bucket, now, had, largest = TokenBucket(per_minute, 0.0), 0.0, 0, 0
    for pause_s, amount in asked:
        now += pause_s
        if bucket.wait_s(amount, now) == 0:
            bucket.spend(amount, now)
            had += amount
            largest = max(largest, amount - per_minute)
        assert had <= per_minute * (1 + now / 60) + max(0, largest) + 1e-3
        assert bucket.level(now) <= per_minute


TEXTS = st.text(max_size=NAME_LIMIT_CHARACTERS)
KEYS = st.sampled_from((None, "own", "team", "alice"))
HELLO = [{"role": "user", "content": "hello"}]


def salted_account(name: str, salt: str | None) -> Account:
    return Account(name, KeyEntry("0" * 64, salt=salt), 0.0)


def test_a_clients_salt_is_passed_on_as_it_is_and_the_header_means_the_same() -> None:
    for one in (None, salted_account("alice", None)):
        assert cache_salt(one, "", "") == ""
        assert cache_salt(one, "", "tenant") == cache_salt(one, "tenant", "") == "tenant"


def test_a_keys_own_salt_and_one_of_several_keys_differ_also_if_they_have_one_name() -> None:
    found = [
        cache_salt(salted_account("alice", "own"), "", ""),
        cache_salt(salted_account("bob", "own"), "", ""),
        cache_salt(salted_account("bob", "alice"), "", ""),
        cache_salt(salted_account("bob", None), "", ""),
    ]
    assert len(set(found)) == len(found)
    assert cache_salt(salted_account("bob", "team"), "", "x") == cache_salt(salted_account("carol", "team"), "", "x")


@given(KEYS, TEXTS, TEXTS, st.booleans())
def test_no_client_can_write_down_the_salt_of_another_key(
    of_key: str | None, header: str, field: str, by: bool
) -> None:
    """It knows how salts are joined, and names of keys."""
    mine = cache_salt(salted_account("alice", of_key), header, field)
    bob = salted_account("bob", None)
    copied = cache_salt(bob, mine, "") if by else cache_salt(bob, "", mine)
    if mine.startswith(JOINED):
        assert copied != mine
    if of_key is not None:
        assert mine.startswith(JOINED)
        assert len(mine) <= NAME_LIMIT_CHARACTERS


@given(st.lists(st.tuples(KEYS, TEXTS, TEXTS), min_size=2, max_size=5, unique=True))
def test_two_requests_share_blocks_only_if_key_and_client_say_the_same(said: list[tuple[str | None, str, str]]) -> None:
    for one, other in combinations(said, 2):
        alike = one[0] == other[0] and not (one[1] and one[2]) and not (other[1] and other[2])
        same = alike and (one[1] or one[2]) == (other[1] or other[2])
        salts = [cache_salt(salted_account("alice", salt), header, field) for salt, header, field in (one, other)]
        assert (salts[0] == salts[1]) is same


DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "x"}),
    "responses": ("/v1/responses", {"input": "x", "store": False}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
    "ollama_chat": ("/api/chat", {"messages": HELLO, "stream": False}),
    "ollama_generate": ("/api/generate", {"prompt": "x", "stream": False}),
    "ollama_raw": ("/api/generate", {"prompt": "x", "raw": True, "stream": False}),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "ollama_embed": ("/api/embed", {"input": "x"}),
}
"""For each door that reuses cached blocks its path and a body without model."""
SAID: list[tuple[dict[str, str], dict[str, str]]] = [({}, {}), ({}, {"cache_salt": "a"}), ({SALT_HEADER: "b"}, {})]
"""Headers and fields."""


@pytest.fixture
def keys(tmp_path: Path) -> AccessConfig:
    entries = {"alice": {"salt": "own"}, "bob": {"salt": "own"}, "carol": {"salt": "team"}, "dave": {}}
    named = {name: {"sha256": key_digest(name).hex(), **more} for name, more in entries.items()}
    (tmp_path / "keys.json").write_text(json.dumps(named))
    return AccessConfig(keys_file=str(tmp_path / "keys.json"))


@pytest.mark.parametrize("door", DOORS)
async def test_every_door_separates_keys_and_what_clients_say(directory: Path, keys: AccessConfig, door: str) -> None:
    path, body = DOORS[door]
    async with world(directory, access=keys, embedding_size=4) as w, clients(w) as (_, http):
        w.say("x")
        for name in ("alice", "bob", "carol", "dave"):
            for headers, fields in SAID:
                asked = {"model": MODEL, **body, **fields}
                async with http.post(path, json=asked, headers={HEADER: f"Bearer {name}", **headers}) as response:
                    assert response.status == 200
                    assert "cache_salt" not in response.headers.get("X-Headrace-Ignored", "")
        generated = await everything(w, 12)
        assert len({one.salt for one in generated}) == 12
        assert {"", "a", "b"} < {one.salt for one in generated}, "a key without a salt changes nothing"
        assert len({root_key(MODEL, one.lora, one.salt) for one in generated}) == 12, "by which kvbm names blocks"
        assert len({seed_of(one.lora, one.salt) for one in generated}) == 12, "by which routers know them"


async def everything(w: World, count: int) -> list[Generate]:
    async with asyncio.timeout(30):
        await asyncio.gather(*(worker.generates.at_least(0) for worker in w.workers))
        found = [one for worker in w.workers for one in worker.generates.all]
    assert len(found) == count
    return found


async def test_the_nats_door_separates_them_too(directory: Path, keys: AccessConfig) -> None:
    async with world(directory, access=keys) as w:
        w.say("x")
        for name in ("alice", "dave"):
            for headers, fields in SAID:
                body = json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()
                sent = {HEADER: f"Bearer {name}", **headers}
                await w.bus.request(subjects.client(NAMESPACE, "chat"), body, timeout_s=30, headers=sent)
        assert len({one.salt for one in await everything(w, 6)}) == 6


async def test_a_request_with_two_headers_or_a_long_one_is_refused(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        for headers in ([(SALT_HEADER, "a"), (SALT_HEADER, "b")], [(SALT_HEADER, "a" * (NAME_LIMIT_CHARACTERS + 1))]):
            async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == SALT_HEADER
