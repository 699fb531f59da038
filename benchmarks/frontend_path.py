"""What does a token cost the frontend, from its step frame to its client's socket, and which parts cost how much?

    peers ── one frame a step ──▶ nats-server ──▶  the frontend's process  ──▶ clients that count events

The frontend is the real process; a scripted router and worker and the clients share one other (frontend_load.py). All
streams are open before the measurement and stay open, so that the token path alone is measured: its processor time,
from /proc, over the tokens sent. The parts are functions of the token path, run alone in this process over 512 streams.
The rest of user time is the NATS client, uvloop, the loop, and caches that went cold between two steps, which depends
on other programs. The cost that tools and thinking add to an answer is measured separately, over one answer.

What could mislead: on a busy machine a client gets a step's event together with the next one's, which is cheaper; a run
with fewer than 0.98 events a token meets no goal. A send over loopback includes work that a network card's interrupt
would do later, and waking the reader. The kernel samples every 10 ms whether it runs or the process does: only the sum
of both is exact.

benchmarks/serving.py measures the whole system and compares it with Dynamo; this one shows the frontend's parts.
To compare two checkouts, use benchmarks/observed.py with --before: one after another they differ by how fast the
machine is just then.

    python -m benchmarks.frontend_path [--quick] [--key] [--trace SHARE] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from benchmarks.frontend_load import FrontendProcess, Peers, StreamClient, connect_clients, stack
from benchmarks.process_costs import cpu_of, rss_bytes
from benchmarks.report import Goal, report
from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Delta, Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.protocol.chat_chunks import ChatEncoder
from services.frontend.requests.events import PartReceived
from services.frontend.requests.session import Session
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan
from shared.hashing import pack_tokens
from shared.messages.frames import STEP_FRAME, Part, StepFrame
from shared.messages.generate import Accepted
from shared.messages.select import Overlap, Selected
from shared.metrics import STEP_SECONDS, Distribution

STREAMS = (32, 128, 512)
STEP_S = 0.02
MANY, MANY_STEP_S = 4000, 0.1
PROMPT_TOKENS = 512
WARM_UP_S = 1.0
TOKEN_GOAL_US, RSS_GOAL_KB, EVENTS_GOAL = 10.0, 60.0, 0.98
CALM_S = 0.5
"""How long clients may read after the last step."""

Row = dict[str, Any]


async def _measure(streams: int, step_s: float, seconds: float, key: str, trace_share: float | None) -> Row:
    """Measure on a new stack, so that nothing is left of the previous measurement."""
    async with stack(key, trace_share) as (frontend, peers):
        idle_bytes = rss_bytes(frontend.pid)
        clients = await connect_clients(frontend, streams, PROMPT_TOKENS)
        await peers.streaming(streams)
        await stream(peers, step_s, WARM_UP_S)
        before, tokens, events = cpu_of(frontend.pid), peers.tokens, _events(clients)
        over = asyncio.Event()
        asking = asyncio.create_task(_worst_live_s(frontend, over))
        await stream(peers, step_s, seconds)
        over.set()
        after, tokens, events = cpu_of(frontend.pid), peers.tokens - tokens, _events(clients) - events
        row = {
            "streams": streams,
            "step ms": 1000 * step_s,
            "tokens": tokens,
            "events a token": events / tokens,
            "lost": sum(client.ended for client in clients) + peers.attempts - streams,
            "user us": 1e6 * (after.user_s - before.user_s) / tokens,
            "kernel us": 1e6 * (after.kernel_s - before.kernel_s) / tokens,
            "RSS a stream KB": (rss_bytes(frontend.pid) - idle_bytes) / streams / 1024,
            "/live worst ms": 1000 * await asking,
        }
        for client in clients:
            assert client.transport is not None
            client.transport.abort()
    return row


async def stream(peers: Peers, step_s: float, seconds: float) -> None:
    """Make steps at their times, then wait for the last one's events."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    for _ in range(int(seconds / step_s)):
        await peers.step()
        due_s += step_s
        await asyncio.sleep(max(0.0, due_s - loop.time()))
    await asyncio.sleep(CALM_S)


def _events(clients: list[StreamClient]) -> int:
    return sum(client.events for client in clients)


async def _worst_live_s(frontend: FrontendProcess, over: asyncio.Event) -> float:
    """Return the longest time of /live, which is called ten times a second."""
    worst_s = 0.0
    while not over.is_set():
        began_s = time.perf_counter()
        await asyncio.to_thread(_live, frontend.port)
        worst_s = max(worst_s, time.perf_counter() - began_s)
        await asyncio.sleep(0.1)
    return worst_s


def _live(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=5.0):
        pass


# --- the parts, each alone


class Parts:
    """512 running streams, and frames for them."""

    def __init__(self, streams: int, steps: int) -> None:
        table = [bytes([code]) for code in range(32, 127)]
        tokens = TokenBytes(table, table, strip_first_space=False)
        worker = "a" * 16
        self.requests = [f"{number:032x}" for number in range(streams)]
        self.sessions = {request: _streaming(request, worker) for request in self.requests}
        self.outputs = [Output(tokens, ()) for _ in self.requests]
        self.shapes = [ChatEncoder(request, 0, "m", with_logprobs=False, with_usage=False) for request in self.requests]
        self.frames = [
            STEP_FRAME.encode(
                StepFrame(
                    worker, 1, step, [Part(each, 1, 1 + step, pack_tokens([step % 90])) for each in self.requests]
                )
            )
            for step in range(steps)
        ]
        self.decoded = [STEP_FRAME.decode(frame) for frame in self.frames]
        self.latencies = Distribution("headrace_latency_seconds", "", STEP_SECONDS, "model").labels("m")

    def decode(self) -> None:
        for frame in self.frames:
            STEP_FRAME.decode(frame)

    def session(self) -> None:
        for frame in self.decoded:
            for part in frame.parts:
                assert self.sessions[part.request].next_token(frame.instance, part) >= 0

    def text(self) -> None:
        for step in range(len(self.frames)):
            for output in self.outputs:
                output.push((step % 90,))

    def chunk(self) -> None:
        delta = Delta(" wheel")
        for _ in self.frames:
            for shape in self.shapes:
                shape.delta_chunk(delta)

    def metrics(self) -> None:
        for _ in self.frames:
            self.latencies.observe_all([STEP_S] * len(self.requests))

    def measured(self) -> Row:
        """Measure each part, in µs a token."""
        parts = {
            "decoding the frame": self.decode,
            "session": self.session,
            "detokenising": self.text,
            "the chunk's JSON": self.chunk,
            "metrics": self.metrics,
        }
        return {name: self._us(run) for name, run in parts.items()}

    def _us(self, run: Callable[[], None]) -> float:
        began_s = time.process_time()
        run()
        return 1e6 * (time.process_time() - began_s) / (len(self.frames) * len(self.requests))


# --- what tools and thinking add


_WORDS = (b"the", b" wheel", b" turns", b",", b" 42", b"\\n")
_ANSWERS = {
    "content, where tools are offered": (ParsePlan("hermes"), b"", b""),
    "content, behind thinking": (ParsePlan(reasoning=True, reasoning_open=True), b"</think>", b""),
    "thinking": (ParsePlan(reasoning=True, reasoning_open=True), b"", b""),
    "arguments, hermes": (ParsePlan("hermes"), b'<tool_call>{"name": "f", "arguments": {"a": "', b'"}}</tool_call>'),
    "arguments, llama3_json": (ParsePlan("llama3_json"), b'{"name": "f", "parameters": {"a": "', b'"}}'),
    "arguments, mistral": (ParsePlan("mistral"), b'[TOOL_CALLS]f[ARGS]{"a": "', b'"}'),
    "arguments, pythonic": (ParsePlan("pythonic"), b"[f(a='", b"')]"),
    "arguments, qwen3_coder": (
        ParsePlan("qwen3_coder"),
        b"<tool_call>\n<function=f>\n<parameter=a>\n",
        b"\n</parameter>\n</function>\n</tool_call>",
    ),
}


def _taken_apart(tokens: int = 20_000) -> Row:
    """Measure one answer from its ids to its chunks, in µs a token: as text, and what other forms add."""
    text_us = _answer_us(None, b"", b"", tokens)
    added = {name: _answer_us(*answer, tokens) - text_us for name, answer in _ANSWERS.items()}
    return {"as a text": text_us} | {f"more: {name}": us for name, us in added.items()}


def _answer_us(plan: ParsePlan | None, before: bytes, behind: bytes, tokens: int) -> float:
    table = [before, *_WORDS, behind]
    ids = [0, *(1 + at % len(_WORDS) for at in range(tokens)), len(table) - 1]
    plain = Output(TokenBytes(table, table, strip_first_space=False), ())
    result = ParseResult(frozenset({"f"}), lambda: "id")
    output = plain if plan is None else ParsedOutput(plain, AnswerParser(plan, result))
    shape = ChatEncoder("r", 0, "m", with_logprobs=False, with_usage=False, parsed=plan is not None)
    began_s = time.process_time()
    for token in ids:
        delta = output.push((token,))
        if delta.text or delta.reasoning or delta.calls:
            shape.delta_chunk(delta)
    return 1e6 * (time.process_time() - began_s) / tokens


def _frame(worker: str, step: int, requests: list[str]) -> bytes:
    token = pack_tokens([step % 90])
    return STEP_FRAME.encode(StepFrame(worker, 1, step, [Part(request, 1, 1 + step, token) for request in requests]))


def _streaming(request: str, worker: str) -> Session:
    """Return a session that has had its first token."""
    session = Session(request, 1 << 20)
    session.start()
    session.on(Selected(request, 1, worker, 0, "r", Overlap(), ""))
    session.on(Accepted(request, 1))
    session.on(PartReceived(worker, Part(request, 1, 0, pack_tokens([0]))))
    return session


def _named(paced: Row) -> Row:
    """Return the parts of a token's cost at the largest number of streams."""
    parts = Parts(STREAMS[-1], 40).measured()
    user_us: float = paced["user us"]
    rest_us = user_us - sum(parts.values())
    return parts | {
        "framing, uvloop, NATS's client, cold caches": rest_us,
        "the kernel's send and receive": paced["kernel us"],
        "in all": user_us + paced["kernel us"],
    }


async def _rows(quick: bool, key: str, trace: float | None) -> list[Row]:
    seconds = 3.0 if quick else 10.0
    rows: list[Row] = [{"streams": 1, "µs a token, taken apart": _taken_apart()}]
    rows += [await _measure(streams, STEP_S, seconds, key, trace) for streams in ((512,) if quick else STREAMS)]
    rows.append({"streams": STREAMS[-1], "µs a token": _named(rows[-1])})
    rows.append(await _measure(MANY, MANY_STEP_S, seconds, key, trace))
    return rows


def _goals(rows: list[Row]) -> list[Goal]:
    paced, named, many = rows[-3:]
    token_us = named["µs a token"]["in all"]
    sound = paced["events a token"] >= EVENTS_GOAL and not paced["lost"]
    memory_kb = many["RSS a stream KB"]
    what = "CPU of the frontend, 512 streams, 20 ms a step"
    return [
        Goal(what, token_us, "µs a token", TOKEN_GOAL_US, sound and token_us <= TOKEN_GOAL_US),
        Goal("events a token, the same", paced["events a token"], "events", EVENTS_GOAL, sound),
        Goal("lost of 4,000 streams at 100 ms a step", many["lost"], "streams", 0, not many["lost"]),
        Goal("RSS, the same", memory_kb, "KB a stream", RSS_GOAL_KB, memory_kb <= RSS_GOAL_KB),
    ]


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="512 and 4,000 streams alone, three seconds each")
    parser.add_argument("--key", action="store_true", help="the frontend asks for an API key, with limits")
    parser.add_argument("--trace", type=float, metavar="SHARE", help="the frontend traces this share of requests")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = uvloop.run(_rows(flags.quick, "hr-benchmark" if flags.key else "", flags.trace))
    if flags.json:
        command = [flag for flag, given in (("--quick", flags.quick), ("--key", flags.key)) if given]
        command += [] if flags.trace is None else ["--trace", f"{flags.trace:g}"]
        print(msgspec.json.encode(report("frontend_path", [*command, "--json"], _goals(rows), rows)).decode())
        return 0
    for row in rows:
        for name, value in row.items():
            if isinstance(value, dict):
                print(name, *(f"    {part:<44} {us:>8.2f}" for part, us in value.items()), sep="\n")
            else:
                print(f"{name:<20} {value:>12,.2f}")
        print()
    for goal in _goals(rows):
        print(f"{'met' if goal.met else 'NOT met':<8} {goal.name}: {goal.value:,.2f} {goal.unit}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
