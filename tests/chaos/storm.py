"""One run: the stack starts, answers everything once undisturbed, and then goes through its faults under load.

references ─▶ ┌─▶ pause ─▶ fault ─▶ undone ─▶ healed on every path, whole ─┐ ─▶ the last requests end ─▶ verdict
              └───────────────────────────◀────────────────────────────────┘
              requests come all the while, and do not wait for one another until many are open
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random

from msgspec import Struct

from services.worker.config import Device
from shared.config import DiscoveryConfig
from tests.chaos.clients import HttpClients, NatsClient
from tests.chaos.plan import (
    ALONE,
    CLUSTERS_DECK,
    DECK,
    NATS_AWAY_S,
    PARTITIONS_S,
    ROLES_DECK,
    Ask,
    Fault,
    Target,
    asks,
    faults,
    questions,
)
from tests.chaos.stack import FAST, KEY, KEYS, NAMESPACE, Detection, Stack, running
from tests.chaos.verdict import Answer, Happened, Reference, Sample, Verdict, judge

QUESTIONS = 24
REFERENCES_AT_ONCE = 8
OPEN_S = 6.0
"""As many requests may be open as come in this time and that of the longest fault. A machine that keeps up never has so
many; without a bound a slow one would be asked for more than it can do, and would never catch up."""
PROBE_LIMIT_S = 2.0
"""For the first probe; each later one has half as much again."""
PROBE_PAUSE_S = 0.1
SAMPLE_S = 2.0
LOOK_S = 1.0
"""Between two looks at a frontend's health, as a balancer takes them."""
SILENCE_S = 60.0
"""Beyond the longest fault. Nothing of a whole answer over NATS is heard until its end."""
SETTLE_LIMIT_S = 180.0
"""For the last requests to end, and for all that is held to be let go of."""
READ_LIMIT_S = 900.0
_WORKER_OF: Mapping[Target, Target] = {"engine": "worker", "prefill engine": "prefill", "decode engine": "decode"}
"""Whose engine it is."""


class Settings(Struct, frozen=True):
    """One run."""

    seed: int
    most_s: float
    """No fault begins later."""
    most_faults: int = 1 << 30
    per_s: float = 4.0
    """Requests."""
    instances: int = 2
    durations_s: tuple[float, ...] = (0.5, 2.0, 4.0)
    """Durations of faults."""
    detection: Detection = FAST
    device: Device = "cpu"
    """Where the workers compute."""
    roles: bool = False
    """Whether prompts are computed by workers of their own."""
    clusters: bool = False
    """Whether NATS and etcd are clusters, and each worker is on a machine of its own."""
    partitions_s: tuple[float, ...] = PARTITIONS_S
    heal_limit_s: float = 45.0
    """From the end of a fault until all must be whole."""


class Outcome(Struct):
    """What came of it."""

    verdict: Verdict
    faults: list[Happened]
    samples: list[Sample]
    tokens: int
    took_s: float
    hand_overs: int
    """Prompts that one worker computed and another one decoded from, as far as frontends lived to tell."""


async def run(settings: Settings, directory: Path, tell: Callable[[str], None]) -> Outcome:
    """Tells a line per fault, and one for all that was wrong."""
    kinds = {"roles": settings.roles, "clusters": settings.clusters}
    async with (
        running(directory, settings.instances, settings.detection, settings.device, **kinds) as stack,
        asyncio.TaskGroup() as tasks,
    ):
        storm = Storm(settings, stack, tasks, tell)
        try:
            return await storm.run()
        finally:
            await storm.close()


class Storm:
    """One run on a stack that is whole."""

    def __init__(self, settings: Settings, stack: Stack, tasks: asyncio.TaskGroup, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._stack = stack
        self._tasks = tasks
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._questions = questions(QUESTIONS)
        self._http = HttpClients(stack.api_urls, KEY, self._now, read_limit_s=READ_LIMIT_S)
        partitions_s = settings.partitions_s if settings.clusters else ()
        self._silence_s = max(*settings.durations_s, *NATS_AWAY_S, *partitions_s) + SILENCE_S
        where = stack.servers.nats_url, stack.servers.tls
        self._nats = NatsClient(*where, NAMESPACE, KEY, self._now, silence_limit_s=self._silence_s)
        self._answers: list[Answer] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._around: list[asyncio.Task[None]] = []
        """Load, looks and samples, without end."""
        self._faults: list[Happened] = []
        self._samples: list[Sample] = []
        self._hand_overs: dict[int, float] = {}
        """By the frontend's process."""

    def _now(self) -> float:
        return self._loop.time() - self._began

    async def close(self) -> None:
        for task in (*self._around, *self._asking):
            task.cancel()
        await self._http.close()
        await self._nats.close()

    async def run(self) -> Outcome:
        await self._nats.open()
        references = await self._references()
        self._began = self._loop.time()
        load, *_ = self._around = [
            self._tasks.create_task(one)
            for one in (self._load(), self._sample(), *map(self._balance, range(self._settings.instances)))
        ]
        await self._storm()
        load.cancel()
        if self._asking:
            await asyncio.wait(self._asking, timeout=self._silence_s + SETTLE_LIMIT_S)
        left = await self._settled()
        verdict = judge(references, self._answers, self._faults, self._samples, left, self._now())
        for violation in verdict.violations:
            self._tell(f"{violation.at_s:7.2f} s  {violation.kind.upper()}: {violation.what}")
        tokens = sum(max(answer.completion_tokens, 0) for answer in self._answers)
        self._hand_overs |= await self._stack.hand_overs()
        hand_overs = round(sum(self._hand_overs.values()))
        return Outcome(verdict, self._faults, self._samples, tokens, self._now(), hand_overs)

    # --- load

    async def _references(self) -> list[Reference]:
        """What every question is answered before anything goes wrong; both doors agree on it."""
        at_once = asyncio.Semaphore(REFERENCES_AT_ONCE)

        async def reference(number: int, frontend: int) -> Reference:
            async with at_once:
                answer = self._answer(Ask(0.0, number, frontend, streamed=frontend == 0))
                await self._ask(answer)
            assert answer.end == "answered", answer
            return Reference(answer.text, answer.finish, answer.prompt_tokens, answer.completion_tokens)

        by_http, by_nats = [
            await asyncio.gather(*(reference(number, frontend) for number in range(QUESTIONS))) for frontend in (0, -1)
        ]
        assert by_http == by_nats, "answers differ without any fault"
        return by_http

    async def _load(self) -> None:
        settings = self._settings
        endless = asks(
            settings.seed,
            per_s=settings.per_s,
            questions=QUESTIONS,
            frontends=settings.instances,
            salted=settings.roles,
        )
        most_open = settings.per_s * (OPEN_S + max(settings.durations_s))
        due_s = self._now()
        for ask in endless:
            due_s += ask.after_s
            await asyncio.sleep(due_s - self._now())
            while len(self._asking) >= most_open:
                await asyncio.wait(self._asking, return_when=asyncio.FIRST_COMPLETED)
                due_s = self._now()
            answer = self._answer(ask)
            self._answers.append(answer)
            task = self._tasks.create_task(self._ask(answer))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _balance(self, frontend: int) -> None:
        """Who says nothing stays: what a frozen frontend was asked it is to answer afterwards."""
        name = self._stack.names("frontend")[frontend]
        while True:
            match await self._stack.unready(name):
                case True:
                    self._http.unready.add(frontend)
                case False:
                    self._http.unready.discard(frontend)
                case None:
                    pass
            await asyncio.sleep(LOOK_S)

    def _answer(self, ask: Ask) -> Answer:
        now_s = self._now()
        return Answer(ask, asked_s=now_s, frontend=ask.frontend, heard_s=now_s)

    async def _ask(self, answer: Answer) -> None:
        question = self._questions[answer.ask.question]
        if answer.ask.frontend < 0:
            await self._nats.ask(question, answer)
        else:
            await self._http.ask(question, answer)

    # --- faults

    async def _storm(self) -> None:
        settings = self._settings
        deck = CLUSTERS_DECK if settings.clusters else ROLES_DECK if settings.roles else DECK
        lease_s = settings.detection.lease_ttl_s or DiscoveryConfig().lease_ttl_s
        often = settings.seed, settings.instances, settings.durations_s
        endless = faults(*often, deck, lease_s=lease_s, partitions_s=settings.partitions_s)
        for fault in islice(endless, settings.most_faults):
            await asyncio.sleep(fault.pause_s)
            if self._now() > settings.most_s:
                return
            happened = await self._happen(fault)
            self._faults.append(happened)
            self._tell(line(happened))
            if happened.whole_s is None:
                return  # what comes now would befall a stack that has nobody healthy to spare

    async def _happen(self, fault: Fault) -> Happened:
        now_s = self._now()
        happened = Happened(fault, began_s=now_s, done_s=now_s, open_requests=len(self._asking))
        paths = range(-1, self._settings.instances)
        probes = [self._tasks.create_task(self._probe(happened, path)) for path in paths]
        try:
            await self._befall(happened)
            await self._stack.until_whole(self._settings.heal_limit_s)
            happened.whole_s = self._now() - happened.began_s
            async with asyncio.timeout(self._settings.heal_limit_s):
                await asyncio.gather(*probes)
        except TimeoutError as missing:
            happened.trouble = f"{missing}; new requests get through by {sorted(happened.healed_s)}"
        finally:
            for probe in probes:
                probe.cancel()
        return happened

    async def _befall(self, happened: Happened) -> None:
        """Does it and undoes it."""
        fault, stack = happened.fault, self._stack
        name = fault.target if fault.target in ALONE else f"{_WORKER_OF.get(fault.target, fault.target)} {fault.number}"
        program = stack.programs[name]
        damage = Random(f"damage {self._settings.seed} {len(self._faults)}")
        match fault.kind:
            case "kill" if fault.target in _WORKER_OF:
                await self._kill_engine(name)
            case "kill with kvbm":
                await asyncio.gather(stack.programs["kvbm"].kill(), self._kill_engine(name))
                happened.done_s = self._now()
                await asyncio.sleep(fault.for_s)
                await stack.programs["kvbm"].start()
            case "freeze" if fault.target in _WORKER_OF:
                await self._freeze_engine(name, fault.for_s)
            case "kill":
                await program.kill()
                happened.done_s = self._now()
                await asyncio.sleep(fault.for_s)
                await program.start()
            case "restart" | "wipe":
                happened.trouble = await program.terminate()
                happened.done_s = self._now()
                if fault.kind == "wipe":
                    stack.wipe_etcd()
                await program.start()
            case "freeze":
                program.freeze()
                await asyncio.sleep(fault.for_s)
                program.thaw()
            case "sever nats" | "sever etcd" | "hang nats" | "hang etcd":
                kind, _, server = fault.kind.partition(" ")
                link = stack.servers.links[name, server]
                await (link.sever() if kind == "sever" else link.hang())
                await asyncio.sleep(fault.for_s)
                await link.mend()
            case "damage disk" | "damage pool":
                await program.kill()
                happened.done_s = self._now()
                if fault.kind == "damage disk":
                    stack.damage_disk(damage)
                else:
                    stack.damage_pool()
                await asyncio.sleep(fault.for_s)
                await program.start()
            case "partition":
                stack.servers.cut(name)
                await asyncio.sleep(fault.for_s)
                stack.servers.mend(name)
            case "damage memory":
                stack.damage_memory(damage)
            case "damage keys":
                file = stack.keys_file(name)
                file.write_text("no keys at all, and no TOML", encoding="utf-8")
                await asyncio.sleep(fault.for_s)
                file.write_text(KEYS, encoding="utf-8")
        happened.undone_s = self._now()
        happened.done_s = max(happened.done_s, happened.began_s)

    async def _kill_engine(self, worker: str) -> None:
        """Returns when its worker has started another, which need not be ready."""
        killed = self._stack.engine(worker)
        assert killed is not None, "all was whole"
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(self._settings.heal_limit_s):
            while self._stack.engine(worker) in (killed, None):  # noqa: ASYNC110
                await asyncio.sleep(PROBE_PAUSE_S)  # another process: there is nothing to wait on

    async def _freeze_engine(self, worker: str, for_s: float) -> None:
        """Its worker may kill it meanwhile."""
        frozen = self._stack.engine(worker)
        assert frozen is not None, "all was whole"
        os.kill(frozen, signal.SIGSTOP)
        await asyncio.sleep(for_s)
        with suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)

    async def _probe(self, happened: Happened, path: int) -> None:
        """New requests by one path, until one is answered; how long that was after the fault's beginning."""
        number = min(range(QUESTIONS), key=lambda at: self._questions[at].max_tokens)
        limit_s = PROBE_LIMIT_S
        while True:
            answer = self._answer(Ask(0.0, number, path, streamed=True))
            try:
                async with asyncio.timeout(limit_s):
                    question = self._questions[number]
                    if path < 0:
                        await self._nats.ask(question, answer)
                    else:
                        await self._http.ask(question, answer, only=True)
            except TimeoutError:
                limit_s *= 1.5
                continue
            if answer.end == "answered":
                happened.healed_s["NATS" if path < 0 else f"frontend {path}"] = self._now() - happened.began_s
                return
            await asyncio.sleep(PROBE_PAUSE_S)

    # --- sizes

    async def _sample(self) -> None:
        while True:
            for program in self._stack.programs.values():
                if program.running:
                    self._samples += program.sample(self._now())
            if self._settings.roles:
                self._hand_overs |= await self._stack.hand_overs()
            await asyncio.sleep(SAMPLE_S)

    async def _settled(self) -> dict[str, float]:
        """What is still held when everything had time to be let go of."""
        until = self._now() + SETTLE_LIMIT_S
        while True:
            left = {what: value for what, value in (await self._stack.left()).items() if value}
            if not left or self._now() > until:
                return left
            await asyncio.sleep(PROBE_PAUSE_S)


def line(happened: Happened) -> str:
    """One fault, for people."""
    paths = ", ".join(f"{path} {after_s:.2f}" for path, after_s in sorted(happened.healed_s.items()))
    whole = "never whole" if happened.whole_s is None else f"whole after {happened.whole_s:.2f} s"
    told = f"{happened.began_s:7.2f} s  {happened.fault.name}: {whole}; new requests after {paths}"
    return f"{told}; {happened.open_requests} were open{'; ' + happened.trouble if happened.trouble else ''}"
