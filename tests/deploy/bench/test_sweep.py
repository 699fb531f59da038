"""`headrace bench` against a little server that behaves, and that does not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from deploy.local.bench.options import BenchOptions
from deploy.local.bench.plan import Point
from deploy.local.bench.rows import LATE_S
from deploy.local.bench.sweep import aiperf_arguments
from deploy.local.cli import main
from deploy.local.size import token_client
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 180.0
TOKENS = 5


class Server:
    """An OpenAI endpoint whose model's name says how it behaves."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}/v1"
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.models = ["fine"]
        self.key_needed = False
        self.most = 0
        """Requests in flight at once."""
        self._now = 0
        self.held = 0
        """The request of this number is answered once four are in flight."""
        self._four = asyncio.Event()
        self.hung = asyncio.Event()
        """The fifth and the sixth request wait for answers that will not come."""

    async def list_models(self, _request: web.Request) -> web.Response:
        if self.key_needed:
            return web.json_response({"error": {"message": "You didn't provide an API key."}}, status=401)
        return web.json_response({"data": [{"id": model} for model in self.models]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.add(request.headers.get("Authorization", ""))
        self._now += 1
        self.most = max(self.most, self._now)
        if self.most >= 4:
            self._four.set()
        try:
            if len(self.asked) == self.held:
                await self._four.wait()
            return await self._answer(request, body)
        finally:
            self._now -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind, number = body["model"], Counter(one["model"] for one in self.asked)[body["model"]]
        if kind == "missing":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if kind == "busy" and number % 2 == 0:
            return web.Response(status=429, headers={"Retry-After": "1"}, text="too many")
        if kind == "silent" or (kind == "hangs" and number > 4):
            if number == 6:
                self.hung.set()
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if kind == "garbage":
            await response.write(b"<html>\n")
            return response
        for number in range(TOKENS):
            await response.write(_event({"choices": [{"delta": {"content": f"{number} "}}]}))
            await asyncio.sleep(0)
            if kind == "breaks" and number == 1:
                assert request.transport is not None
                request.transport.abort()
                return response
        if kind == "fails":
            await response.write(_event({"error": {"message": "it broke"}}))
            return response
        if kind != "ends":
            await response.write(_event({"choices": [{"delta": {}, "finish_reason": "length"}]}))
        if kind == "fine":
            await response.write(
                _event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2 * TOKENS}})
            )
        if kind != "ends":
            await response.write(b"data: [DONE]\n\n")
        return response


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/v1/completions", server.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(server.url.rpartition(":")[2].removesuffix("/v1"))).start()
    try:
        yield server
    finally:
        await runner.cleanup()


async def bench(server: Server, out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was written."""
    words = ["bench", "--url", server.url, "--out", str(out / "bench.json"), *flags]
    async with asyncio.timeout(LIMIT_S):
        status = await asyncio.to_thread(main, words)
    file = out / "bench.json"
    return status, json.loads(file.read_text()) if file.exists() else {}


async def test_a_sweep_measures_each_load_and_writes_its_table_its_json_and_its_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving() as server:
        key = tmp_path / "key"
        key.write_text("secret\n")
        server.held = (2 + 12) + 2 + 1
        flags = ("--concurrency", "1,4", "--requests", "12", "--words", "30", "--shared-words", "10")
        status, report = await bench(server, tmp_path, *flags, "--output-tokens", "9", "--api-key-file", str(key))
    assert status == 0
    assert [row["value"] for row in report["rows"]] == [1, 4]
    for row in report["rows"]:
        assert row["outcomes"] == {"done": 12}
        assert (row["tokens_by"], row["prompt_tokens"], row["complete"]) == ("usage", 7, True)
        assert 0 < row["first_token_s"]["p50"] <= row["whole_s"]["p50"]
    assert report["model"] == "fine"
    assert not report["interrupted"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        ["concurrency", "1", "12"],
        ["concurrency", "4", "12"],
    ]
    assert server.most == 4
    assert server.keys == {"Bearer secret"}
    assert len(server.asked) == 2 * (2 + 12)
    contents = [one["messages"][0]["content"].split() for one in server.asked]
    assert {len(words) for words in contents} == {30}
    assert len({tuple(words[:10]) for words in contents}) == 1
    assert {(one["max_tokens"], one["ignore_eos"], one["stream"]) for one in server.asked} == {(9, True, True)}
    assert "secret" not in json.dumps(report)


async def test_an_open_loop_sends_at_its_rate_whatever_comes_back(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("one\ntwo\n")
    async with serving() as server:
        flags = ("--rate", "200", "--requests", "40", "--prompts", str(prompts), "--may-stop", "--json")
        status, report = await bench(server, tmp_path, *flags)
    assert status == 0
    [row] = report["rows"]
    assert (row["load"], row["value"], row["outcomes"]) == ("rate", 200, {"done": 40})
    assert Counter(one["messages"][0]["content"] for one in server.asked) == {"one": 21, "two": 21}
    assert not any("ignore_eos" in one for one in server.asked)


async def test_a_rate_that_no_driver_keeps_is_not_taken_for_measured(tmp_path: Path) -> None:
    async with serving() as server:
        status, report = await bench(server, tmp_path, "--rate", "65536", "--requests", "1000", "--json")
    assert status == 0
    [row] = report["rows"]
    assert row["outcomes"] == {"done": 1000}
    assert row["late_s"] > LATE_S, "a thousand requests cannot be sent in 15 ms"


async def test_a_trace_is_sent_at_its_times_with_beginnings_that_are_equal_where_its_names_are(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 600, 3, [1, 2]), (200, 700, 4, [1, 3]), (400, 100, 5, [4])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    async with serving() as server:
        flags = ("--trace", str(trace), "--speed", "1,4", "--warmup", "0", "--tokens")
        status, report = await bench(server, tmp_path, *flags)
    assert status == 0
    assert [(row["load"], row["value"], row["outcomes"]) for row in report["rows"]] == [
        ("trace at speed", 1, {"done": 3}),
        ("trace at speed", 4, {"done": 3}),
    ]
    assert report["rows"][0]["seconds"] >= 0.4
    assert [one["max_tokens"] for one in server.asked] == [3, 4, 5] * 2
    prompts = [one["prompt"] for one in server.asked]
    assert [len(prompt) for prompt in prompts] == [600, 700, 100] * 2
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:] != prompts[1][512:600]


@pytest.mark.parametrize(
    ("kind", "outcome", "reason"),
    [
        ("breaks", "ended early", "ClientPayloadError"),
        ("ends", "ended early", "no finish reason"),
        ("fails", "failed", "it broke"),
        ("garbage", "unreadable", "not server-sent events"),
        ("missing", "failed", "404: no such model"),
        ("silent", "timed out", "the answer did not end within 0.2 s"),
    ],
)
async def test_what_goes_wrong_is_counted_by_what_it_was(tmp_path: Path, kind: str, outcome: str, reason: str) -> None:
    async with serving() as server:
        limit_s = "0.2" if kind == "silent" else "60"
        flags = ("--model", kind, "--concurrency", "2", "--requests", "4", "--warmup", "0", "--timeout-s", limit_s)
        status, report = await bench(server, tmp_path, *flags)
    assert status == 1
    [row] = report["rows"]
    assert row["outcomes"] == {outcome: 4}
    assert all(reason in told for told in row["reasons"])
    assert row["complete"]


async def test_a_refusal_is_counted_and_its_slot_waits_for_retry_after(tmp_path: Path) -> None:
    async with serving() as server:
        flags = ("--model", "busy", "--concurrency", "1", "--requests", "3", "--warmup", "0")
        _, report = await bench(server, tmp_path, *flags)
    [row] = report["rows"]
    assert row["outcomes"] == {"done": 2, "refused": 1}
    assert row["seconds"] >= 1.0
    assert row["tokens_by"] == "events"


async def test_an_endpoint_that_cannot_be_measured_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving() as server:
        asked = {
            ("--model", "missing"): "no request of the warm-up was answered: 404: no such model",
            (
                "--model",
                "silent",
                "--timeout-s",
                "0.2",
            ): "no request of the warm-up was answered: the answer did not end within 0.2 s",
        }
        for flags, said in asked.items():
            assert await bench(server, tmp_path, "--concurrency", "1", *flags) == (1, {})
            assert said in capsys.readouterr().err
        server.models = []
        assert await bench(server, tmp_path) == (1, {})
        assert "serves no model; see ./headrace status\n" in capsys.readouterr().err
        server.key_needed = True
        assert await bench(server, tmp_path) == (1, {})
        said = "status 401: You didn't provide an API key; give the key with --api-key-file FILE"
        assert said in capsys.readouterr().err
    assert await bench(server, tmp_path) == (1, {})
    said = "/v1 does not answer: Connection refused; does `./headrace up` run? (--state)\n"
    assert said in capsys.readouterr().err


async def test_a_list_of_models_that_is_too_long_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_client, "LIST_LIMIT_BYTES", 10)
    async with serving() as server:
        assert await bench(server, tmp_path) == (1, {})
    assert "/v1/models has more than 10 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--concurrency", "0"),
        ("--concurrency", "1", "--rate", "1"),
        ("--words", "0"),
        ("--words", "5", "--shared-words", "6"),
        ("--timeout-s", "nan"),
        ("--prompts", "/nowhere"),
        ("--api-key-file", "/nowhere"),
        ("--out", "/nowhere/bench"),
        ("--trace", "/nowhere"),
        ("--trace", __file__),
        ("--trace", __file__, "--rate", "1"),
        ("--trace", "/dev/null"),
        ("--speed", "2"),
    ],
)
def test_flags_that_make_no_sense_are_wrong_usage(flags: tuple[str, ...]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1/v1", *flags]) == 2


async def test_what_was_measured_before_an_interruption_is_reported(tmp_path: Path) -> None:
    async with serving() as server:
        command = [sys.executable, "-m", "deploy.local.cli", "bench", "--url", server.url, "--model", "hangs"]
        flags = ["--concurrency", "2", "--requests", "9", "--warmup", "0", "--out", str(tmp_path / "bench")]
        process = await asyncio.create_subprocess_exec(
            *command,
            *flags,
            cwd=ROOT,
            env=dict(os.environ),
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        async with asyncio.timeout(LIMIT_S):
            await server.hung.wait()
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
    assert process.returncode == 130
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["interrupted"]
    assert report["rows"][0]["outcomes"] == {"done": 4}
    assert b"concurrency 2: not complete" in out


async def test_an_interruption_before_anything_was_measured_is_said(tmp_path: Path) -> None:
    async with serving() as server:
        command = [sys.executable, "-m", "deploy.local.cli", "bench", "--url", server.url, "--model", "hangs"]
        flags = ["--concurrency", "1", "--requests", "9", "--warmup", "9", "--out", str(tmp_path / "bench")]
        process = await asyncio.create_subprocess_exec(
            *command,
            *flags,
            cwd=ROOT,
            env=dict(os.environ),
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        async with asyncio.timeout(LIMIT_S):
            await server.hung.wait()
            process.send_signal(signal.SIGINT)
            _, said = await process.communicate()
    assert process.returncode == 130
    assert b"interrupted before the first request had ended" in said
    assert not (tmp_path / "bench.json").exists()


def test_the_sweep_is_put_to_aiperf_in_its_own_words(tmp_path: Path) -> None:
    options = BenchOptions(
        url="http://127.0.0.1:8000/v1",
        points=[],
        command="",
        model="tiny",
        tokenizer="/models/tiny",
        words=100,
        shared_words=40,
        output_tokens=30,
        out=str(tmp_path),
    )
    words = aiperf_arguments(options, Point("open", 2.5, 50))
    assert words[0] == "profile"
    flags = dict(pairwise(words))
    expected = {
        "--url": "http://127.0.0.1:8000",
        "--request-rate": "2.5",
        "--request-count": "50",
        "--isl": "60",
        "--shared-system-prompt-length": "40",
        "--osl": "30",
        "--output-artifact-dir": f"{tmp_path}/rate-2.5",
    }
    assert expected.items() <= flags.items()


def test_without_aiperf_its_driver_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "--driver", "aiperf", "--model", "m", "--tokenizer", "t", "--concurrency", "1"]) == 2


async def test_prompts_have_images_of_their_own_which_the_report_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--concurrency", "2", "--requests", "4", "--warmup", "1", "--words", "3")
    async with serving() as server:
        status, report = await bench(server, tmp_path, *load, "--images", "2", "--image-size", "20x10")
        _, plain = await bench(server, tmp_path, *load)
    assert status == 0
    contents = [body["messages"][0]["content"] for body in server.asked]
    with_images, without = contents[:5], contents[5:]
    assert all([part["type"] for part in content] == ["text", "image_url", "image_url"] for content in with_images)
    uris = [part["image_url"]["url"] for content in with_images for part in content[1:]]
    assert len({*uris}) == 10
    assert all(uri.startswith("data:image/jpeg;base64,") for uri in uris)
    assert all(isinstance(content, str) for content in without)
    [row], [other] = report["rows"], plain["rows"]
    assert (row["images"], other["images"], other["images_per_s"]) == (8, 0, None)
    assert row["images_per_s"] == pytest.approx(2 * row["requests_per_s"])
    shown, after = (text.splitlines()[0] for text in capsys.readouterr().out.split("LOAD")[1:])
    assert "IMAGES  IMAGES/S" in shown
    assert "IMAGES" not in after
