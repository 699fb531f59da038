"""A prompt that vLLM's device has lost: how soon its first token comes from a store, and what storing costs.

    recompute    `vllm serve`, without a store                          ─┐
    offloading   `vllm serve` with its own OffloadingConnector           │ the same requests to each in turn, on the
    lmcache      `vllm serve` with LMCache's connector                   │ same machine
    headrace     `vllm serve` with our connector ─── a pool ─── kvbm    ─┘

For two models, a tiny one with random weights (prompts of 4,096 tokens) and `--model` (1,024):

- first token: a prompt is asked for, until the side's store has it. Then the device's prefix cache is emptied by vLLM's
  own `/reset_prefix_cache`, which leaves the store as it is, and the prompt is asked for again. A request that found
  less than the whole prompt in the store counts as `short`.
- decode: tokens a second of some streams, from the first token to the last. Their blocks are stored as they fill.
  `idle` is the side headrace with `offload` off, which stores nothing; `empty` is a connector that does nothing, so
  what it costs is vLLM's own. Sides are compared round by round: the ratio is the median of the rounds' ratios.

For the tiny model alone, because the numbers of tokens do not depend on it:

- moved: a conversation takes turns between two engines of one side; another one stays with one of them. Shown are the
  tokens that were not computed.
- killed: prompts are asked for twice, then the engine is killed (SIGKILL to all its processes) and started again, and
  they are asked for once more. Shown are the tokens that were not computed, before and after.

A side that cannot run here is skipped, and a row says why. LMCache needs an environment of its own with vLLM in it:
`--lmcache PYTHON`.

What could mislead: all is wall time on a shared machine, and the time to the first token includes vLLM's API server and
the step that computes the prompt's last block. With a tiny model this is most of the time of a hit. All engines run
during the whole measurement of a model, so an engine that is busy without requests slows the others.

    python -m benchmarks.vllm_tiers --model DIR [--quick] [--rounds 3] [--lmcache PYTHON] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp

from benchmarks.report import ROOT, Goal
from benchmarks.vllm import NAME, PYTHON, run, started
from tests.integration.fleet import Service, fleet
from tests.integration.machine import Machine
from tests.servers import NatsServer, free_port
from tests.tiny_model import write_tiny_model

BLOCK = 32
"""Tokens of a block: the least that vLLM takes on a CPU."""
TIMEOUT_S = 600.0
STORED_LIMIT_S = 30.0
"""The longest wait until a store has a prompt."""
POLL_S = 0.5
POOL_BYTES = 1 << 30
FIRST_ID, VOCABULARY = 100, 8000
"""The range of the drawn token ids. Those below may be special ones."""
CONTEXT = {"tiny": 8192, "given": 2048}
PROMPT = {"tiny": 4096, "given": 1024}
ANSWER = {"tiny": 1536, "given": 128}
"""Tokens of an answer in decode: the tiny model needs more of them until a rate means something."""
CONNECTOR = "services.worker.vllm.connector.connector"
SIDES = ("recompute", "offloading", "lmcache", "headrace")
STORES = SIDES[1:]
PARTS = ("first", "decode", "moved", "killed")
_REASON = re.compile(r"(?:^|[\])] )[\w.]*(?:Error|Exception): (.{10,200})", re.MULTILINE)

DEGRADED = "will operate in degraded mode"
"""What LMCache logs when it goes on without a store."""

Row = dict[str, Any]


class Answer(NamedTuple):
    """What came of one request."""

    first_s: float
    """Seconds from the request to the first token."""
    times_s: list[float]
    """When each token came."""
    tokens: list[int]
    cached: int
    """Tokens of the prompt that were not computed."""


# --- what is asked


def drawn(random: Random, count: int) -> list[int]:
    """Return a prompt that shares nothing with others."""
    return [random.randrange(FIRST_ID, VOCABULARY) for _ in range(count)]


def expected(prompt_tokens: int) -> int:
    """Return the tokens of a prompt that a store can give. The last token is always computed, so a prompt that ends
    with a block lacks it."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


async def _ask(session: aiohttp.ClientSession, port: int, prompt: Sequence[int], osl: int) -> Answer:
    body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": osl, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    begun_s = time.perf_counter()
    times_s: list[float] = []
    tokens: list[int] = []
    cached = 0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"port {port}: {answer.status} {(await answer.text())[:500]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            found = json.loads(line[6:])
            if "error" in found:
                raise SystemExit(f"port {port}: {found}")
            for choice in found["choices"]:
                came: list[int] = choice.get("token_ids") or []
                times_s += [time.perf_counter()] * len(came)
                tokens += came
            cached = max(cached, cached_of(found.get("usage")))
    if len(tokens) != osl:
        raise SystemExit(f"port {port}: {len(tokens)} tokens instead of {osl}")
    return Answer(times_s[0] - begun_s, times_s, tokens, cached)


def cached_of(usage: dict[str, Any] | None) -> int:
    """Return the tokens of a prompt that were not computed, by the usage of an answer."""
    details = (usage or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def ask(port: int, prompts: Iterable[Sequence[int]], osl: int = 1) -> list[Answer]:
    """Ask for all prompts at once; return their answers."""

    async def all_of() -> list[Answer]:
        limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=limit, read_bufsize=1 << 22) as session:
            return await asyncio.gather(*(_ask(session, port, prompt, osl) for prompt in prompts))

    return asyncio.run(all_of())


def forget(port: int) -> None:
    """Empty the prefix cache of an engine's device, but not its connector's store. Blocks that are being copied keep
    vLLM from doing so for a while."""
    until_s = time.monotonic() + STORED_LIMIT_S
    while time.monotonic() < until_s:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/reset_prefix_cache", b"")
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            if json.load(answer)["success"]:
                return
        time.sleep(0.05)
    raise SystemExit(f"port {port}: the prefix cache could not be emptied")


def until_stored(side: str, port: int, prompt: Sequence[int]) -> None:
    """Ask until a side's store has the whole prompt, or for `STORED_LIMIT_S`."""
    until_s = time.monotonic() + STORED_LIMIT_S
    while side in STORES and time.monotonic() < until_s:
        forget(port)
        (answer,) = ask(port, [prompt])
        if answer.cached >= expected(len(prompt)):
            return
        time.sleep(POLL_S)


# --- what runs


class Plan(NamedTuple):
    """How the engines of one model are started."""

    model: Path
    context: int
    folder: Path
    pool: Path
    lmcache: str


def connector_of(side: str, plan: Plan) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config` of a side; of recompute, nothing."""
    both = {"kv_role": "kv_both"}
    match side:
        case "offloading":
            sizes = {"cpu_bytes_to_use": POOL_BYTES}
            return {"kv_connector": "OffloadingConnector", **both, "kv_connector_extra_config": sizes}
        case "lmcache":
            return {"kv_connector": "LMCacheConnectorV1", **both}
        case "empty":
            return {"kv_connector": "EmptyConnector", "kv_connector_module_path": "benchmarks.empty_connector", **both}
        case "headrace" | "idle":
            settings = {"pool": str(plan.pool)} | ({} if side == "headrace" else {"offload": "off"})
            ours = {"kv_connector": "HeadraceConnector", "kv_connector_module_path": CONNECTOR, **both}
            return ours | {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": settings}
        case _:
            return {}


def variables_of(side: str) -> dict[str, str]:
    """Return what is added to the environment of a side's vLLM."""
    own = {"VLLM_SERVER_DEV_MODE": "1"}
    if side in ("headrace", "idle", "empty"):
        own["PYTHONPATH"] = str(ROOT)
    if side == "lmcache":
        own |= {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_CHUNK_SIZE": "256", "PYTHONHASHSEED": "0"}
        own["LMCACHE_MAX_LOCAL_CPU_SIZE"] = str(POOL_BYTES >> 30)
    return own


@contextmanager
def engine(side: str, plan: Plan, port: int) -> Iterator[int]:
    """Run one vLLM; yield its process id."""
    python = plan.lmcache if side == "lmcache" else str(PYTHON)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", NAME, "--disable-uvicorn-access-log"]
    command += ["--block-size", str(BLOCK), "--dtype", "float32", "--max-num-seqs", "16"]
    command += ["--max-model-len", str(plan.context), "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    if connector := connector_of(side, plan):
        command += ["--kv-transfer-config", json.dumps(connector)]
    log = plan.folder / f"{side}-{port}.log"
    with started(command, port, log, "/health", variables_of(side)) as pid:
        yield pid


def reason_of(log: str) -> str:
    """Return why a program did not start: the first error of its log."""
    found = _REASON.search(log)
    return found[1].strip() if found else "it did not start"


def skipped(side: str, plan: Plan) -> str:
    """Return why a side cannot run here, or nothing."""
    if side in ("headrace", "idle") and not (ROOT / (CONNECTOR.replace(".", "/") + ".py")).exists():
        return f"{CONNECTOR} is not there"
    if side == "lmcache":
        if not plan.lmcache:
            return "no environment with LMCache; see --lmcache"
        found = subprocess.run([plan.lmcache, "-c", "import lmcache, vllm"], cwd=ROOT, capture_output=True, text=True)
        if found.returncode:
            return reason_of(found.stderr)
    return ""


@contextmanager
def kvbm(folder: Path, pool: Path) -> Iterator[Service]:
    """Run NATS and a kvbm on a pool; yield kvbm."""
    nats = NatsServer(folder)
    nats.start()
    try:
        with fleet(folder, nats.url, *Machine.where(folder)) as services:
            flags = ("--pool-directory", str(pool), "--pool-size-bytes", str(POOL_BYTES))
            service = services.start("kvbm", "kvbm", *flags)
            services.wait_ready()
            yield service
    finally:
        nats.stop()


class Engines:
    """The engines of the sides that run here, by side."""

    def __init__(self, plan: Plan, stack: ExitStack, service: Service) -> None:
        self.plan = plan
        self.ports: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.kvbm = service
        self._stack = stack

    def start(self, side: str) -> None:
        """Start one, or note why it cannot run. Ours that does not start ends the benchmark."""
        self.reasons[side] = skipped(side, self.plan)
        if self.reasons[side]:
            return
        port = free_port()
        log = self.plan.folder / f"{side}-{port}.log"
        with ExitStack() as own:
            try:
                pid = own.enter_context(engine(side, self.plan, port))
            except SystemExit:
                if side not in ("offloading", "lmcache"):
                    raise
                self.reasons[side] = reason_of(log.read_text(errors="replace"))
                return
            if DEGRADED in (text := log.read_text(errors="replace")):
                self.reasons[side] = reason_of(text)
                return
            self._stack.push(own.pop_all())
        self.ports[side], self.pids[side] = port, pid

    def stored_blocks(self, side: str) -> float:
        """Return how many blocks the side's store has got so far, if it is ours."""
        return self.kvbm.metric("headrace_kvbm_committed_blocks_total") if side == "headrace" else 0.0


# --- what is measured


def first_rows(model: str, engines: Engines, flags: argparse.Namespace) -> list[Row]:
    """Return one row for each side: the first token of a prompt that the device has lost."""
    sides = [side for side in SIDES if side in engines.ports]
    random = Random(flags.seed)
    came: dict[str, list[Answer]] = {side: [] for side in sides}
    tokens = PROMPT[model] + 1
    for number in range(-1, flags.rounds):  # the first one is not counted: it warms all up
        prompt = drawn(random, tokens)
        for side in sorted(sides, reverse=bool(number % 2)):
            port = engines.ports[side]
            ask(port, [prompt])
            until_stored(side, port, prompt)
            for _ in range(flags.repeats if number >= 0 else 1):
                forget(port)
                answers = ask(port, [prompt])
                came[side] += answers if number >= 0 else []
    return [first_row(model, tokens, side, answers) for side, answers in came.items()]


def first_row(model: str, tokens: int, side: str, answers: Sequence[Answer]) -> Row:
    """Return the median of a side, its spread, and how often its store had less than the prompt."""
    times_ms = [round(1e3 * answer.first_s, 1) for answer in answers]
    short = sum(answer.cached < expected(tokens) for answer in answers) if side in STORES else 0
    row: Row = {"what": "first token", "model": model, "side": side, "tokens": tokens}
    row |= {"first_ms": round(statistics.median(times_ms), 1), "spread": [min(times_ms), max(times_ms)]}
    return row | {"cached": statistics.median(answer.cached for answer in answers), "short": short}


def rate_of(streams: Sequence[Sequence[float]]) -> float:
    """Return the tokens a second of some streams, by when their tokens came: from the first token of any to the last
    of any. On a busy machine the client reads them in bursts, so there may be no time in which all streams run."""
    begin_s, end_s = min(times[0] for times in streams), max(times[-1] for times in streams)
    return (sum(len(times) for times in streams) - 1) / (end_s - begin_s)


def decode_rows(model: str, engines: Engines, flags: argparse.Namespace) -> list[Row]:
    """Return one row for each side: tokens a second while blocks are stored."""
    sides = [side for side in (*SIDES, "idle", "empty") if side in engines.ports]
    random = Random(flags.seed + 1)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    stored = dict.fromkeys(sides, 0.0)
    for number in range(-1, flags.rounds):  # the first one is not counted: it warms all up
        for side in sorted(sides, reverse=bool(number % 2)):
            before = engines.stored_blocks(side)
            prompts = [drawn(random, BLOCK * 2) for _ in range(flags.streams)]
            answers = ask(engines.ports[side], prompts, ANSWER[model])
            time.sleep(POLL_S)  # until the last blocks are stored, so that they do not slow the next side
            if number >= 0:
                rates[side].append(round(rate_of([answer.times_s for answer in answers]), 1))
                stored[side] += engines.stored_blocks(side) - before
    rows: list[Row] = []
    for side, found in rates.items():
        row: Row = {"what": "decode", "model": model, "side": side, "streams": flags.streams}
        row |= {"tok_s": statistics.median(found), "rounds": found}
        rows.append(row | ({"stored_blocks": round(stored[side])} if side == "headrace" else {}))
    return rows


def converse(ports: Sequence[int], random: Random, flags: argparse.Namespace) -> int:
    """Have a conversation whose turns go to these ports in order; return the tokens that were not computed."""
    history: list[int] = []
    cached = 0
    for number in range(flags.turns):
        history += drawn(random, flags.turn_tokens)
        (answer,) = ask(ports[number % len(ports)], [history], BLOCK)
        cached += answer.cached
        history += answer.tokens
        time.sleep(flags.pause)
    return cached


def moved_rows(engines: Engines, flags: argparse.Namespace) -> list[Row]:
    """Return one row for each side: the hits of a conversation that moves, and of one that stays."""
    rows: list[Row] = []
    for side in SIDES:
        if side not in engines.ports:
            continue
        with ExitStack() as stack:
            port = free_port()
            stack.enter_context(engine(side, engines.plan, port))
            ports = [engines.ports[side], port]
            for one in ports:
                warm = drawn(Random(one), 8 * BLOCK + 1)
                ask(one, [warm])
                until_stored(side, one, warm)  # so it has attached to its store
            random = Random(flags.seed + 2)
            stayed = sum(converse(ports[:1], random, flags) for _ in range(flags.rounds))
            moved = sum(converse(ports, random, flags) for _ in range(flags.rounds))
        rows.append({"what": "moved", "model": "tiny", "side": side, "stayed_tokens": stayed, "moved_tokens": moved})
    return rows


def killed_rows(engines: Engines, flags: argparse.Namespace) -> list[Row]:
    """Return one row for each side: the hits of the same prompts before its engine was killed, and after."""
    rows: list[Row] = []
    for side in SIDES:
        if side not in engines.ports:
            continue
        port = engines.ports.pop(side)
        random = Random(flags.seed + 3)
        prompts = [drawn(random, 1024 + 1) for _ in range(flags.prompts)]
        sign = drawn(random, 8 * BLOCK + 1)
        for prompt in [sign, *prompts]:
            ask(port, [prompt])
            until_stored(side, port, prompt)
        before = sum(ask(port, [prompt])[0].cached for prompt in prompts)
        os.killpg(engines.pids.pop(side), signal.SIGKILL)
        time.sleep(POLL_S)
        again = free_port()
        with engine(side, engines.plan, again):
            ask(again, [sign])
            if side == "headrace":
                until_stored(side, again, sign)  # so it has attached to its store
            after = sum(ask(again, [prompt])[0].cached for prompt in prompts)
        rows.append({"what": "killed", "model": "tiny", "side": side, "before_tokens": before, "after_tokens": after})
    return rows


def _shown(rows: list[Row]) -> list[Row]:
    """Print rows as soon as they are there, since the rest may take long."""
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def measure(flags: argparse.Namespace) -> list[Row]:
    """Return the rows of all measurements, and one for each side that was skipped."""
    rows: list[Row] = []
    reasons: dict[str, str] = {}
    for model in flags.models:
        with tempfile.TemporaryDirectory(prefix="tiers-", dir=flags.memory) as name, ExitStack() as stack:
            folder = Path(name)
            path = Path(flags.model).resolve()
            if model == "tiny":
                path = write_tiny_model(
                    folder / "tiny", hidden=128, heads=2, vocab=VOCABULARY, context_length=CONTEXT[model]
                )
            plan = Plan(path, CONTEXT[model], folder, folder / "pool", flags.lmcache)
            engines = Engines(plan, stack, stack.enter_context(kvbm(folder, plan.pool)))
            for side in flags.sides:
                engines.start(side)
            if "headrace" in engines.ports:
                engines.start("idle")
                engines.start("empty")
            if "first" in flags.parts:
                rows += _shown(first_rows(model, engines, flags))
            if "decode" in flags.parts:
                rows += _shown(decode_rows(model, engines, flags))
            if "moved" in flags.parts and model == "tiny":
                rows += _shown(moved_rows(engines, flags))
            if "killed" in flags.parts and model == "tiny":
                rows += _shown(killed_rows(engines, flags))
            reasons |= engines.reasons
    return rows + [{"what": "skipped", "side": side, "why": why} for side, why in reasons.items() if why]


# --- the goals


def _found(rows: Sequence[Row], what: str, model: str, side: str) -> Row | None:
    wanted = {"what": what, "model": model, "side": side}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 3) if above is not None and below else None


def _ratio_of_rounds(rows: Sequence[Row], model: str, side: str) -> float | None:
    """Return the median of our rates by a side's, round by round."""
    ours, theirs = (_found(rows, "decode", model, which) for which in ("headrace", side))
    if ours is None or theirs is None:
        return None
    mine: list[float] = ours["rounds"]
    others: list[float] = theirs["rounds"]
    return round(statistics.median([rate / other for rate, other in zip(mine, others, strict=True)]), 3)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals of the parts that were measured. A figure whose yardstick is missing is None, and its goal is
    missed."""
    measured = {(row["what"], row.get("model")) for row in rows}

    def value(what: str, model: str, side: str, key: str) -> float | None:
        row = _found(rows, what, model, side)
        return None if row is None else row[key]

    goals: list[Goal] = []
    for model, tokens in PROMPT.items():
        ours = value("first token", model, "headrace", "first_ms")
        yardsticks = (("recompute", 0.25), ("offloading", 1.1), ("lmcache", 1.0))
        for side, most in yardsticks if ("first token", model) in measured else ():
            ratio = _ratio(ours, value("first token", model, side, "first_ms"))
            name = f"first token of {tokens} tokens ({model}), headrace to {side}"
            goals.append(Goal(name, ratio, "times", most, ratio is not None and ratio <= most))
        for side in ("idle", "empty", "recompute") if ("decode", model) in measured else ():
            ratio = _ratio_of_rounds(rows, model, side)
            name = f"tokens a second while blocks are stored ({model}), headrace to {side}"
            goals.append(Goal(name, ratio, "times", 0.97, ratio is not None and ratio >= 0.97))
    for what, above, below, least in (
        ("moved", "moved_tokens", "stayed_tokens", 1.0),
        ("killed", "after_tokens", "before_tokens", 0.95),
    ):
        if (what, "tiny") not in measured:
            continue
        ratio = _ratio(value(what, "tiny", "headrace", above), value(what, "tiny", "headrace", below))
        goals.append(Goal(f"hits, {what}", ratio, "times", least, ratio is not None and ratio >= least))
    return goals


def _end(*_: object) -> None:
    """End all that was started, too; a second signal does not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def main() -> int:
    """Run the benchmark. Return 0."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(PROMPT), default=sorted(PROMPT, reverse=True))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--lmcache", default="", help="the Python of an environment with vLLM and LMCache")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for kvbm's pool")
    parser.add_argument("--repeats", type=int, default=3, help="counted requests of each prompt, in first token")
    parser.add_argument("--streams", type=int, default=8, help="streams at once, in decode")
    parser.add_argument("--turns", type=int, default=8, help="of a conversation")
    parser.add_argument("--turn-tokens", type=int, default=200, help="tokens that each turn adds")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two turns")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts, in killed")
    parser.add_argument("--seed", type=int, default=1)
    signal.signal(signal.SIGTERM, _end)
    return run("vllm_tiers", parser, measure, goals_of)


if __name__ == "__main__":
    sys.exit(main())
