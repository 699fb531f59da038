"""A light load generator for /v1/chat/completions, for runs without the yardstick's or with more than that can do.

It takes the flags of the yardstick's `loadgen.py` that `serving.py` uses and prints the same JSON, and has more flags:
`--rate` sends in an open loop, at random times; with `--leave` clients leave in the middle. It counts SSE events in
the byte stream and has a connection for each stream in flight. It writes `start` and `stop` to `--hook-fd`, a
descriptor, when it sends the first request and when the last one has ended.

It is not the client of `headrace bench`, which parses every event: with 128 streams that one takes 19 to 23 µs of CPU
an event, and this one 10, on the same machine. A generator must not cost more than the frontend that it loads.

    python -m benchmarks.sse_load --port 8000 --model NAME --tokenizer tokenizer.json -c 128 -n 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import uvloop

TEMPLATE_TOKENS = 12
_LEAST_LETTERS = 3
_USAGE = b'"completion_tokens":'
_DIGITS = re.compile(rb"[0-9]+")


class StreamReader(asyncio.Protocol):
    """One connection, which has one request at a time."""

    def __init__(self, *, quick_acks: bool) -> None:
        self._quick_acks = quick_acks
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.transport: asyncio.Transport | None = None
        self._clear()

    def _clear(self) -> None:
        self.status = 0
        self.events = 0
        self.tokens: int | None = None
        """The completion tokens of the stream's usage, if there is one."""
        self.sent_s = self.first_s = self.last_s = 0.0
        self.gaps_s: list[float] = []
        self._head = b""
        self._tail = b""
        self.failed = "no [DONE]"
        """Why the stream is not complete; empty once its [DONE] has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionResetError("closed"))

    def send(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when the response has ended."""
        assert self.transport is not None
        self._clear()
        self.ended = asyncio.get_running_loop().create_future()
        self.sent_s = time.perf_counter()
        self.transport.write(request)
        return self.ended

    def abort(self) -> None:
        """Close the connection in the middle, as a client that leaves does."""
        assert self.transport is not None
        self.closed = True
        self.ended.cancel()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._quick_acks:
            assert self.transport is not None
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if not self.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self.status, data = int(self._head[9:12]), self._head[end + 4 :]
            if self.status != 200:
                assert self.transport is not None
                self.closed = True
                self.transport.close()
                self.ended.set_result(None)
                return
        seen = self._tail + data
        count = seen.count(b"data: {") - self._tail.count(b"data: {")
        if count:
            if self.events:
                self.gaps_s.append(now_s - self.last_s)
            else:
                self.first_s = now_s
            self.gaps_s.extend([0.0] * (count - 1))
            self.events += count
            self.last_s = now_s
        if b"data: [DONE]" in seen:
            self.failed = ""
        elif b'data: {"error":' in seen:
            self.failed = seen[seen.index(b'data: {"error":') :].decode(errors="replace")[:200]
        usage = seen.rfind(_USAGE)
        if usage >= 0:
            digits = _DIGITS.match(seen, usage + len(_USAGE))
            self.tokens = int(digits.group()) if digits else None
        self._tail = seen[-16:]
        if self._tail.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)


class LoadRun:
    """One run of the load."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._words = words_of(flags.tokenizer)
        self._marked = False
        self._total = flags.warmup + flags.requests
        self.errors: Counter[str] = Counter()
        self.ended: list[tuple[float, float, float, int, list[float]]] = []
        """For each stream: seconds to the first event and to the last, when it ended, events, and gaps."""
        self.cut = 0
        """Streams whose usage, if it was requested, reports another number of tokens than requested."""
        self._idle: list[StreamReader] = []
        self._next = 0
        self.start_s = 0.0
        self.start_cpu_s = 0.0

    async def run(self) -> None:
        """Send all requests; return when every one has ended."""
        bodies = [self._request(number) for number in range(self._total)]
        if self._flags.rate:
            draw = Random(self._flags.seed)
            async with asyncio.TaskGroup() as tasks:
                for number, body in enumerate(bodies):
                    tasks.create_task(self._one(number, body))
                    await asyncio.sleep(draw.expovariate(self._flags.rate))
        else:
            async with asyncio.TaskGroup() as tasks:
                for slot in range(self._flags.concurrency):
                    tasks.create_task(self._slot(slot, bodies))
        self._hook("stop")
        for connection in self._idle:
            assert connection.transport is not None
            connection.transport.close()

    async def _slot(self, slot: int, bodies: list[bytes]) -> None:
        await asyncio.sleep(self._flags.ramp * slot / self._flags.concurrency)
        while self._next < self._total:
            number = self._next
            self._next += 1
            await self._one(number, bodies[number])

    async def _one(self, number: int, body: bytes) -> None:
        if number >= self._flags.warmup and not self._marked:
            self._marked = True
            self._hook("start")
            self.start_s, self.start_cpu_s = time.perf_counter(), _cpu_s()
        connection: StreamReader | None = None
        try:
            connection = await self._connection()
            async with asyncio.timeout(self._flags.leave or self._flags.timeout):
                await connection.send(body)
        except TimeoutError:
            if connection is not None:
                connection.abort()
            if connection is None or not self._flags.leave:
                self.errors["TimeoutError"] += 1
                return
        except OSError as wrong:
            self.errors[type(wrong).__name__] += 1
            return
        else:
            if not self._is_good(connection, body):
                return
            self._idle.append(connection)
        if number >= self._flags.warmup:
            sent_s, ended_s = connection.sent_s, time.perf_counter()
            self.ended.append(
                (connection.first_s - sent_s, ended_s - sent_s, ended_s, connection.events, connection.gaps_s)
            )

    def _is_good(self, connection: StreamReader, body: bytes) -> bool:
        """Say whether the answer is a complete stream; count the error if it is not."""
        if connection.status != 200 or connection.failed:
            self.errors[str(connection.status) if connection.status != 200 else connection.failed] += 1
            return False
        if b"include_usage" in body:
            self.cut += connection.tokens != self._flags.osl
        return True

    async def _connection(self) -> StreamReader:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        reading = partial(StreamReader, quick_acks=bool(self._flags.quickack))
        _, made = await loop.create_connection(reading, "127.0.0.1", self._flags.port)
        return made

    def _request(self, number: int) -> bytes:
        """Make a request. No two prompts share more than the template's beginning."""
        flags, draw = self._flags, Random(self._flags.seed * 1_000_003 + number)
        text = " ".join(draw.choices(self._words, k=flags.isl - TEMPLATE_TOKENS))
        body = {
            "model": flags.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": flags.osl,
            "stream": True,
            **json.loads(flags.extra),
        }
        payload = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload

    def _hook(self, mark: str) -> None:
        if self._flags.hook_fd >= 0:
            os.write(self._flags.hook_fd, f"{mark}\n".encode())

    def report(self) -> dict[str, object]:
        """Return the report, with the names of the yardstick's `loadgen.py`."""
        flags, count = self._flags, len(self.ended)
        ended_s = max((each[2] for each in self.ended), default=self.start_s)
        elapsed_s = ended_s - self.start_s
        first = sorted(each[0] for each in self.ended)
        tokens = [min(each[3], flags.osl) for each in self.ended]
        step = sorted((each[1] - each[0]) / max(1, n - 1) for each, n in zip(self.ended, tokens, strict=True))
        gaps = sorted(gap for each in self.ended for gap in each[4])
        return {
            "concurrency": flags.concurrency,
            "n": count,
            "errors": dict(self.errors),
            "elapsed_s": round(elapsed_s, 3),
            "req_s": round(count / max(elapsed_s, 1e-9), 2),
            "out_tok_s": round(sum(tokens) / max(elapsed_s, 1e-9), 1),
            "ev_per_req": round(sum(each[3] for each in self.ended) / max(1, count), 2),
            "ttft_p50_ms": percentile_ms(first, 50),
            "ttft_p99_ms": percentile_ms(first, 99),
            "tpot_p50_ms": percentile_ms(step, 50),
            "tpot_p99_ms": percentile_ms(step, 99),
            "gap_p50_ms": percentile_ms(gaps, 50),
            "gap_p99_ms": percentile_ms(gaps, 99),
            "client_cpu_s": round(_cpu_s() - self.start_cpu_s, 2),
            "cut": self.cut,
            "short_streams": sum(n < 0.95 * flags.osl for n in tokens),
        }


def words_of(tokenizer: Path) -> list[str]:
    """Return words that are one token each after a space; only longer ones, if there are any."""
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    words = sorted(key[1:] for key in vocabulary if key[0] == "Ġ" and key[1:].isascii() and key[1:].isalpha())
    return [word for word in words if len(word) >= _LEAST_LETTERS] or words


def percentile_ms(values: list[float], percent: float) -> float | None:
    """Return a percentile of sorted seconds, in milliseconds."""
    return round(values[min(len(values) - 1, int(len(values) * percent / 100))] * 1e3, 3) if values else None


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run the load and print one JSON object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("-c", "--concurrency", type=int, default=8)
    parser.add_argument("-n", "--requests", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=0, help="requests that go before `start`")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second at random times; 0: closed loop")
    parser.add_argument("--ramp", type=float, default=0.0, help="seconds until all slots of a closed loop are busy")
    parser.add_argument("--isl", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--extra", default='{"ignore_eos": true}', help="more of each request's body")
    parser.add_argument("--quickack", type=int, default=0, help="1: TCP_QUICKACK at each read")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--leave", type=float, default=0.0, help="seconds after which a client goes away; 0: it stays")
    parser.add_argument("--hook-fd", type=int, default=-1)
    load = LoadRun(parser.parse_args())
    uvloop.run(load.run())
    print(json.dumps(load.report()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
