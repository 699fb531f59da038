"""examples/a-nights-batch/night.py: what fails is tried again, a second start goes on, and wrong files are one line."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.examples.running import EXAMPLES
from tests.servers import free_port

PROGRAM = EXAMPLES / "a-nights-batch" / "night.py"
LIMIT_S = 120.0
AT_ONCE = 3


class Server:
    """A server that refuses each request once, and some for good."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.priorities: set[object] = set()
        self.most_at_once = 0
        self.for_good: set[str] = set()
        self._running = 0
        self._crowded = asyncio.Event()
        """Set once as many requests as may be are there at the same time: until then none is answered."""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"]
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        if self._running == AT_ONCE:
            self._crowded.set()
        await self._crowded.wait()
        await asyncio.sleep(0.01)  # for more than may be there at once
        self._running -= 1
        self.asked[prompt] += 1
        self.priorities.add(body["priority"])
        if prompt in self.for_good:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if self.asked[prompt] == 1:
            return web.json_response({}, status=429, headers={"Retry-After-Ms": "5"})
        return web.json_response({"choices": [{"text": prompt.upper()}]})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


async def night(folder: Path, url: str, *flags: str, key: str = "any") -> tuple[int, str]:
    """Run the program, and return its status and what it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    environment |= {"OPENAI_BASE_URL": url} | ({"OPENAI_API_KEY": key} if key else {})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), "requests.jsonl", "answers.jsonl", *flags),
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(LIMIT_S):
        said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def write_requests(folder: Path, count: int) -> list[str]:
    """Write requests for completions, and return their prompts, which are their ids too."""
    names = [f"request-{number}" for number in range(count)]
    lines = [{"custom_id": name, "url": "/v1/completions", "body": {"prompt": name}} for name in names]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return names


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


async def test_all_are_answered_and_a_second_start_asks_only_for_what_failed(tmp_path: Path) -> None:
    names, server = write_requests(tmp_path, 10), Server()
    server.for_good = {names[3]}
    async with serving(server) as url:
        status, said = await night(tmp_path, url, "--at-once", str(AT_ONCE))
        assert (status, said) == (1, "10 requests: 9 answered, 1 failed\n")
        texts = {line["custom_id"]: line["response"]["body"].get("choices") for line in answers(tmp_path)}
        assert texts == {name: [{"text": name.upper()}] if name != names[3] else None for name in names}
        assert server.asked == Counter({name: 2 if name != names[3] else 1 for name in names})
        assert server.priorities == {10}
        assert server.most_at_once == AT_ONCE
        server.for_good.clear()
        with (tmp_path / "answers.jsonl").open("a") as torn:
            torn.write('{"custom_id": "request-0", "resp')  # its power went off
        status, said = await night(tmp_path, url)
        assert (status, said) == (0, "10 requests: 10 answered, 0 failed\n")
        assert answers(tmp_path)[-1]["custom_id"] == names[3]
        assert sum(server.asked.values()) == 9 * 2 + 2


async def test_a_server_that_is_not_there_is_an_error_of_each_request(tmp_path: Path) -> None:
    write_requests(tmp_path, 1)
    status, _ = await night(tmp_path, f"http://127.0.0.1:{free_port()}/v1", "--tries", "1")
    assert status == 1
    [line] = answers(tmp_path)
    assert (line["response"], line["error"]["code"]) == (None, "connection")


@pytest.mark.parametrize(
    ("requests", "before", "said"),
    [
        (None, None, "No such file or directory: 'requests.jsonl'"),
        ("{", None, "error: requests.jsonl:1: needs a text custom_id, a url that begins with /v1/, and an object body"),
        ('{"custom_id": "a", "url": 1, "body": {}}', None, "error: requests.jsonl:1: needs a text custom_id"),
        (
            '{"custom_id": "a", "url": "/v1/x", "body": {}}\n' * 2,
            None,
            "requests.jsonl:2: a second request with the cu",
        ),
        ("", "no answers\n", "error: answers.jsonl: not a file of answers"),
    ],
)
def test_wrong_files_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    requests: str | None,
    before: str | None,
    said: str,
) -> None:
    for name, text in (("requests.jsonl", requests), ("answers.jsonl", before)):
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["night.py", "requests.jsonl", "answers.jsonl"])
    assert runpy.run_path(str(PROGRAM))["main"]() == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


async def test_a_missing_key_is_one_line(tmp_path: Path) -> None:
    write_requests(tmp_path, 1)
    status, said = await night(tmp_path, "http://127.0.0.1:9/v1", key="")
    assert status == 2
    assert "OPENAI_API_KEY" in said
    assert "Traceback" not in said
