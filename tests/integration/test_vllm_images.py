"""Pictures in a chat with a vLLM worker in a fleet of real processes: vLLM's own tokens, and the same pictures again
after the worker was killed."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.worker.native.golden.cases import image_pixels
from tests.worker.vllm.environment import LIMIT_S, ON_DEVICE_WORDS, PYTHON, WORKER, needs_vllm
from tests.worker.vllm.tiny_llava import HAS_TORCHVISION, answers_alone, write_model

pytestmark = [needs_vllm, pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM has no torchvision")]
ARGUMENTS = {"enforce_eager": "true", "dtype": "float32", "num_gpu_blocks_override": "64", **ON_DEVICE_WORDS}
PICTURES = (3, 4)
TEXTS = ("look at ", " and then at ", ": how do they differ?")


@pytest.fixture
def services(tmp_path: Path, nats_url: str) -> Iterator[Fleet]:
    write_model(tmp_path)
    where = ("--namespace", "vllm-images", "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as one:
        pool = ("--pool-directory", str(tmp_path / "pool"), "--pool-size-bytes", str(64 << 20), "--pool-arenas", "2")
        one.start("kvbm", "kvbm", *pool)
        one.start("router", "router", "--source-digest-s", "1")
        one.start("frontend", "frontend", "--limits-attempts", "20", "--limits-frozen-s", "60")
        start_worker(one, "worker 1", tmp_path)
        yield one


def start_worker(services: Fleet, name: str, directory: Path) -> None:
    """Start a worker; return when it serves and exchanges blocks."""
    arguments = [word for argument, value in ARGUMENTS.items() for word in (f"--vllm.{argument}", value)]
    flags = ("--model", str(directory / "tiny"), "--engine", "vllm", "--vllm-python", str(PYTHON), *WORKER)
    kept = ("--kvbm-pool", str(directory / "pool"), "--kvbm-embeddings", "true", "--kvbm-timeout-s", "4")
    worker = services.start("worker", name, *flags, *kept, *arguments)
    eventually(worker.ready, limit_s=LIMIT_S, what=f"{name} serves")
    eventually(lambda: worker.metric("headrace_kvbm_attached") == 1, limit_s=LIMIT_S, what=f"{name} is attached")
    services.wait_ready()


def messages(first: str) -> list[dict[str, Any]]:
    """Return a chat with the pictures, which begins with these words."""
    content: list[dict[str, Any]] = []
    for number, text in zip((*PICTURES, None), (first, *TEXTS[1:]), strict=True):
        content.append({"type": "text", "text": text})
        if number is not None:
            file = io.BytesIO()
            Image.fromarray(image_pixels(28, number)).save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": content}]


def post(services: Fleet, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{services.services['frontend'].url}{path}"
    request = urllib.request.Request(
        url, json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def ask(services: Fleet, first: str) -> list[int]:
    """Return the answer's tokens."""
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": True}
    body = {"messages": messages(first), "return_tokens_as_token_ids": True, **sampling}
    found = post(services, "/v1/chat/completions", body)
    return [int(one["token"].removeprefix("token_id:")) for one in found["choices"][0]["logprobs"]["content"]]


def test_a_chat_with_pictures_gets_vllms_own_tokens_also_from_what_a_killed_worker_left(
    services: Fleet, tmp_path: Path
) -> None:
    chats = (TEXTS[0], "Before you answer, look at ")
    prompts = [post(services, "/tokenize", {"messages": messages(first)})["tokens"] for first in chats]
    alone = answers_alone(tmp_path / "tiny", [(prompt, PICTURES) for prompt in prompts])
    assert ask(services, chats[0]) == alone[0]
    worker, kvbm = services.services["worker 1"], services.services["kvbm"]

    def counts(outcome: str, count: int) -> None:
        def met() -> bool:
            return services.services[worker.name].metric("headrace_images_total", outcome=outcome) == count

        eventually(met, limit_s=LIMIT_S, what=f"{count} images {outcome}")

    counts("encoded", 2)
    full = len(prompts[0]) // 32
    eventually(
        lambda: kvbm.metric("headrace_kvbm_committed_blocks_total") >= full + 2, limit_s=LIMIT_S, what="it is stored"
    )
    services.services.pop("worker 1").kill()
    start_worker(services, "worker 2", tmp_path)
    worker = services.services["worker 2"]
    assert ask(services, chats[1]) == alone[1]
    counts("kvbm", 2)
    assert worker.metric("headrace_images_total", outcome="encoded") == 0
