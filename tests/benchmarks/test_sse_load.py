"""The light load generator, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.servers import free_port
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


async def four_events(writer: asyncio.StreamWriter, _body: bytes) -> None:
    """Write two events at once, the third in two parts, then the usage."""
    usage = 'data: {"usage":{"completion_tokens":4}}\n\n'
    writer.write(HEAD + chunk('data: {"a":1}\n\n') + chunk('data: {"a":2}\n\n'))
    await writer.drain()
    torn = chunk('data: {"a":3}\n\n')
    writer.write(torn[:8])
    await writer.drain()
    writer.write(torn[8:] + chunk(usage) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n")


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
    """Run a scripted server; yield its port and the bodies that it received."""
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                bodies.append(json.loads(body))
                await answer(writer, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", free_port())
    async with listening:
        yield listening.sockets[0].getsockname()[1], bodies


async def run(port: int, directory: Path, *flags: str, hook_fd: int | None = None) -> dict[str, Any]:
    model = write_tiny_model(directory / "model", vocab=320)
    hooks = [] if hook_fd is None else ["--hook-fd", str(hook_fd)]
    command = ["-m", "benchmarks.sse_load", "--port", str(port), "--model", "m", "--tokenizer"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, str(model / "tokenizer.json"), "--isl", "32", "--osl", "4", *flags, *hooks),
        stdout=asyncio.subprocess.PIPE,
        pass_fds=[] if hook_fd is None else [hook_fd],
    )
    async with asyncio.timeout(LIMIT_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(output)
    return report


async def test_events_are_counted_however_the_bytes_are_cut(tmp_path: Path) -> None:
    async with server(four_events) as (port, bodies):
        report = await run(port, tmp_path, "-c", "2", "-n", "6")
    assert (report["n"], report["errors"], report["ev_per_req"], report["short_streams"]) == (6, {}, 4.0, 0)
    prompts = {body["messages"][0]["content"] for body in bodies}
    assert len(prompts) == 6


async def test_an_open_loop_sends_every_request_and_marks_start_and_stop(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    async with server(four_events) as (port, _):
        report = await run(port, tmp_path, "--rate", "200", "-n", "5", hook_fd=writing)
    os.close(writing)
    with os.fdopen(reading) as marks:
        assert marks.read() == "start\nstop\n"
    assert report["n"] == 5


async def test_a_usage_with_too_few_tokens_is_a_cut_stream(tmp_path: Path) -> None:
    asked = json.dumps({"stream_options": {"include_usage": True}})
    async with server(four_events) as (port, _):
        whole = await run(port, tmp_path, "-n", "2", "-c", "1", "--extra", asked)
        cut = await run(port, tmp_path, "-n", "2", "-c", "1", "--extra", asked, "--osl", "5")
    assert (whole["cut"], cut["cut"]) == (0, 2)


async def test_refusals_and_broken_streams_are_errors(tmp_path: Path) -> None:
    async def alternate(writer: asyncio.StreamWriter, body: bytes) -> None:
        answers.append(body)
        if len(answers) % 2:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(HEAD + chunk('data: {"a":1}\n\n') + b"0\r\n\r\n")

    answers: list[bytes] = []
    async with server(alternate) as (port, _):
        report = await run(port, tmp_path, "-n", "4", "-c", "1")
    assert report["errors"] == {"503": 2, "no [DONE]": 2}


async def test_a_client_that_leaves_is_no_error(tmp_path: Path) -> None:
    async def endless(writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(HEAD + chunk('data: {"a":1}\n\n'))

    async with server(endless) as (port, _):
        report = await run(port, tmp_path, "-n", "2", "-c", "2", "--leave", "0.2")
    assert (report["n"], report["errors"], report["ev_per_req"]) == (2, {}, 1.0)
