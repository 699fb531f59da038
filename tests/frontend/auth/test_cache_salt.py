"""Whose cached blocks a request finds: by its key, and by what its client says."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.auth.access import HEADER
from services.frontend.auth.accounts import Account
from services.frontend.auth.cache_salt import JOINED, cache_salt
from services.frontend.config import AccessConfig
from services.frontend.serving.request_context import NAME_LIMIT_CHARACTERS, SALT_HEADER
from shared import subjects
from shared.api_keys import KeyEntry, key_digest
from shared.hashing import root_key, seed_of
from shared.messages.generate import Generate
from tests.frontend.peers import MODEL, NAMESPACE, World, clients, world

TEXTS = st.text(max_size=NAME_LIMIT_CHARACTERS)
KEYS = st.sampled_from((None, "own", "team", "alice"))
HELLO = [{"role": "user", "content": "hello"}]


def account(name: str, salt: str | None) -> Account:
    return Account(name, KeyEntry("0" * 64, salt=salt), 0.0)


def test_a_clients_salt_is_passed_on_as_it_is_and_the_header_means_the_same() -> None:
    for one in (None, account("alice", None)):
        assert cache_salt(one, "", "") == ""
        assert cache_salt(one, "", "tenant") == cache_salt(one, "tenant", "") == "tenant"


def test_a_keys_own_salt_and_one_of_several_keys_differ_also_if_they_have_one_name() -> None:
    found = [
        cache_salt(account("alice", "own"), "", ""),
        cache_salt(account("bob", "own"), "", ""),
        cache_salt(account("bob", "alice"), "", ""),
        cache_salt(account("bob", None), "", ""),
    ]
    assert len(set(found)) == len(found)
    assert cache_salt(account("bob", "team"), "", "x") == cache_salt(account("carol", "team"), "", "x")


@given(KEYS, TEXTS, TEXTS, st.booleans())
def test_no_client_can_write_down_the_salt_of_another_key(
    of_key: str | None, header: str, field: str, by: bool
) -> None:
    """It knows how salts are joined, and names of keys."""
    mine = cache_salt(account("alice", of_key), header, field)
    bob = account("bob", None)
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
        salts = [cache_salt(account("alice", salt), header, field) for salt, header, field in (one, other)]
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
