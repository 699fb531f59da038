"""Pictures and videos of two workers with diffusers, in a fleet of real processes: one is killed in the middle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.chromium import browser, page, program
from tests.frontend.images.samples import picture as png
from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.process_tree import below
from tests.worker.diffusers.environment import LIMIT_S, PYTHON, needs_diffusers, write_image_pipeline

pytestmark = [needs_diffusers, pytest.mark.timeout(3600)]
WORKERS = ("worker 1", "worker 2")
PATIENT = ("--limits-attempts", "20", "--limits-rescue-s", "600", "--limits-select-timeout-s", "30")
"""Settings of frontends on a machine that is busy with other tests."""
ASKED: Any = {"model": "tiny", "prompt": "a mill at the river"}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("pictures")
    model = write_image_pipeline(folder / "tiny")
    where = ("--namespace", "pictures", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        for name in WORKERS:
            flags = ("--model", str(model), "--engine", "diffusers", "--diffusers-python", str(PYTHON))
            alone = ("--diffusers-most-together", "1")  # so that equal seeds give equal bytes on a GPU, too
            one.start("worker", name, *flags, *alone, "--threads", "1", "--max-running", "4", "--stall-s", "600")
        one.start("frontend", "frontend", "--media-directory", str(folder / "media"), *PATIENT)
        one.wait_ready()
        yield one


@pytest.fixture
def client(services: Fleet) -> Iterator[OpenAI]:
    url = f"{services.services['frontend'].url}/v1"
    with OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def picture(client: OpenAI, **more: object) -> bytes:
    answer = client.images.generate(**ASKED, extra_body=more)
    assert answer.data is not None
    return b64decode(answer.data[0].b64_json or "")


def running(services: Fleet) -> list[str]:
    """The workers that have a picture."""
    return [name for name in WORKERS if services.services[name].metric("headrace_inflight_requests")]


def counted(services: Fleet) -> float:
    """The steps of all workers, which they publish now and then."""
    return sum(services.services[name].metric("headrace_picture_steps_total") for name in WORKERS)


def engine_of(services: Fleet, name: str) -> int:
    """The process that computes a worker's pictures."""
    [engine] = [pid for pid in below(services.services[name].process.pid) if "diffusers" in command_of(pid)]
    return engine


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def test_pictures_of_a_seed_are_the_same(services: Fleet, client: OpenAI) -> None:
    answer = client.images.generate(**ASKED, n=4, extra_body={"seed": 3, "steps": 10})
    assert answer.data is not None
    files = [b64decode(one.b64_json or "") for one in answer.data]
    assert len(set(files)) == 4
    assert picture(client, seed=5, steps=10) == files[2]
    eventually(lambda: counted(services) == 50, limit_s=LIMIT_S, what="each step is counted")


def test_both_workers_make_pictures_once_the_router_knows_both(services: Fleet, client: OpenAI) -> None:
    def both() -> bool:
        client.images.generate(**ASKED, n=4, extra_body={"steps": 2})
        return all(services.services[name].metric("headrace_picture_steps_total") for name in WORKERS)

    eventually(both, limit_s=LIMIT_S, what="both workers have made some")


def test_a_picture_whose_engine_is_killed_is_made_elsewhere_and_is_the_same(services: Fleet, client: OpenAI) -> None:
    more = {"seed": 11, "steps": 200}
    whole = picture(client, **more)
    services.wait_idle(*WORKERS)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        again = threads.submit(picture, client, **more)
        eventually(lambda: bool(running(services)), limit_s=LIMIT_S, what="a worker has it")
        [name] = running(services)
        os.kill(engine_of(services, name), signal.SIGKILL)
        assert again.result(LIMIT_S) == whole
    assert services.services[name].metric("headrace_engine_restarts_total") == 1
    services.wait_ready()


def test_a_picture_from_an_image_whose_engine_is_killed_is_made_elsewhere_and_is_the_same(
    services: Fleet, client: OpenAI
) -> None:
    services.wait_ready()
    image = png("PNG", (48, 96), 200)

    def edited(**more: object) -> bytes:
        answer = client.images.edit(**ASKED, image=image, extra_body={"seed": 11, "strength": 1.0, **more})
        assert answer.data is not None
        return b64decode(answer.data[0].b64_json or "")

    whole = edited(steps=200)
    services.wait_idle(*WORKERS)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        again = threads.submit(edited, steps=200)
        eventually(lambda: bool(running(services)), limit_s=LIMIT_S, what="a worker has it")
        [name] = running(services)
        os.kill(engine_of(services, name), signal.SIGKILL)
        assert again.result(LIMIT_S) == whole
    masked = client.images.edit(**ASKED, image=image, mask=png("PNG", (48, 96), 0), extra_body={"steps": 2})
    assert masked.data
    services.wait_ready()


def test_a_client_that_leaves_frees_the_worker(services: Fleet, client: OpenAI) -> None:
    services.wait_ready()
    stream = client.images.generate(**ASKED, stream=True, partial_images=3, extra_body={"steps": 200})
    with stream as events:
        assert next(iter(events)).type == "image_generation.partial_image"
    services.wait_idle(*WORKERS)
    workers = [services.services[name] for name in WORKERS]
    assert sum(one.metric("headrace_requests_total", outcome="cancelled") for one in workers) == 1


@pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian's package: chromium)")
def test_the_page_shows_a_picture_as_it_comes(services: Fleet, tmp_path: Path) -> None:
    services.wait_ready()

    async def look(endpoint: str) -> None:
        async with page(endpoint) as tab:
            await tab.open(f"{services.services['frontend'].url}/ui")
            await tab.until("document.querySelector('#chat-model option')?.value === 'tiny'")
            await tab.type_text("#chat-text", "a mill at the river")
            await tab.value("document.querySelector('#chat-form').requestSubmit()")
            await tab.until("document.querySelector('img.picture')?.src.startsWith('data:image/jpeg')")
            await tab.until("document.querySelector('img.picture').src.startsWith('data:image/png')")
            await tab.until("document.querySelector('img.picture').naturalWidth === 64")
            await tab.until(
                "/64x64, 50 steps, seed \\d+/.test(document.querySelector('.turn.model .meta').textContent)"
            )
            await tab.picture(tmp_path / "page.png")
            assert tab.complaints == []

    with browser(tmp_path) as endpoint:
        asyncio.run(look(endpoint))
