"""Workers with roles over NATS and real kvbms, and a worker with the same weights that does all alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import nats
import openai
from msgspec import Struct

from shared import subjects
from tests.integration.fleet import READY_LIMIT_S, Fleet, Service, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

LIMIT_S = 240.0
CONTEXT = 8192
GREEDY: dict[str, Any] = {"temperature": 0}
TOKENS = 24


class RolesRig(Struct):
    """The processes, and how each is started again."""

    services: Fleet
    workers: Mapping[str, str]
    """Worker → its kvbm. A worker's name begins with its role."""
    kvbms: Mapping[str, tuple[str, ...]]
    """Kvbm → its further settings."""
    folder: Path
    nats_url: str
    namespace: str
    common: tuple[str, ...]
    """Settings of all workers."""
    limit_s: float
    """Seconds that a worker may take to start."""

    def start(self, name: str) -> None:
        if name in self.kvbms:
            pool = ("--pool-directory", str(self.folder / name), "--pool-size-bytes", str(64 << 20))
            self.services.start("kvbm", name, *pool, *self.kvbms[name])
        elif name == "alone":
            self.services.start("worker", name, *self.common, "--model-name", "alone")
        else:
            kvbm = ("--kvbm-pool", str(self.folder / self.workers[name]))
            patient = ("--kvbm-wait-s", "20", "--kvbm-timeout-s", "4")
            self.services.start("worker", name, *self.common, *kvbm, *patient, "--role", name.split()[0])

    def wait_linked(self) -> None:
        self.services.wait_ready(limit_s=self.limit_s)
        for name in self.workers:
            attached = partial(_is_attached, self.services.services[name])
            eventually(attached, limit_s=LIMIT_S, what=f"{name} has attached")

    @property
    def hand_overs(self) -> float:
        return self.services.services["frontend"].metric("headrace_hand_overs_total")

    def decisions(self, request: str) -> list[dict[str, Any]]:
        """The choices of the router for a request."""

        async def asked() -> bytes:
            bus = await nats.connect(self.nats_url)
            try:
                subject = subjects.explain(self.namespace, "tiny")
                return (await bus.request(subject, request.encode(), timeout=LIMIT_S)).data
            finally:
                await bus.close()

        found: list[dict[str, Any]] = json.loads(asyncio.run(asked()))["decisions"]
        return found


def _is_attached(worker: Service) -> bool:
    return worker.metric("headrace_kvbm_attached") >= 1


@contextmanager
def roles(
    folder: Path,
    nats_url: str,
    namespace: str,
    *,
    workers: Mapping[str, str],
    kvbms: Mapping[str, tuple[str, ...]],
    engine: Sequence[str] = ("--threads", "1", "--kv-dtype", "float32"),
    limit_s: float = READY_LIMIT_S,
    **model: Any,
) -> Iterator[RolesRig]:
    """Run a router, a frontend, these kvbms and workers, and `alone`; they know one another. `engine`: settings of all
    workers, each of which starts within `limit_s`; `model`: arguments of `write_tiny_model`."""
    where = ("--namespace", namespace, "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    common = ("--model", str(write_tiny_model(folder / "tiny", context_length=CONTEXT, **model)), *engine)
    with fleet(folder, nats_url, *where) as services:
        rig = RolesRig(services, workers, kvbms, folder, nats_url, namespace, common, limit_s)
        services.start("router", "router")
        for name in (*kvbms, *workers, "alone"):
            rig.start(name)
        # A busy machine that makes workers look frozen costs attempts, and no request.
        limits = ("--limits-frozen-s", "2.5", "--limits-quiet-s", "0.5", "--limits-attempts", "20")
        services.start("frontend", "frontend", *limits, "--limits-rescue-s", "120")
        rig.wait_linked()
        router, sources = services.services["router"], len(kvbms) + len(workers) + 1
        eventually(
            lambda: router.metric("headrace_kv_sources") >= sources, limit_s=LIMIT_S, what="the router knows all"
        )
        yield rig


@contextmanager
def client_of(rig: RolesRig) -> Iterator[openai.OpenAI]:
    url = f"{rig.services.services['frontend'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def ask(
    client: openai.OpenAI, model: str, prompt: str, sampling: dict[str, Any], then: Callable[[], None] | None = None
) -> str:
    """Return the text of a streamed answer; `then` happens after its first token."""
    text, finish = "", None
    for number, chunk in enumerate(
        client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True, "deadline_s": 600},
            **sampling,
        )
    ):
        if not number and then is not None:
            then()
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    assert finish == "length"
    return text


@contextmanager
def streams(client: openai.OpenAI, number: int) -> Iterator[None]:
    """Keep `number` answers streaming. They are short, so that a new one soon goes to the worker that has fewer."""
    ended = threading.Event()

    def stream(which: int) -> None:
        body = {"ignore_eos": True, "deadline_s": 600}
        prompt = f"background {which}"
        while not ended.is_set():
            with client.completions.create(
                model="tiny", prompt=prompt, max_tokens=1000, stream=True, temperature=0, extra_body=body
            ) as chunks:
                for _ in chunks:
                    if ended.is_set():
                        return

    threads = [threading.Thread(target=stream, args=(which,)) for which in range(number)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        ended.set()
        for each in threads:
            each.join(LIMIT_S)
        assert not any(each.is_alive() for each in threads), "a stream does not end"


def prompt_of(words: int, seed: str) -> str:
    return " ".join(f"{seed}{number}" for number in range(words))
