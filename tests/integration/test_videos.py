"""Videos of a Wan shape in a fleet of real processes: an engine, and then a frontend, is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.integration.test_pictures import PATIENT, WORKERS, engine_of, running
from tests.worker.diffusers.environment import LIMIT_S, PYTHON, needs_diffusers, write_video_pipeline

pytestmark = [needs_diffusers, pytest.mark.timeout(3600)]
FRONTENDS = ("frontend 1", "frontend 2")
LONG: Any = {"prompt": "a mill", "seconds": "0.5", "size": "64x64", "steps": 200, "seed": 5}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("videos")
    model = write_video_pipeline(folder / "tiny")
    where = ("--namespace", "videos", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        for name in WORKERS:
            flags = ("--model", str(model), "--engine", "diffusers", "--diffusers-python", str(PYTHON))
            one.start("worker", name, *flags, "--threads", "1", "--max-running", "4", "--stall-s", "600")
        for name in FRONTENDS:
            one.start("frontend", name, "--media-directory", str(folder / "media"), *PATIENT)
        one.wait_ready()
        yield one


def ask(services: Fleet, frontend: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    url = f"{services.services[frontend].url}/v1/videos{path}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        found = answer.read()
    return found if path.endswith("/content") else json.loads(found)


def file_of(services: Fleet, frontend: str, name: str) -> bytes:
    """The video, once it is complete."""

    def completed() -> bool:
        video = ask(services, frontend, f"/{name}")
        assert video["status"] in ("queued", "in_progress", "completed"), video
        return bool(video["status"] == "completed")

    eventually(completed, limit_s=LIMIT_S, what="the video is complete")
    content: bytes = ask(services, frontend, f"/{name}/content")
    return content


def test_a_video_is_made_again_and_the_same_when_its_engine_is_killed(services: Fleet) -> None:
    whole = file_of(services, FRONTENDS[1], ask(services, FRONTENDS[0], "", LONG)["id"])
    assert whole[4:8] == b"ftyp"
    services.wait_idle(*WORKERS)
    name = ask(services, FRONTENDS[0], "", LONG)["id"]
    eventually(lambda: bool(running(services)), limit_s=LIMIT_S, what="a worker has it")
    os.kill(engine_of(services, running(services)[0]), signal.SIGKILL)
    assert file_of(services, FRONTENDS[1], name) == whole
    services.wait_ready()


def test_a_video_whose_frontend_is_killed_is_made_by_another_one(services: Fleet, tmp_path: Path) -> None:
    name = ask(services, FRONTENDS[0], "", {**LONG, "size": "128x128"})["id"]
    eventually(lambda: bool(running(services)), limit_s=LIMIT_S, what="a worker has it")
    services.services[FRONTENDS[0]].kill()
    assert ask(services, FRONTENDS[1], f"/{name}")["status"] in ("queued", "in_progress")
    assert file_of(services, FRONTENDS[1], name)[4:8] == b"ftyp"
