"""Two vLLM workers in a fleet of real processes: vLLM's own tokens, what the router knows, a core that is killed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.process_tree import below
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, ON_DEVICE, ON_DEVICE_WORDS, PYTHON, WORKER, needs_vllm, run_there

pytestmark = needs_vllm
WORKERS = ("worker 1", "worker 2")
PROMPT = [5 + index * 7 % 250 for index in range(100)]
ARGUMENTS = {
    "enforce_eager": "true",
    "dtype": "float32",
    "num_gpu_blocks_override": "64",
    "max_model_len": "1024",
    "max_num_batched_tokens": "256",
    **ON_DEVICE_WORDS,
}
ALONE = """
import json
from vllm import LLM, SamplingParams
llm = LLM({model!r}, enforce_eager=True, dtype="float32", block_size=32, num_gpu_blocks_override=64, max_model_len=1024,
          **{more!r})
params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
out = llm.generate({{"prompt_token_ids": {prompt!r}}}, params)[0]
tokens = list(out.prompt_token_ids) + list(out.outputs[0].token_ids)
found = [None if one is None else (one[token].logprob, sorted((entry.logprob for entry in one.values()), reverse=True))
         for token, one in zip(tokens, list(out.prompt_logprobs) + list(out.outputs[0].logprobs))]
out = llm.generate({{"prompt_token_ids": {prompt!r}}}, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
print(json.dumps({{"tokens": list(out[0].outputs[0].token_ids), "logprobs": found}}))
"""
OWN_EMBEDDING = """
import json
from vllm import LLM
llm = LLM({model!r}, runner="pooling", pooler_config={{"pooling_type": "MEAN"}}, enforce_eager=True, dtype="float32",
          block_size=32, num_gpu_blocks_override=64, max_model_len=1024, **{more!r})
print(json.dumps(llm.embed({{"prompt_token_ids": {prompt!r}}})[0].outputs.embedding))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3)


@pytest.fixture(scope="module")
def own(model: Path) -> dict[str, Any]:
    """What vLLM alone answers to the prompt: 40 greedy tokens, and the log-probabilities of the prompt and of three."""
    found: dict[str, Any] = run_there(ALONE.format(model=str(model), prompt=PROMPT, more=ON_DEVICE))
    return found


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, model: Path, nats_url: str) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("vllm")
    where = ("--namespace", "vllm", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    arguments = [word for name, value in ARGUMENTS.items() for word in (f"--vllm.{name}", value)]
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router", "--source-digest-s", "1")
        for name in WORKERS:
            flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", str(PYTHON), *WORKER)
            one.start("worker", name, *flags, *arguments)
        one.start("frontend", "frontend", "--limits-attempts", "20", "--limits-frozen-s", "60")
        eventually(one.services["worker 1"].ready, limit_s=LIMIT_S, what="worker 1 serves")
        eventually(one.services["worker 2"].ready, limit_s=LIMIT_S, what="worker 2 serves")
        one.wait_ready()
        eventually(lambda: bool(ask(one, max_tokens=1)), limit_s=LIMIT_S, what="a request is answered")
        yield one


def ask(services: Fleet, **fields: object) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | fields
    return post(services, "completions", body)


def chunks(services: Fleet, **fields: object) -> list[dict[str, Any]]:
    """Return the choices of all chunks of a streamed answer."""
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True} | fields
    url = f"{services.services['frontend'].url}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        lines = answer.read().decode().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


def post(services: Fleet, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer. Raise AssertionError with the body of another one than 200."""
    given = {"Content-Type": "application/json"}
    url = f"{services.services['frontend'].url}/v1/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), given)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as wrong:
        raise AssertionError(wrong.read().decode()) from None


def test_greedy_tokens_are_those_of_vllm_alone(services: Fleet, own: dict[str, Any]) -> None:
    answer = ask(services, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == own["tokens"]


def test_a_seed_draws_the_same_tokens_each_time_also_after_a_prompt_of_several_steps(services: Fleet) -> None:
    starts = [services.services[name].metric("headrace_engine_starts_total") for name in WORKERS]
    drawn = {"prompt": [5 + index * 11 % 250 for index in range(900)], "temperature": 1.0, "seed": 7}
    asked = [ask(services, return_token_ids=True, **drawn)["choices"][0]["token_ids"] for _ in range(2)]
    assert asked[0] == asked[1]
    assert [services.services[name].metric("headrace_engine_starts_total") for name in WORKERS] == starts


def test_log_probabilities_of_a_prompt_are_those_of_vllm_alone(services: Fleet, own: dict[str, Any]) -> None:
    likely = own["logprobs"]
    answer = ask(services, echo=True, logprobs=2, max_tokens=3, n=2)
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(likely) == len(PROMPT) + 3
        assert (found["token_logprobs"][0], found["top_logprobs"][0], likely[0]) == (None, None, None)
        assert found["token_logprobs"][1:] == pytest.approx([value for value, _ in likely[1:]], abs=1e-4)
        for top, (_, likeliest) in zip(found["top_logprobs"][1:], likely[1:], strict=True):
            assert max(top.values()) == pytest.approx(likeliest[0], abs=1e-4)
        assert found["text_offset"] == sorted(found["text_offset"])
    alone = ask(services, echo=True, logprobs=2, max_tokens=0)
    assert alone["usage"]["completion_tokens"] == 0
    [choice] = alone["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(found["token_logprobs"][: len(PROMPT)], abs=1e-4)
    assert answer["choices"][0]["text"].startswith(choice["text"])
    streamed = chunks(services, echo=True, logprobs=2, max_tokens=3)
    assert "".join(one["text"] for one in streamed) == answer["choices"][0]["text"]
    parts = [one["logprobs"] for one in streamed if one["logprobs"] is not None]
    for field in ("tokens", "text_offset"):
        assert [value for one in parts for value in one[field]] == answer["choices"][0]["logprobs"][field]
    values = [value for one in parts for value in one["token_logprobs"]]
    assert values == pytest.approx(answer["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4)
    long = [5 + index * 7 % 250 for index in range(1000)]  # its first chunk of 512 tokens and the rest, and 20 for each
    many = ask(services, prompt=long, echo=True, logprobs=20, max_tokens=1)["choices"][0]["logprobs"]
    assert len(many["tokens"]) == len(long) + 1
    with pytest.raises(AssertionError, match="logprobs"):
        ask(services, prompt=long, echo=True, logprobs=20, max_tokens=1, n=20)


def test_a_prompt_goes_where_it_is_cached(services: Fleet) -> None:
    prompt = [5 + index * 11 % 250 for index in range(200)]
    ask(services, prompt=prompt)
    time.sleep(1.0)  # events and load reports reach the router
    for _ in range(3):
        details = ask(services, prompt=prompt)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == 192


def test_the_routers_index_is_what_the_engines_hold(services: Fleet) -> None:
    for number in range(40):  # more blocks than both engines have
        ask(services, prompt=[5 + (index * 3 + number * 13) % 250 for index in range(160)], max_tokens=2)
    router = services.services["router"]
    agreed = router.metric("headrace_kv_digests_total", outcome="agreed")
    eventually(
        lambda: router.metric("headrace_kv_digests_total", outcome="agreed") >= agreed + 4,
        limit_s=LIMIT_S,
        what="digests of both workers agree again",
    )
    assert router.metric("headrace_kv_digests_total", outcome="differed") == 0


def test_a_worker_for_embeddings_serves_next_to_others(services: Fleet, model: Path) -> None:
    pooled = ARGUMENTS | {"runner": "pooling", "max_num_batched_tokens": "1024"}
    arguments = [word for name, value in pooled.items() for word in (f"--vllm.{name}", value)]
    flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", str(PYTHON), *WORKER)
    services.start("worker", "embedder", *flags, "--model-name", "vectors", *arguments)
    eventually(services.services["embedder"].ready, limit_s=LIMIT_S, what="the embedder serves")

    frontend = services.services["frontend"].url

    def known() -> bool:
        with urllib.request.urlopen(f"{frontend}/v1/models", timeout=LIMIT_S) as answer:
            return any(one["id"] == "vectors" for one in json.load(answer)["data"])

    eventually(known, limit_s=LIMIT_S, what="the frontend knows the model")
    body = {"model": "vectors", "input": [PROMPT, PROMPT[:40]]}
    vector = post(services, "embeddings", body)["data"][0]["embedding"]
    again = post(services, "embeddings", body)["data"]  # now blocks of these prompts are cached
    assert again[0]["embedding"] == pytest.approx(vector, abs=1e-5)
    with pytest.raises(AssertionError, match=r"sampling\.pooling: last; this engine was started with mean"):
        post(services, "embeddings", body | {"pooling": "last"})
    assert vector == pytest.approx(
        run_there(OWN_EMBEDDING.format(model=str(model), prompt=PROMPT, more=ON_DEVICE)), abs=1e-5
    )
    assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(AssertionError, match="not every worker of 'vectors' generates text"):
        ask(services, model="vectors", max_tokens=1)
    with pytest.raises(AssertionError, match="not every worker of 'tiny' makes embeddings"):
        post(services, "embeddings", {"model": "tiny", "input": PROMPT})
    assert ask(services, max_tokens=1)["choices"]


def test_streams_go_on_elsewhere_when_a_core_is_killed(services: Fleet) -> None:
    whole = ask(services, max_tokens=400)["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, services, max_tokens=400)
        time.sleep(0.7)
        killed = next(pid for name in WORKERS for pid in cores(services.services[name].process.pid))
        before = {each for each in socket_directories() if any(each.iterdir())}
        os.kill(killed, signal.SIGKILL)
        assert answer.result()["choices"][0]["text"] == whole
    for name in WORKERS:
        eventually(services.services[name].ready, limit_s=LIMIT_S, what=f"{name} serves again")
    eventually(
        lambda: bool(before - socket_directories()), limit_s=LIMIT_S, what="the killed engine's sockets are gone"
    )


def cores(worker: int) -> list[int]:
    """Return the ids of a worker's processes that have the name of vLLM's core."""
    return [pid for pid in below(worker) if b"EngineCor" in Path(f"/proc/{pid}/comm").read_bytes()]


def socket_directories() -> set[Path]:
    """Return the directories in which the processes of engines make their sockets."""
    return {*Path(tempfile.gettempdir()).glob("headrace-vllm-*")}
