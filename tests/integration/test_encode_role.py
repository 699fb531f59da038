"""A worker with the role encode in a whole `headrace up`, native on a CPU or a GPU, or of vLLM: the same tokens with it
and without, whatever is lost."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from itertools import count
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from tests.gpu.device import missing
from tests.integration.stack import ROOT, Up, eventually, running
from tests.process_tree import children
from tests.tiny_model import CLIP, write_tiny_model
from tests.worker.vllm.environment import needs_vllm
from tests.worker.vllm.tiny_llava import HAS_TORCHVISION

LIMIT_S = 240.0
SIDE = 112
TOWER = {**CLIP, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "image_size": SIDE}
"""An image takes long enough that a step of it is worth a message; the patches are as small as those of CLIP."""
DEEP_TOWER = {**TOWER, "num_hidden_layers": 24}
"""On a GPU an image of six layers takes a millisecond."""
STREAMS = {"native": 8, "cuda": 32, "vllm": 8}
"""Answers that are decoded at the same time: with fewer of them a GPU encodes sooner in place."""
PATIENT = ("worker.kvbm.wait_s=60", "worker.kvbm.timeout_s=4", "frontend.limits.frozen_s=120")
ON_GPU = ("--device", "cuda", "--cuda", "dtype=float32", "--gpu-memory-share", "0.3", "--discovery", "file")
"""A part of the memory, since other tests have some; a machine with a GPU may have no etcd."""
GPU_MARKS = (pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing()))
VLLM_MARKS = (needs_vllm, pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM has no torchvision"))
VLLM = ("worker.vllm.enforce_eager=true", "worker.vllm.dtype=float32", "worker.vllm.num_gpu_blocks_override=1024")


KINDS = ("native", pytest.param("cuda", marks=GPU_MARKS), pytest.param("vllm", marks=VLLM_MARKS))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def up(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    model = write_tiny_model(
        tmp_path_factory.mktemp("model") / "eyes",
        architecture="LlavaForConditionalGeneration",
        tied=False,
        llava={"vision_config": DEEP_TOWER if kind == "cuda" else TOWER},
        context_length=4096,
        hidden=128,  # vLLM's kernels on a CPU need larger heads than the other tests' models have
    )
    settings = (*PATIENT, *VLLM) if kind == "vllm" else PATIENT
    engine = ON_GPU if kind == "cuda" else ("--engine", kind)
    state = tmp_path_factory.mktemp("up")
    flags = (
        "--workers",
        "1",
        "--encode",
        "1",
        "--kvbm-bytes",
        "64M",
        *(word for each in settings for word in ("--set", each)),
    )
    with running(state, "--model", str(model), *engine, *flags) as stack:
        yield stack
        assert stack.stop() == 0


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(7).integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


_TENANTS = count()


def ask(client: OpenAI) -> list[int]:
    """Return the tokens of an answer about the picture, for a tenant whose caches have nothing of it."""
    answer = client.chat.completions.create(
        model="eyes",
        messages=[{"role": "user", "content": [{"type": "text", "text": "What?"}, picture()]}],  # type: ignore[list-item, misc]
        max_tokens=12,
        temperature=0,
        logprobs=True,
        extra_body={
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"tenant-{next(_TENANTS)}",
        },
    )
    assert answer.choices[0].logprobs is not None
    return [int(one.token.removeprefix("token_id:")) for one in answer.choices[0].logprobs.content or ()]


@contextmanager
def streams(up: Up, number: int) -> Iterator[None]:
    """Answers that are decoded at the same time, for which encoding in place costs more. Their parts are not parsed,
    which would take longer than a GPU needs to make them."""
    stopping = threading.Event()
    begun = [threading.Event() for _ in range(number)]

    def stream(which: int) -> None:
        body: dict[str, Any] = {
            **{"model": "eyes", "messages": [{"role": "user", "content": f"Stream {which}"}], "max_tokens": 2000},
            **{"stream": True, "ignore_eos": True},
        }
        asked = Request(f"{up.url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        while not stopping.is_set():
            with suppress(OSError, HTTPException), urlopen(asked, timeout=LIMIT_S) as answer:
                for _ in answer:  # it ends where the worker is killed
                    begun[which].set()
                    if stopping.is_set():
                        break

    threads = [threading.Thread(target=stream, args=(which,)) for which in range(number)]
    for thread in threads:
        thread.start()
    try:
        for each in begun:
            assert each.wait(LIMIT_S)
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(LIMIT_S)


def status(up: Up) -> dict[str, Any]:
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--state", str(up.state), "--json"]
    found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=LIMIT_S).stdout
    shown: dict[str, Any] = json.loads(found)
    return shown


def encoders(up: Up) -> dict[str, dict[str, int]]:
    """Return the encoder caches of the workers by their roles."""
    rows = [row for row in status(up)["instances"] if row["service"] == "worker"]
    return {row["role"]: (row["load"] or {}).get("encoder") or {} for row in rows}


def apart(up: Up, outcome: str) -> float:
    """Return how many images an encode worker was asked for, with this outcome."""
    (http,) = (row["http"] for row in status(up)["instances"] if row["service"] == "frontend")
    with urlopen(f"{http}/metrics", timeout=LIMIT_S) as reply:
        lines = reply.read().decode().splitlines()
    counted = [line for line in lines if line.startswith("headrace_images_apart_total{") and f'"{outcome}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in counted)


@pytest.mark.tier("long")
def test_an_encode_worker_changes_no_token_whether_it_works_stands_still_or_dies(
    up: Up, client: OpenAI, kind: str
) -> None:
    expected = ask(client)
    assert apart(up, "encoded") + apart(up, "failed") == 0, "an idle worker encodes its own images"
    (engine,) = children(up.pid("worker-0"))
    os.kill(engine, signal.SIGKILL)  # vLLM's own cache has the picture for all tenants

    def ended(outcome: str) -> bool:
        """Ask about the picture again; return whether an encode worker was asked, with this outcome."""
        before = apart(up, outcome)
        assert ask(client) == expected
        return apart(up, outcome) > before

    with streams(up, STREAMS[kind]):
        assert eventually(lambda: ended("encoded"), limit_s=LIMIT_S, what="the router has the picture encoded apart")
        decisions = up.explained("eyes", "")["decisions"]
        assert any("encodes 1 image: " in each["reason"] for each in decisions)

        def counted() -> bool:
            found = encoders(up)
            return found["encode"].get("encoded", 0) > 0 and found["aggregated"].get("fetched", 0) > 0

        assert eventually(counted, limit_s=LIMIT_S, what="status counts the images")

        worker = up.pid("encode-0")
        (engine,) = children(worker)
        os.kill(engine, signal.SIGSTOP)
        assert ask(client) == expected, "it stands still, and is asked unless the machine is so slow that it costs more"
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)

        answers: list[list[int]] = []
        asking = threading.Thread(target=lambda: answers.append(ask(client)))
        asking.start()
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
        asking.join(LIMIT_S)
        assert answers == [expected], "its engine dies at about the same time"

        os.kill(worker, signal.SIGKILL)
        assert ask(client) == expected, "it is gone"
        os.kill(up.pid("kvbm"), signal.SIGKILL)
        assert ask(client) == expected, "and so is the kvbm"

    with streams(up, STREAMS[kind]):
        assert eventually(lambda: ended("encoded"), limit_s=LIMIT_S, what="both are back")
