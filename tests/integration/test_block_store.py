"""`headrace up` with a block store: what one worker has computed outlives it, in memory and on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.stack import ROOT, Up, eventually, running, with_models

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "Once upon a time an old miller went to the river and came back with a fish. " * 20
PROMPT_BLOCKS = 23
BLOCK_TOKENS = 16
WORKERS = ("worker-0", "worker-1")
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    disk = tmp_path_factory.mktemp("blocks")
    # On a slow machine the blocks may take longer than computing them would.
    patient = ("--set", "worker.kvbm.wait_s=60", "--set", "worker.kvbm.timeout_s=4")
    flags = ("--kvbm-bytes", "256M", "--kvbm-disk", str(disk / "tier"), "--kvbm-disk-bytes", "2G", *patient)
    with running(with_models(tmp_path_factory.mktemp("up")), *flags) as stack:
        until_attached(stack, dict.fromkeys(WORKERS, 0))
        pool = Path(one_store(stack)["pool"])
        assert pool.stat().st_mode & 0o777 == 0o700
        yield stack
        assert stack.stop() == 0
    assert not pool.exists()


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def ask(client: OpenAI, prompt: str) -> tuple[str, dict[str, int]]:
    """The answer, and the cached tokens by tier."""
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    extra = answer.usage.prompt_tokens_details.model_extra or {}
    tiers: dict[str, int] = extra["cached_tokens_by_tier"]
    return answer.choices[0].text, tiers


def stores_of(up: Up) -> list[dict[str, Any]]:
    """What `headrace status` tells of the block stores."""
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(up.state)]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    stores: list[dict[str, Any]] = json.loads(told)["stores"]
    return stores


def one_store(up: Up) -> dict[str, Any]:
    """The only block store, which may answer late."""

    def only() -> dict[str, Any] | None:
        stores = stores_of(up)
        return stores[0] if len(stores) == 1 else None

    return eventually(only, limit_s=LIMIT_S, what="one block store answers")


def kill(up: Up, program: str) -> int:
    """By SIGKILL; the process that was."""
    pid = up.pid(program)
    os.kill(pid, signal.SIGKILL)
    return pid


def until_attached(up: Up, before: dict[str, int]) -> None:
    """Until these workers, other processes than `before`, exchange blocks with a store."""
    for name, pid in before.items():
        attached = partial(_attached, up, name, before=pid)
        eventually(attached, limit_s=LIMIT_S, what=f"{name} has attached to a block store")


def _attached(up: Up, program: str, *, before: int) -> bool:
    try:
        if up.pid(program) == before:
            return False
        with urllib.request.urlopen(f"{up.record['programs'][program]['observe']}/metrics", timeout=LIMIT_S) as metrics:
            return re.search(r"^headrace_kvbm_attached\{.*\} 1\.0$", metrics.read().decode(), re.MULTILINE) is not None
    except (OSError, KeyError):
        return False


def blocks(up: Up, tier: str) -> int:
    """How many can be found there."""
    return sum(layout[tier]["blocks"] for store in stores_of(up) for layout in store["layouts"])


def test_what_killed_workers_have_computed_is_found_in_memory(up: Up, client: OpenAI) -> None:
    first, tiers = ask(client, PROMPT)
    assert tiers == {"device": 0, "host": 0, "disk": 0}
    eventually(lambda: blocks(up, "host") >= PROMPT_BLOCKS, limit_s=LIMIT_S, what="all its blocks are there")
    until_attached(up, {name: kill(up, name) for name in WORKERS})
    again, tiers = ask(client, PROMPT)
    assert again == first
    assert tiers == {"device": 0, "host": PROMPT_BLOCKS * BLOCK_TOKENS, "disk": 0}


def test_what_was_found_once_is_found_on_disk_when_the_store_and_the_workers_were_killed(
    up: Up, client: OpenAI
) -> None:
    first, _ = ask(client, PROMPT)
    eventually(lambda: blocks(up, "disk") >= PROMPT_BLOCKS, limit_s=LIMIT_S, what="all its blocks are on disk")
    kill(up, "kvbm")
    until_attached(up, {name: kill(up, name) for name in WORKERS})
    eventually(lambda: blocks(up, "disk") >= PROMPT_BLOCKS, limit_s=LIMIT_S, what="the next store has found them")
    again, tiers = ask(client, PROMPT)
    assert again == first
    assert tiers == {"device": 0, "host": 0, "disk": PROMPT_BLOCKS * BLOCK_TOKENS}


def _other_store_with_all_workers(up: Up, before: str) -> bool:
    stores = [store for store in stores_of(up) if store["instance"] != before]
    return any(layout["owners"] == len(WORKERS) for store in stores for layout in store["layouts"])


def test_without_a_store_nothing_fails_and_workers_attach_to_the_next_one(up: Up, client: OpenAI) -> None:
    before = one_store(up)["instance"]
    kill(up, "kvbm")
    text, _ = ask(client, "A young miller had a cat. " * 20)
    assert text

    is_back = partial(_other_store_with_all_workers, up, before)
    eventually(is_back, limit_s=LIMIT_S, what="both workers have attached to the next one")


def test_a_store_that_finds_its_pool_damaged_makes_another_and_the_same_workers_attach_to_it(
    up: Up, client: OpenAI
) -> None:
    store = one_store(up)
    workers = {name: up.pid(name) for name in WORKERS}
    with (Path(store["pool"]) / "pool").open("r+b") as file:
        file.write(bytes(64))
    kill(up, "kvbm")
    is_back = partial(_other_store_with_all_workers, up, store["instance"])
    eventually(is_back, limit_s=LIMIT_S, what="both workers have attached to the new pool")
    text, _ = ask(client, "An old king had a dog. " * 20)
    assert text
    eventually(lambda: blocks(up, "host") > 0, limit_s=LIMIT_S, what="and store in it")
    assert {name: up.pid(name) for name in WORKERS} == workers
