"""Pictures in a chat through a whole `headrace up`: transformers' answer, also after all workers were killed."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import APIError, OpenAI
from PIL import Image

from deploy.local.cli import main
from tests.integration.stack import ROOT, Up, eventually, running
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import ANSWER_TOKENS, CASES, CHAT, GOLDEN, LLAVAS, image_pixels

LIMIT_S = 180.0
WORKERS = ("worker-0", "worker-1")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "eyes", **CASES[LLAVAS[0]])
    kept = ("--kvbm-bytes", "64M", "--set", "kvbm.pool.arenas=2", "--set", "worker.kvbm.embeddings=true")
    patient = ("--set", "worker.kvbm.wait_s=60", "--set", "worker.kvbm.timeout_s=4", "--set", "worker.block_size=8")
    with running(tmp_path_factory.mktemp("up"), "--model", str(model), "--workers", "2", *kept, *patient) as stack:
        yield stack
        assert stack.stop() == 0


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def picture(number: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(image_pixels(28, number)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: OpenAI) -> tuple[list[int], int]:
    """Return the tokens of the answer to CHAT, and how many of the prompt were cached."""
    content: list[Any] = [{"type": "text", "text": one} if isinstance(one, str) else picture(one) for one in CHAT]
    answer = client.chat.completions.create(
        model="eyes",
        messages=[{"role": "user", "content": content}],
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    )
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    tokens = [int(one.token.removeprefix("token_id:")) for one in answer.choices[0].logprobs.content or ()]
    return tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def status(up: Up, *flags: str) -> str:
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--state", str(up.state), *flags]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def encoded(up: Up) -> int:
    """Return how many images the engines that live now have encoded."""
    rows = json.loads(status(up, "--json"))["instances"]
    caches = [(row["load"] or {}).get("encoder") for row in rows if row["service"] == "worker"]
    return sum(cache["encoded"] for cache in caches if cache)


@pytest.mark.tier("long")
def test_pictures_in_a_chat_get_transformers_answer_also_from_what_killed_workers_left(up: Up, client: OpenAI) -> None:
    with np.load(GOLDEN / "llava.npz") as golden:
        expected = [int(token) for token in golden[f"{LLAVAS[0]}: chat"]]
    assert ask(client)[0] == expected
    again, cached = ask(client)
    assert (again, cached > 0) == (expected, True)
    assert eventually(lambda: encoded(up) == 2, limit_s=LIMIT_S, what="status counts the images")
    assert "2 images, 8.19 kB; 0 found there, 0 in kvbm, 2 encoded" in status(up)
    killed = [up.pid(name) for name in WORKERS]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    def started() -> bool:
        programs = up.record["programs"]
        return all(name in programs and programs[name]["pid"] not in killed for name in WORKERS)

    assert eventually(started, limit_s=LIMIT_S, what="workers are started again")

    def answered() -> tuple[list[int], int] | None:
        try:
            return ask(client)
        except APIError:  # no worker is ready yet
            return None

    after, _ = eventually(answered, limit_s=LIMIT_S, what="a new worker answers")
    assert after == expected
    assert encoded(up) == 0, "the embeddings, or the blocks, are in kvbm"


@pytest.mark.tier("long")
def test_a_bench_with_images_has_each_of_them_encoded(up: Up, tmp_path: Path) -> None:
    before = encoded(up)
    load = ("--concurrency", "2", "--requests", "3", "--warmup", "1", "--words", "8", "--output-tokens", "4")
    words = ["bench", "--url", up.url, *load, "--images", "2", "--image-size", "40x30", "--out", str(tmp_path / "b")]
    assert main(words) == 0
    [row] = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["rows"]
    assert (row["outcomes"], row["images"]) == ({"done": 3}, 6)
    assert eventually(lambda: encoded(up) == before + 8, limit_s=LIMIT_S, what="status counts the images")
