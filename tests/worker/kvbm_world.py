"""Engines and a kvbm in a drawer, with all that can befall either of them; one thing after another, as a test says."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random

from services.kvbm.tickets.results import TicketLimits
from services.worker.config import Offload
from services.worker.contracts.messages import (
    BlockExplained,
    CancelAttempt,
    EngineOperation,
    Exchanged,
    ImageEncoded,
    KvbmLink,
    Operate,
    Operated,
    Prefetch,
    Snapshot,
    Stepped,
    Submit,
)
from services.worker.contracts.runner import Work
from services.worker.engine.core import EngineCore
from services.worker.kv_connector.connector import ExchangeTerms, KVConnector
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmReply, KvbmUp
from services.worker.kv_connector.pool_attachment import PoolAttachment
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.scheduler import Scheduler
from shared.blocks import Content
from shared.hashing import ContentKey, content_keys, pack_tokens, root_key, unpack_tokens
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.messages.kvbm import StoreLayout
from tests.worker.fake_runner import EOS, continuation
from tests.worker.hand_sharing import HandBorrower, HandLender
from tests.worker.kvbm_drawer import Drawer
from tests.worker.pool_runner import BLOCK_SIZE, LAYOUT, HandMover, PoolRunner, fingerprints

LIMIT_S = 180.0
CONTEXT_LENGTH = 16
CAPACITY_BLOCKS = 10
STORE = StoreLayout(model="model", weights="the same", kv=LAYOUT)
BOUNDS = TicketLimits(store_time_s=4.0, fetch_time_s=4.0, tickets_per_owner=16, owner_share=0.7)


class Engine:
    """One engine process: a real core, scheduler and exchange; its shell's queues are the test's."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.runner = PoolRunner(CAPACITY_BLOCKS, CONTEXT_LENGTH)
        self.runner.suspects = world.damaged_pool
        self.hand = None if world.threads else HandMover(self.runner.memory, lambda: world.now_s)
        mover = self.hand or self.runner.mover(lambda: world.now_s)
        self.attachment = PoolAttachment(world.directory, name)
        limits = SchedulerLimits(
            model="model",
            context_length=CONTEXT_LENGTH,
            eos_token_ids=frozenset((EOS,)),
            block_size=BLOCK_SIZE,
            capacity_blocks=CAPACITY_BLOCKS,
            max_waiting=512,
            max_running=4,
            wait_s=world.draw.choice(world.waits_s),
            offload=world.draw.choice(world.offloads),
        )
        self.scheduler = Scheduler(limits)
        self.scheduler.loras.update(lora for lora in world.loras if lora)
        memory, clock = self.runner.memory, lambda: world.now_s
        self.reader = HandBorrower(name, memory, world.sharer_of, clock)
        self.sharer = HandLender(self.scheduler.kv_cache, memory)
        self.scheduler.kv_cache.is_shared = self.sharer.is_shared
        terms = ExchangeTerms(name, STORE, world.answer_s, most_blocks=6, checksums=world.checks)
        self.connector = KVConnector(self.scheduler.kv_cache, mover, self.attachment, terms, self.reader, self.sharer)
        self.core = EngineCore(self.scheduler, BLOCK_SIZE, self.connector, ("clear", "sleep", "wake"))
        self.sleeps = False
        """From a sleep that was not refused until it woke."""
        self.computes = False
        """A step is under way."""
        self.asks: deque[KvbmAsk] = deque()
        self.replies: dict[int, deque[KvbmReply]] = {}
        """Under way, by number."""
        self.streams: dict[int, int] = {}
        """Ticket → the number of the fetch that more replies come to."""
        self.link = KvbmLink(kvbm="")
        self.living: dict[str, Submit] = {}
        self.answers: dict[str, list[int]] = {}
        self.exchanged = Exchanged()
        self.told_shared: list[int] = [0]
        """The shared blocks of each report."""
        self.host_tokens = self.disk_tokens = 0
        """Prompt tokens that answers report as cached there."""
        self.hear([self.core.opening()])

    def hear(self, reports: Sequence[Stepped | Snapshot | BlockExplained | Operated | ImageEncoded]) -> None:
        for report in reports:
            if not isinstance(report, Stepped):
                continue
            self.told_shared.append(report.load.shared_blocks)
            if report.exchanged is not None:
                self.exchanged = report.exchanged
                assert self.world.damages or not report.exchanged.differing_blocks, "found where there was none"
            for part in report.parts.get("f", []):
                self.part(part)

    def part(self, part: Part) -> None:
        submit = self.living[part.request]
        answer = self.answers[part.request]
        assert part.first == len(answer)
        answer += unpack_tokens(part.tokens)
        assert part.cached_host_tokens + part.cached_disk_tokens <= part.cached_tokens
        if part.finish is not None:
            assert part.finish != "error", part.error
            del self.living[part.request]
            right = continuation(unpack_tokens(submit.tokens), submit.sampling.max_tokens, CONTEXT_LENGTH)
            assert answer == (right if part.finish in ("stop", "length") else right[: len(answer)])
            self.host_tokens += part.cached_host_tokens
            self.disk_tokens += part.cached_disk_tokens

    def submit(
        self, request: str, prompt: list[int], max_tokens: int, lora: str = "", *, prefill_only: bool = False
    ) -> None:
        self.world.expect(prompt, max_tokens, lora)
        submit = Submit(
            request=request,
            attempt=1,
            frontend="f",
            tokens=pack_tokens(prompt),
            prompt_tokens=len(prompt),
            sampling=Sampling(max_tokens=max_tokens),
            time_left_s=10_000.0,
            lora=lora,
            prefill_only=prefill_only,
        )
        self.living[request], self.answers[request] = submit, []
        self.core.handle(submit, self.world.now_s)

    def expect(self, request: str, prompt: list[int], lora: str, sharer: str = "") -> None:
        """Tell the engine of a request that may come, and whose blocks the worker `sharer` computes."""
        self.world.expect(prompt, 1, lora)
        sampling, tokens = Sampling(max_tokens=1), pack_tokens(prompt)
        self.core.handle(
            Prefetch(Submit(request, 1, "f", tokens, len(prompt), sampling, 10_000.0, lora=lora), sharer),
            self.world.now_s,
        )

    def cancel(self, pick: int) -> None:
        if self.living:
            self.core.handle(CancelAttempt(sorted(self.living)[pick % len(self.living)], 1), self.world.now_s)

    def operate(self, operation: EngineOperation) -> None:
        """Ask for an operation; `sleep` may take some steps."""
        answers = self.core.handle(Operate(1, operation), self.world.now_s)
        self.hear(answers)
        self.sleeps |= operation == "sleep" and not answers
        self.do_operation()

    def do_operation(self) -> None:
        due = self.core.due_operation()
        if due is not None:
            assert self.hand is None or self.hand.idle or due.operation != "sleep", "a copy is under way"
            failed = self.runner.operate(due.operation, "", "", due.level)
            self.sleeps &= due.operation != "wake"
            self.hear(self.core.operated(failed, self.world.now_s))
            self.core.validate()

    def step(self) -> bool:
        """False if there was nothing to do."""
        now_s = self.world.now_s
        told, works = self.core.begin(now_s)
        self.hear(told)
        self.tell(self.core.step_connector(now_s))
        if works is not None:
            self.computes = True
            self.exchange(works)
            drawn = self.runner.step(works)
            self.exchange(works)
            self.computes = False
            self.hear(self.core.finish(drawn, self.world.step_s))
        self.core.validate()
        self.do_operation()
        if works is None and not self.core.busy:
            until_s = self.core.wait_until_s
            assert until_s is None or until_s > now_s, "it would not sleep"
            return False
        return True

    def tell(self, messages: Sequence[KvbmAsk | KvbmLink]) -> None:
        for said in messages:
            if isinstance(said, KvbmAsk):
                self.asks.append(said)
            else:
                self.link = said

    def exchange(self, works: Sequence[Work]) -> None:
        """Exchange blocks while these works are computed, in a world where engines do that."""
        draw = self.world.draw
        for _ in range(draw.randrange(3) if self.world.overlaps and works else 0):
            if self.asks and draw.random() < 0.5:
                self.carry("")
            self.stream()
            ready = [waiting for waiting in self.replies.values() if waiting]
            if ready and draw.random() < 0.8:
                self.core.handle(draw.choice(ready).popleft(), self.world.now_s)
            if draw.random() < 0.2 and len(self.living) < 4 and not self.sleeps:
                self.world.submit(self)
            if self.world.trouble is not None and draw.random() < 0.5:
                self.world.anything_else(self)
            self.copy(draw.randint(0, self.world.copies))
            self.tell(self.core.exchange(self.world.now_s))
            self.validate()

    def handle(self, command: KvbmUp | KvbmDown | KvbmReply) -> None:
        self.core.handle(command, self.world.now_s)
        self.validate()

    def validate(self) -> None:
        if not self.computes:
            self.core.validate()
        else:
            self.connector.validate()
            self.scheduler.kv_cache.onboarding.validate()
            self.scheduler.kv_cache.offloading.validate()

    # --- its copies

    def copy(self, halves: int) -> None:
        """Some of them go on."""
        for _ in range(halves):
            self.reader.go_on(self.world.draw.randrange(100))
            if self.hand is not None:
                self.hand.go_on(self.world.draw.randrange(100))

    def copied(self) -> bool:
        """All of them go on to their end. False if there were none."""
        if self.connector.idle:
            return False
        if not self.reader.idle:
            while not self.reader.idle:
                self.reader.go_on(0)
            return True
        while self.hand is not None and not self.hand.idle:
            self.hand.go_on(0)
        if self.hand is None and self.core.exchange_due_s != 0.0:  # 0: some have ended, and wait to be taken up
            assert select.select([self.connector.mover.fileno()], [], [], LIMIT_S)[0], "no copy ends"
        return True

    # --- its shell

    def carry(self, lose: str) -> None:
        """The oldest question reaches the kvbm, unless it or its answer is lost."""
        ask = self.asks.popleft()
        waiting = self.replies.setdefault(ask.number, deque())
        drawer = self.world.drawer
        if drawer is None or lose == "question":
            waiting.append(KvbmReply(ask.number, b"", failed="lost"))
            return
        replies, ticket = drawer.answer(ask, self.world.now_s)
        drawer.validate()
        if lose == "answer":
            waiting.append(KvbmReply(ask.number, b"", failed="late"))
            return
        if ticket:
            self.streams[ticket] = ask.number
        last = ticket == 0
        waiting.extend(KvbmReply(ask.number, reply, last=last) for reply in replies)

    def stream(self) -> None:
        """Later replies to fetches."""
        drawer = self.world.drawer
        for ticket, number in list(self.streams.items()):
            more = drawer.advanced.get(ticket, []) if drawer is not None else []
            if drawer is None:
                self.replies[number].append(KvbmReply(number, b"", failed="it is gone"))
                del self.streams[ticket]
                continue
            last = bool(more) and more[-1] == b""
            payloads = [payload for payload in more if payload]
            for index, payload in enumerate(payloads):
                self.replies[number].append(KvbmReply(number, payload, last=last and index == len(payloads) - 1))
            more.clear()
            if last:
                del self.streams[ticket]

    def time_out(self) -> None:
        """Nothing comes any more to the fetches that wait."""
        for ticket, number in list(self.streams.items()):
            self.replies[number].append(KvbmReply(number, b"", failed="idle"))
            del self.streams[ticket]

    def deliver(self, pick: int) -> None:
        numbers = sorted(number for number, waiting in self.replies.items() if waiting)
        if numbers:
            self.handle(self.replies[numbers[pick % len(numbers)]].popleft())


class World:
    """Some engines and at most one kvbm, on a pool in `directory`."""

    def __init__(self, directory: Path, draw: Random, *, threads: bool = False) -> None:
        """`threads`: engines copy as they do in earnest, at any time; else as the test says."""
        self.directory = directory
        self.draw = draw
        self.threads = threads
        self.now_s = 0.0
        self.drawer: Drawer | None = None
        self.drawers = 0
        self.disk: dict[ContentKey, tuple[Content, bytes]] = {}
        self.loras: Sequence[str] = ("",)
        """One of each request, and all of each engine."""
        self.prefixes: dict[ContentKey, list[int]] = {}
        """Block → all tokens up to its end, of all that will ever be computed."""
        self.requests = 0
        self.names = 0
        self.engines: list[Engine] = []
        self.expected: list[tuple[Engine, str, list[int], int, str]] = []
        """Requests that engines expect, for `Engine.submit`."""
        self.waits_s: Sequence[float] = (0.5, 5.0)
        self.offloads: Sequence[Offload] = ("filled", "filled", "evicted")
        """One of each engine."""
        self.copies = draw.choice((1, 2, 8))
        """Halves of blocks that are copied at once."""
        self.step_s = draw.choice((0.01, 3.0))
        """Seconds that engines measure for a step: where they are many, asking the kvbm is always worth it."""
        self.overlaps = False
        """Whether engines exchange blocks while they compute a step."""
        self.trouble: float | None = None
        """How likely bad luck is. None means that all goes well."""
        self.answer_s = 1.0
        """How long they wait for an answer."""
        self.damages = False
        """Whether copies change bytes."""
        self.damaged_pool = False
        """Whether bits of the pool turn, which engines see when they compute."""
        self.damaged: set[ContentKey] = set()
        self.checks = False
        """Whether engines make and compare checksums."""

    def right(self, content: Content) -> bytes:
        """The bytes of a block."""
        tokens = self.prefixes[content.key]
        return fingerprints(tokens, len(tokens) - BLOCK_SIZE, content.lora)

    def expect(self, prompt: list[int], max_tokens: int, lora: str) -> None:
        """Blocks of this prompt and its answer may come."""
        tokens = prompt + continuation(prompt, max_tokens, CONTEXT_LENGTH)
        for index, key in enumerate(content_keys(root_key("model", lora), pack_tokens(tokens), BLOCK_SIZE), 1):
            self.prefixes[key] = tokens[: index * BLOCK_SIZE]

    def sharer_of(self, name: str) -> HandLender | None:
        return next((engine.sharer for engine in self.engines if engine.name == name), None)

    # --- what happens

    def open_kvbm(self) -> None:
        assert self.drawer is None
        self.drawers += 1
        name = f"k{self.drawers}"
        self.drawer = Drawer(self.directory, name, STORE, BOUNDS, self.disk, self.right)
        self.drawer.damaged = self.damaged
        for engine in self.engines:
            engine.handle(KvbmUp(name))

    def kill_kvbm(self) -> None:
        """Kill the kvbm: its engines get no answer, and learn of it some time, or when the next kvbm comes."""
        assert self.drawer is not None
        self.drawer.close()
        self.drawer = None
        if self.draw.random() < 0.7:
            for engine in self.engines:
                engine.handle(KvbmDown("it has gone"))

    def start_engine(self) -> Engine:
        self.names += 1
        engine = Engine(self, f"w{self.names}")
        self.engines.append(engine)
        if self.drawer is not None:
            engine.handle(KvbmUp(self.drawer.name))
        return engine

    def kill_engine(self, engine: Engine) -> None:
        """The kernel lets go of its lock; its copies are not made any more."""
        self.engines.remove(engine)
        engine.core.close()

    def submit(self, engine: Engine) -> None:
        self.requests += 1
        prompt = [self.draw.choice((1, 2)) for _ in range(self.draw.randint(1, 4))]
        prompt = [token for token in prompt for _ in range(BLOCK_SIZE)] + [3] * self.draw.randint(0, 2)
        lora = self.draw.choice(self.loras) if len(self.loras) > 1 else ""
        name, most = f"r{self.requests}", self.draw.randint(1, 6)
        if self.engines and self.draw.random() < 0.3:
            other = self.draw.choice([one for one in self.engines if one is not engine] or [engine])
            other.expect(f"of {name}", prompt, lora, self.draw.choice((engine.name, engine.name, engine.name, "")))
            self.expected.append((other, f"of {name}", prompt, most, lora))
        engine.submit(name, prompt, most, lora, prefill_only=self.draw.random() < 0.3)

    def anything(self, trouble: float) -> None:
        """One thing happens."""
        draw, self.trouble = self.draw, trouble
        engine = draw.choice(self.engines)
        roll = draw.random()
        if roll < trouble:
            self.bad_luck(engine)
        elif roll < 0.15 and len(engine.living) < 4 and not engine.sleeps:
            self.submit(engine)
        elif roll < 0.18 and self.expected:
            expecting, name, prompt, most, lora = self.expected.pop()
            if expecting in self.engines and not expecting.sleeps and draw.random() < 0.7:
                expecting.submit(name, prompt, most, lora)
        elif roll < 0.40:
            engine.step()
        elif roll < 0.55 and engine.asks:
            lost = draw.random() < trouble
            engine.carry(draw.choice(("question", "answer")) if lost else "")
        elif roll < 0.70:
            engine.stream()
            engine.deliver(draw.randrange(100))
        elif roll < 0.9:
            engine.copy(draw.randint(1, self.copies))
        elif roll < 0.95 and self.drawer is not None:
            if self.damaged_pool:
                self.drawer.damage(draw)
            self.drawer.trouble(draw, self.now_s)
            self.drawer.validate()
        else:
            self.now_s += draw.choice((0.01, 0.03, 0.1))

    def anything_else(self, computes: Engine) -> None:
        """One thing happens that does not wait for the end of this engine's step."""
        draw, trouble = self.draw, self.trouble or 0.0
        others = [engine for engine in self.engines if not engine.computes]
        roll = draw.random()
        if roll < trouble and draw.random() < 0.5:
            if self.drawer is None:
                self.open_kvbm()
            else:
                self.kill_kvbm()
        elif roll < trouble and others:
            self.kill_engine(draw.choice(others))
            self.start_engine()
        elif roll < 0.5 and others:
            other = draw.choice(others)
            if draw.random() < trouble:
                other.operate("wake" if other.sleeps else draw.choice(("sleep", "clear")))
            other.step()
        elif roll < 0.6 and self.expected:
            expecting, name, prompt, most, lora = self.expected.pop()
            if expecting is computes:
                expecting.submit(name, prompt, most, lora)
        elif roll < 0.7 and self.drawer is not None:
            self.drawer.trouble(draw, self.now_s)
            self.drawer.validate()
        elif roll < 0.9:
            self.now_s += draw.choice((0.01, 0.03, 0.1))

    def bad_luck(self, engine: Engine) -> None:
        draw = self.draw
        match draw.randrange(9):
            case 0 if self.drawer is not None:
                self.kill_kvbm()
            case 1 | 2 if self.drawer is None:
                self.open_kvbm()
            case 3 if len(self.engines) > 1:
                self.kill_engine(engine)
                self.start_engine()
            case 4:
                self.now_s += draw.choice((1.0, 3.2, 5.0))  # past deadlines
                if self.drawer is not None:
                    self.drawer.look(self.now_s)
            case 5:
                engine.cancel(draw.randrange(100))
            case 6:
                engine.time_out()
            case 7:
                engine.operate("wake" if engine.sleeps else "sleep")
            case 8:
                engine.operate("clear")
            case _:
                pass

    def settle(self) -> None:
        """Nothing goes wrong any more, until nothing happens any more."""
        self.trouble = None
        if self.drawer is None:
            self.open_kvbm()
        assert self.drawer is not None
        for _ in range(2000):
            rests = [self.go_on(engine) for engine in self.engines]
            if all(rests) and not self.drawer.reads:
                return
        raise AssertionError("it does not come to rest")

    def go_on(self, engine: Engine) -> bool:
        """All goes well with this engine for a while; whether it is at rest, attached."""
        assert self.drawer is not None
        self.now_s += 0.05
        if engine.sleeps:
            engine.operate("wake")  # refused while it falls asleep
        rests = not engine.step() and not engine.living and bool(engine.link.kvbm)
        while engine.asks:
            engine.carry("")
            rests = False
        engine.stream()
        while any(engine.replies.values()):
            engine.deliver(0)
            rests = False
        rests &= not engine.copied()
        while self.drawer.reads:
            self.drawer.read("ok", self.now_s)
        self.drawer.look(self.now_s)
        self.drawer.validate()
        return rests and engine.core.wait_until_s is None

    def nothing_is_left(self) -> None:
        assert self.drawer is not None
        for engine in self.engines:
            load = engine.scheduler.load()
            assert (load.held_blocks, load.waiting, load.running) == (0, 0, 0)
            assert not engine.scheduler.kv_cache.offloading._owed, "blocks that are on their way to nowhere"
            assert engine.sharer.sharing.blocks == engine.told_shared[-1] == 0
        statistics = self.drawer.tickets.statistics()
        assert (statistics.stores, statistics.expired, statistics.awaited) == (0, 0, 0)
        self.now_s += BOUNDS.fetch_time_s  # a fetch whose answer was lost ends by itself
        self.drawer.look(self.now_s)
        assert self.drawer.tickets.statistics().fetches == 0
        host = statistics.tiers.host
        assert (host.writing, host.quarantined) == (0, 0)

    def close(self) -> None:
        for engine in list(self.engines):
            self.kill_engine(engine)
        if self.drawer is not None:
            self.drawer.close()
