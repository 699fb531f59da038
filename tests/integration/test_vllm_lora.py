"""LoRAs of two vLLM workers, from the command that loads one to a client that asks for its name."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import Fleet, explained, fleet
from tests.integration.stack import ROOT, eventually
from tests.integration.test_vllm import cores
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, LORA_DTYPE, ON_DEVICE_WORDS, PYTHON, WORKER, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]
NAMESPACE = "vllm-lora"
WORKERS = ("worker 1", "worker 2")
PROMPT = [5 + index * 7 % 250 for index in range(100)]
ARGUMENTS = {
    **{"enforce_eager": "true", "dtype": LORA_DTYPE, "num_gpu_blocks_override": "64", "max_model_len": "1024"},
    **{"enable_lora": "true", "max_loras": "2", "max_lora_rank": "8"},
    **ON_DEVICE_WORDS,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-lora")


@pytest.fixture(scope="module")
def services(folder: Path, model: Path, nats_url: str) -> Iterator[Fleet]:
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    arguments = [word for name, value in ARGUMENTS.items() for word in (f"--vllm.{name}", value)]
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        for name in WORKERS:
            flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", str(PYTHON), *WORKER)
            one.start("worker", name, *flags, *arguments)
        one.start("frontend", "frontend", "--limits-attempts", "20", "--limits-frozen-s", "60")
        for name in WORKERS:
            eventually(one.services[name].ready, limit_s=LIMIT_S, what=f"{name} serves")
        one.wait_ready()
        yield one


class Client:
    """Asks the frontend and the router, and runs the commands."""

    def __init__(self, services: Fleet, folder: Path, nats_url: str) -> None:
        self._url = f"{services.services['frontend'].url}/v1"
        self._folder = folder
        self._nats_url = nats_url

    def get(self, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def ask(self, model: str, prompt: list[int] = PROMPT, tokens: int = 20) -> dict[str, Any]:
        fields = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.get("/completions", {"model": model, "prompt": prompt, **fields})

    def roots(self) -> dict[str, str]:
        """Return the `root` of each model that is listed."""
        return {entry["id"]: entry["root"] for entry in self.get("/models")["data"]}

    def cards(self, word: str) -> int:
        """Return how many cards of workers have the word."""
        return sum(word in file.read_text() for file in (self._folder / "where").rglob("*.json"))

    def lora(self, *words: str) -> list[str]:
        """Run `headrace lora`; return what it prints."""
        own = {"HEADRACE_DISCOVERY_BACKEND": "file", "HEADRACE_DISCOVERY_PATH": str(self._folder / "where")}
        command = [sys.executable, "-m", "deploy.local.cli", "lora", *words]
        where = ["--nats", self._nats_url, "--namespace", NAMESPACE, "--state", str(self._folder / "no up")]
        done = subprocess.run(
            [*command, *where], cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    def explained(self, request: str) -> dict[str, Any]:
        """Return the router's decision on a request, once it has heard of the first token."""

        def read() -> dict[str, Any] | None:
            decision = explained(self._nats_url, NAMESPACE, request)
            return decision if decision["actual_cached_tokens"] is not None else None

        return eventually(read, limit_s=LIMIT_S, what="the router heard of the first token")


@pytest.fixture(scope="module")
def client(services: Fleet, folder: Path, nats_url: str) -> Client:
    return Client(services, folder, nats_url)


def test_a_lora_is_loaded_listed_asked_for_and_updated_while_it_is_served(
    client: Client, model: Path, tmp_path: Path
) -> None:
    base = client.ask("tiny")["choices"][0]["token_ids"]
    first, second = (write_lora(tmp_path / str(seed), model, rank=8, seed=seed) for seed in (1, 2))
    assert len(client.lora("load", "sql", str(first))) == len(WORKERS)
    eventually(lambda: "sql" in client.roots(), limit_s=LIMIT_S, what="the LoRA is listed")
    entry = client.get("/models/sql")
    assert (entry["parent"], entry["root"].partition("@")[0]) == ("tiny", "sql")
    answer = client.ask("sql")
    changed = answer["choices"][0]["token_ids"]
    assert answer["model"] == "sql"
    assert changed != base
    assert client.ask("tiny")["choices"][0]["token_ids"] == base

    old = client.roots()["sql"]
    worker = client.explained(client.ask("sql")["id"])["instance"]
    client.lora("unload", "sql", "--instance", worker)
    assert client.ask("sql")["choices"][0]["token_ids"] == changed  # by the other worker
    client.lora("load", "sql", str(second), "--instance", worker)
    assert client.roots()["sql"].startswith("sql@")
    client.lora("unload", "sql")
    eventually(lambda: "sql" not in client.roots(), limit_s=LIMIT_S, what="the LoRA is gone")
    client.lora("load", "sql", str(second))
    eventually(lambda: client.roots().get("sql", old) != old, limit_s=LIMIT_S, what="the new files are listed")
    updated = client.ask("sql")
    assert updated["choices"][0]["token_ids"] not in (base, changed)
    assert updated["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    client.lora("unload", "sql")


def test_the_router_finds_what_is_cached_under_the_lora_and_nothing_of_the_base(
    client: Client, model: Path, tmp_path: Path
) -> None:
    client.lora("load", "law", str(write_lora(tmp_path / "law", model, rank=8)))
    eventually(lambda: "law" in client.roots(), limit_s=LIMIT_S, what="the LoRA is listed")
    numbers = iter(range(1000))

    def cached_once_more() -> dict[str, Any] | None:
        """Ask twice for a prompt that no worker has seen; the router may not have heard of its blocks yet."""
        number = next(numbers)
        prompt = [5 + (number * 31 + index * 11) % 250 for index in range(200)]
        instance = client.explained(client.ask("law", prompt)["id"])["instance"]
        for _ in range(20):
            decision = client.explained(client.ask("law", prompt)["id"])
            if decision["predicted_cached_tokens"]:
                assert decision["instance"] == instance
                plain = client.explained(client.ask("tiny", prompt)["id"])
                assert (plain["predicted_cached_tokens"], plain["actual_cached_tokens"]) == (0, 0)
                return decision
        return None

    decision = eventually(cached_once_more, limit_s=LIMIT_S, what="the router finds the prompt")
    assert decision["lora"] == client.roots()["law"]
    assert decision["predicted_cached_tokens"] == decision["actual_cached_tokens"] == 192
    client.lora("unload", "law")


def test_a_stream_goes_on_with_the_same_lora_when_a_core_is_killed_and_its_worker_loads_it_again(
    services: Fleet, client: Client, model: Path, tmp_path: Path
) -> None:
    client.lora("load", "tax", str(write_lora(tmp_path / "tax", model, rank=8)))
    eventually(lambda: "tax" in client.roots(), limit_s=LIMIT_S, what="the LoRA is listed")
    whole = client.ask("tax", tokens=400)["choices"][0]["token_ids"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.ask, "tax", tokens=400)
        time.sleep(0.7)
        starts = sum(services.services[name].metric("headrace_engine_starts_total") for name in WORKERS)
        [killed, *_] = [pid for name in WORKERS for pid in cores(services.services[name].process.pid)]
        os.kill(killed, signal.SIGKILL)
        tokens = answer.result()["choices"][0]["token_ids"]
        assert len(tokens) == len(whole)
        if LORA_DTYPE == "float32":  # in bfloat16 they depend on what else is computed in a step
            assert tokens == whole
    eventually(
        lambda: sum(services.services[name].metric("headrace_engine_starts_total") for name in WORKERS) > starts,
        limit_s=LIMIT_S,
        what="the worker has another engine",  # until it notices the death, its card is that of before
    )
    for name in WORKERS:
        eventually(services.services[name].ready, limit_s=LIMIT_S, what=f"{name} serves again")
    eventually(lambda: client.cards("tax@") == len(WORKERS), limit_s=LIMIT_S, what="both have loaded it again")
    assert client.ask("tax", tokens=400)["choices"][0]["token_ids"] == whole
    assert len(client.lora("unload", "tax")) == len(WORKERS)
