"""Measures one load after the other at one endpoint: sends sessions, in a closed or an open loop, and sums them up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from msgspec.structs import replace

from deploy.local.bench.client import Client
from deploy.local.bench.images import parse_size
from deploy.local.bench.loads import (
    AskShape,
    LoadRequest,
    LoadSession,
    LoadTurn,
    agent_sessions,
    drawn_asks,
    trace_sessions,
)
from deploy.local.bench.options import BenchOptions
from deploy.local.bench.plan import Point, arrivals
from deploy.local.bench.rows import BenchRow, Result, RowKey, row_of
from deploy.local.size.token_client import http_session, token_client
from deploy.local.terminal import Terminal
from shared.errors import Unavailable
from shared.installation import COMMAND

REFUSED_WAIT_S = 0.5
"""Wait of a closed loop's slot after a refusal without Retry-After."""

WARM_AT_ONCE = 4
"""Requests of a warm-up at the same time, unless --warmup has more."""


class Measurer:
    """Measures loads at one endpoint."""

    def __init__(self, one: Client, options: BenchOptions, model: str, version: str, terminal: Terminal) -> None:
        self.model = model
        self.version = version
        """What the server says of its version; empty if it says nothing."""
        self._one = one
        self._options = options
        self._terminal = terminal

    async def run(self, point: Point, rows: list[BenchRow], key: RowKey) -> None:
        """Measure a point and append its row, even if it is interrupted. Raise Unavailable if none of the requests of
        the first warm-up is answered."""
        options = self._options
        shape, seed = self._shape(point), options.seed + key.round - 1
        asks = drawn_asks(shape, options.given, seed, point.name)
        warm = list(islice(asks, options.warmup))
        if point.scenario == "decode":
            measured = list(islice(asks, point.requests))
            warm += [replace(ask, output=1) for ask in measured]
            asks = iter(measured)
        await self._warm_up(point, warm, needed=not rows)
        times = arrivals(point.value, point.requests, seed) if point.loop == "open" else [0.0] * point.requests
        planned = point.requests
        if options.traffic is not None:
            sessions = trace_sessions(options.traffic, point.value, f"{seed} {point.name}")
        elif options.agentic:
            made = agent_sessions(times, options.agentic, float(options.speed), seed, point.name)
            planned, sessions = sum(each.requests for each in made), iter(made)
        else:
            sessions = (LoadSession(at_s, (LoadTurn(next(asks)),)) for at_s in times)
        await self._measure(point, sessions, planned, rows, key)
        self._terminal.clear()

    def _shape(self, point: Point) -> AskShape:
        given = self._options
        output = 1 if point.scenario == "prefill" else given.output_tokens
        return AskShape(
            prompt=given.words,
            output=output,
            spread=given.spread,
            shared=given.shared_words,
            shared_ratio=point.prefix_ratio,
            beginnings=given.prefixes,
            images=given.images,
        )

    async def _warm_up(self, point: Point, asks: Sequence[LoadRequest], *, needed: bool) -> None:
        """Send unmeasured requests, a few at a time. Raise Unavailable if an answer is `needed` and none is done."""
        answers: list[Result] = []
        width = max(WARM_AT_ONCE, self._options.warmup)
        for start in range(0, len(asks), width):
            answers += await asyncio.gather(*(self._one.ask(ask) for ask in asks[start : start + width]))
        if answers and needed and not any(answer.outcome == "done" for answer in answers):
            raise Unavailable(f"{point.name}: no request of the warm-up was answered: {answers[0].reason}")

    async def _measure(
        self, point: Point, sessions: Iterator[LoadSession], planned: int, rows: list[BenchRow], key: RowKey
    ) -> None:
        running = _Running(self._one, point, planned, self._terminal, key)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        try:
            await running.run(sessions)
        finally:
            if running.results:
                seconds = time.perf_counter() - began_s
                share = (time.process_time() - began_cpu_s) / seconds
                rows.append(row_of(point, running.results, seconds, share, planned=planned, key=key))


class _Running:
    """One load while it is measured."""

    def __init__(self, one: Client, point: Point, planned: int, terminal: Terminal, key: RowKey) -> None:
        self.results: list[Result] = []
        self._one = one
        self._point = point
        self._planned = planned
        self._terminal = terminal
        self._name = f"{point.name}, {key.variant}, round {key.round}" if key.variant else point.name

    async def run(self, sessions: Iterator[LoadSession]) -> None:
        """Send all sessions and wait for their ends."""
        async with asyncio.TaskGroup() as tasks:
            if self._point.loop == "closed":
                for _ in range(int(self._point.value)):
                    tasks.create_task(self._slot(sessions))
                return
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            for session in sessions:
                await asyncio.sleep(start_s + session.at_s - loop.time())
                tasks.create_task(self._session(session, start_s + session.at_s))

    async def _slot(self, sessions: Iterator[LoadSession]) -> None:
        for session in sessions:
            last = await self._session(session)
            if last.outcome == "refused" and len(self.results) < self._planned:
                await asyncio.sleep(last.retry_after_s or REFUSED_WAIT_S)

    async def _session(self, session: LoadSession, due_s: float | None = None) -> Result:
        """Send a session's requests one after the other, and return the last result. It should begin at `due_s`."""
        result = Result("done")
        late_s = 0.0 if due_s is None else max(0.0, asyncio.get_running_loop().time() - due_s)
        for turn in session.turns:
            if turn.awaited:
                async with asyncio.TaskGroup() as tasks:
                    for each in turn.awaited:
                        tasks.create_task(self._session(each))
            if turn.pause_s:
                await asyncio.sleep(turn.pause_s)
            result = await self._one.ask(turn.ask)
            self.results.append(replace(result, late_s=late_s) if late_s else result)
            late_s = 0.0
            self._terminal.progress(self._name, len(self.results) / self._planned)
        return result


@asynccontextmanager
async def measurer(url: str, options: BenchOptions, terminal: Terminal) -> AsyncIterator[Measurer]:
    """Yield what measures an endpoint. Raise Unavailable if it does not answer, or has no model."""
    async with token_client(url, options.model, options.key) as asked:
        if not asked.model:
            served = await asked.models()
            if not served:
                raise Unavailable(f"{url} serves no model; see {COMMAND} status")
            asked.model = served[0]
        version = await asked.version()
        if options.tokens:
            await asked.learn_ids()
        model, ids = asked.model, asked.ids if options.tokens else ()
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        **({} if options.may_stop else {"ignore_eos": True}),
    }
    async with http_session(options.key) as http:
        one = Client(http, url, body, options.timeout_s, ids, parse_size(options.image_size))
        yield Measurer(one, options, model, version, terminal)
