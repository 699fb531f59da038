"""From one command to a real answer through every service: `headrace up` with SmolLM2, asked as its users ask it."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from deploy.local.stack import servers
from shared.api_keys import key_digest
from tests.forge import FORGED
from tests.integration.stack import ROOT, Up, eventually, running, with_models
from tests.tiny_model import write_tiny_model

CERTIFICATES = ROOT / "tests" / "frontend" / "certificates"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
LIMIT_S = 180.0
ALL = ["frontend", "kvbm", "router", "worker", "worker"]
WORKERS = "/headrace/default/instances/worker/"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running(with_models(tmp_path_factory.mktemp("up"))) as stack:
        yield stack


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def etcd_keys(up: Up, prefix: str) -> dict[str, Any]:
    """What an operator sees with etcdctl; every value must be JSON."""
    etcdctl = Path(servers.etcd()).with_name("etcdctl")
    patient = ("--command-timeout=100s", "--dial-timeout=100s")  # else 5 s and 2 s
    command = [str(etcdctl), "--endpoints", up.record["etcd"], *patient, "get", "--prefix", prefix]
    text = subprocess.run(command, check=True, capture_output=True, text=True, env={"ETCDCTL_API": "3"}).stdout
    lines = text.splitlines()
    return {key: json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)}


def headrace(up: Up, *words: str) -> str:
    command = [sys.executable, "-m", "deploy.local.cli", *words, "--state", str(up.state)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def idle(up: Up) -> bool:
    """Tell whether no worker's latest report has a running request; on a busy machine reports come late."""
    instances = json.loads(headrace(up, "status", "--json"))["instances"]
    loads = [row["load"] for row in instances if row["service"] == "worker"]
    return all(load is not None and load["running"] + load["waiting"] == 0 for load in loads)


def test_a_streamed_answer_knows_the_capital_of_france_and_the_cache_remembers_the_question(client: OpenAI) -> None:
    def ask() -> tuple[str, int]:
        text, cached = "", 0
        with client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                if chunk.usage and chunk.usage.prompt_tokens_details:
                    cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        return text, cached

    first, _ = ask()
    second, cached = ask()
    assert "Paris" in first
    assert second == first
    assert cached > 0


def test_another_conversation_goes_to_the_other_worker_and_a_follow_up_finds_its_blocks(up: Up, client: OpenAI) -> None:
    opening = "Tell me a long story about a river, a mill and the miller's three daughters. " * 4
    first = client.with_raw_response.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": opening}],
        temperature=0,
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with first.parse() as stream:
        text = ""
        chunks = iter(stream)
        while not text:
            text += "".join(choice.delta.content or "" for choice in next(chunks).choices)
        other = client.with_raw_response.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "List the planets of the solar system, one a line. " * 4}],
            max_tokens=4,
        )
        text += "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    eventually(lambda: idle(up), limit_s=LIMIT_S, what="both workers have reported that nothing runs")
    follow = client.with_raw_response.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": opening},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And then?"},
        ],
        max_tokens=4,
    )
    home = up.worker_of(MODEL, first.headers["x-request-id"])
    assert up.worker_of(MODEL, other.headers["x-request-id"]) != home
    [decision] = up.explained(MODEL, follow.headers["x-request-id"])["decisions"]
    device = {row["instance"]: row["overlap"][0] for row in decision["candidates"]}
    # Where speeds come and go, a worker that loads the blocks may seem faster than the one that has them.
    assert decision["instance"] == home or decision["predicted_cached_tokens"] > 200
    assert device[home] == max(device.values()) > 0
    usage = follow.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 200


def test_a_client_with_nothing_but_nats_gets_a_streamed_answer(up: Up) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None, "the README has lost its NATS client"
    result = subprocess.run(
        [sys.executable, "-c", example[1], up.record["nats"]], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 1


def test_forged_blocks_with_equal_routing_hashes_never_share_cached_bytes(client: OpenAI) -> None:
    """The pair has one XXH3-64 hash; greedy answers after either must be those of an undisturbed run."""

    def answer(block: Sequence[int]) -> tuple[str, int]:
        tail = [504, 3575, 282, 4649, 314]
        completion = client.completions.create(model=MODEL, prompt=[*block, *tail], temperature=0, max_tokens=8)
        assert completion.usage is not None
        details = completion.usage.prompt_tokens_details
        return completion.choices[0].text, (details.cached_tokens or 0) if details else 0

    first, second = FORGED
    _, cached = answer(first)
    assert cached == 0
    _, cached = answer(second)
    assert cached == 0
    _, cached = answer(first)
    assert cached == len(first)


def test_status_shows_every_instance_and_chat_answers(up: Up) -> None:
    def everyone() -> dict[str, Any] | None:
        status: dict[str, Any] = json.loads(headrace(up, "status", "--json"))
        return status if sorted(instance["service"] for instance in status["instances"]) == ALL else None

    status = eventually(everyone, limit_s=LIMIT_S, what="all are there; the block store comes last")
    assert {worker["model"] for worker in status["models"]} == {MODEL}
    assert "Paris" in headrace(up, "chat", "--temperature", "0", QUESTION)


def test_etcd_shows_readable_json_of_who_is_alive(up: Up) -> None:
    def everyone() -> dict[str, Any] | None:
        keys = etcd_keys(up, "/headrace/")
        return keys if sorted(key.split("/")[4] for key in keys if "/instances/" in key) == ALL else None

    keys = eventually(everyone, limit_s=LIMIT_S, what="all are there")
    cards = [value for key, value in keys.items() if "/models/" in key]
    assert [card["model"] for card in cards] == [MODEL, MODEL]


def test_a_killed_worker_is_gone_with_its_lease_and_its_stream_ends_as_if_nothing_had_happened(
    up: Up, client: OpenAI
) -> None:
    def begin(question: str) -> tuple[str, Iterator[str]]:
        answer = client.with_raw_response.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        texts = ("".join(choice.delta.content or "" for choice in chunk.choices) for chunk in answer.parse())
        return answer.headers["x-request-id"], texts

    question = "Write a poem about the sea."
    undisturbed = "".join(begin(question)[1])
    before = etcd_keys(up, WORKERS)
    request, texts = begin(question)
    text = next(filter(None, texts))
    victim = WORKERS + up.worker_of(MODEL, request)
    os.kill(before[victim]["pid"], signal.SIGKILL)
    assert text + "".join(texts) == undisturbed
    eventually(lambda: victim not in etcd_keys(up, WORKERS), limit_s=LIMIT_S, what="the killed worker's key is gone")
    eventually(lambda: len(etcd_keys(up, WORKERS)) == 2, limit_s=LIMIT_S, what="its successor is there")


@pytest.mark.parametrize("discovery", ["etcd", "file"])
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, discovery: str) -> None:
    with running(with_models(tmp_path), "--engine", "echo", "--workers", "1", "--discovery", discovery) as up:
        record = up.record
        with urllib.request.urlopen(up.url.removesuffix("/v1") + "/health") as answer:
            assert answer.status == 200
        assert up.stop() == 0
    for program in record["programs"].values():
        assert not Path(f"/proc/{program['pid']}").exists()
    assert not (tmp_path / "run" / "up.json").exists()


def test_keys_a_certificate_and_settings_by_name_are_in_force(tmp_path: Path) -> None:
    keys, model = tmp_path / "keys.toml", write_tiny_model(tmp_path / "tiny")
    keys.write_text(f'alice = {{ sha256 = "{key_digest("sk-alice").hex()}" }}\n')
    (tmp_path / "state").mkdir()
    access = (
        "--keys",
        str(keys),
        "--tls-cert",
        str(CERTIFICATES / "one.pem"),
        "--tls-key",
        str(CERTIFICATES / "one.key"),
    )
    small = ("--engine", "echo", "--model", str(model), "--workers", "1", "--discovery", "file")
    page = "https://chat.example.org"
    with running(tmp_path / "state", *small, *access, "--set", f"frontend.http.cors_origins={page}") as stack:
        assert stack.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(CERTIFICATES / "one.pem"))

        def models(key: str) -> tuple[int, str | None]:
            asked = urllib.request.Request(
                f"{stack.url}/models", headers={"Authorization": f"Bearer {key}", "Origin": page}
            )
            try:
                with urllib.request.urlopen(asked, timeout=LIMIT_S, context=trusted) as answer:
                    return int(answer.status), answer.headers["Access-Control-Allow-Origin"]
            except urllib.error.HTTPError as refused:
                with refused:
                    return refused.code, refused.headers["Access-Control-Allow-Origin"]

        assert models("sk-alice") == (200, page)
        assert models("sk-bob") == (401, page)
