from __future__ import annotations

from functools import reduce
from operator import xor
from typing import Literal

import pytest

from services.worker.config import Device, EngineConfig, EngineName, KVConnectorConfig, WorkerConfig
from services.worker.contracts.messages import (
    CancelAttempt,
    EngineOperation,
    Operate,
    Operated,
    Probed,
    ProbeDevice,
    Ready,
    Snapshot,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.contracts.runner import Drawn
from services.worker.engine.core import MOST_PENDING, REPORT_INTERVAL_S, EngineCore
from services.worker.limits import DECODE_STEP_S, PREFILL_STEP_S, SchedulerLimits
from services.worker.scheduler.scheduler import Scheduler
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.cards import KvLayout, Pooling
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.worker.fake_runner import EOS, FakeRunner, continuation

CONTEXT = 32
PROBE = [4, 3, 4]


class Engine:
    """A core driven by hand, all steps equally long. Its reports are kept, and those of its cache are checked."""

    def __init__(
        self,
        capacity_blocks: int = 8,
        step_s: float = 1.0,
        operations: tuple[EngineOperation, ...] = ("load_lora", "unload_lora", "clear", "sleep", "wake"),
    ) -> None:
        self.step_s = step_s
        self.steps = 0
        self.computed = 0
        self.runner = FakeRunner(block_size=2, capacity_blocks=capacity_blocks, context_length=CONTEXT)
        limits = SchedulerLimits(
            model="model",
            context_length=CONTEXT,
            eos_token_ids=frozenset((EOS,)),
            block_size=2,
            capacity_blocks=capacity_blocks,
            max_waiting=512,
        )
        self.core = EngineCore(Scheduler(limits), 2, operations=operations)
        self.now_s = 0.0
        self.cached: set[int] = set()
        self.told: list[Stepped] = []
        self.probed: list[Probed] = []
        self.take(self.core.opening())

    def submit(
        self,
        request: str,
        prompt: list[int],
        max_tokens: int = 4,
        time_left_s: float = 60.0,
        pooling: Pooling = "",
        lora: str = "",
    ) -> None:
        submit = Submit(
            request=request,
            attempt=1,
            frontend="f",
            tokens=pack_tokens(prompt),
            prompt_tokens=len(prompt),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, pooling=pooling),
            time_left_s=time_left_s,
            lora=lora,
        )
        assert not self.core.handle(submit, self.now_s)

    def step(self) -> bool:
        """Whether there was something to do."""
        told, works = self.core.begin(self.now_s)
        for report in told:
            self.take(report)
        if works is None:
            return False
        self.now_s += self.step_s
        self.steps += 1
        self.computed += sum(len(work.tokens) for work in works if list(work.history) != PROBE)
        for report in self.core.finish(self.runner.step(works), self.step_s):
            self.take(report)
        if (probed := self.core.take_probed()) is not None:
            self.probed.append(probed)
        self.core.validate()
        return True

    def run(self) -> None:
        while self.step():
            pass

    def snapshot(self) -> Snapshot:
        *told, taken = self.core.handle(TakeEngineSnapshot(ticket=7), self.now_s)
        for report in told:
            assert isinstance(report, Stepped)
            self.take(report)
        assert isinstance(taken, Snapshot)
        assert taken.ticket == 7
        return taken

    def take(self, step: Stepped) -> None:
        self.core.validate()
        assert step.progress == self.steps
        assert step.steps == self.steps - sum(each.steps for each in self.told)
        assert step.tokens == self.computed - sum(each.tokens for each in self.told)
        before = self.told[-1].event_sequence if self.told else -1
        assert step.event_sequence == before + bool(step.events)
        self.told.append(step)
        for event in step.events:
            match event:
                case AllBlocksCleared():
                    self.cached.clear()
                case BlockStored(block_hashes=hashes):
                    self.cached.update(map(int, hashes))
                case BlockRemoved(block_hashes=hashes):
                    self.cached.difference_update(map(int, hashes))
        assert step.digest == reduce(xor, self.cached, 0), "of what was told, not of what has happened since"

    def parts(self, request: str) -> list[Part]:
        return [part for step in self.told for part in step.parts.get("f", []) if part.request == request]

    def tokens(self, request: str) -> list[int]:
        parts = self.parts(request)
        return [token for part in parts for token in unpack_tokens(part.tokens)]


def test_its_opening_says_that_the_cache_is_empty() -> None:
    engine = Engine()
    (opening,) = engine.told
    assert (opening.event_sequence, opening.progress, opening.digest) == (0, 0, 0)
    assert opening.events == [AllBlocksCleared()]


def test_without_attempts_there_is_nothing_to_do() -> None:
    engine = Engine()
    assert not engine.core.busy
    assert engine.core.begin(0.0) == ([], None)


def test_an_attempt_is_computed_step_by_step_and_every_step_is_numbered() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3])
    assert engine.core.busy
    engine.run()
    assert engine.tokens("r")[:1] == continuation([1, 2, 3], 1, CONTEXT)
    assert len(engine.tokens("r")) == 4
    assert engine.told[-1].load.running == 0


def test_a_report_without_work_is_a_step() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3])
    assert not engine.core.handle(CancelAttempt("r", 1), 0.0)
    assert engine.step()
    (part,) = engine.told[-1].parts["f"]
    assert part.finish == "cancelled"
    assert engine.told[-1].tokens == 0


def test_a_snapshot_is_what_the_events_up_to_its_sequence_say() -> None:
    engine = Engine(capacity_blocks=6)  # fewer than the three prompts need: blocks are evicted too
    for number in range(3):
        engine.submit(f"r{number}", [number, 1, 2, 3, 4])
        engine.run()
        taken = engine.snapshot()
        assert {block.hash for block in taken.blocks} == engine.cached
        assert taken.event_sequence == engine.told[-1].event_sequence
    assert any(isinstance(event, BlockRemoved) for step in engine.told for event in step.events)


@pytest.mark.parametrize("step_s", [1.0, REPORT_INTERVAL_S / 4, 0.0])
def test_the_same_is_reported_however_short_the_steps_are(step_s: float) -> None:
    engine = Engine(capacity_blocks=64, step_s=step_s)
    prompts = {"a": [1, 2, 3], "b": [7, 8], "c": [9, 1, 1]}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=12)
    engine.run()
    for name, prompt in prompts.items():
        expected = continuation(prompt, 12, CONTEXT)
        assert engine.tokens(name)[: len(expected)] == expected
        assert len(engine.tokens(name)) == 12
    assert sum(step.steps for step in engine.told) == engine.steps
    assert (len(engine.told) < engine.steps) == (step_s < REPORT_INTERVAL_S)


def test_short_steps_share_a_report_until_its_time_has_come() -> None:
    engine = Engine(capacity_blocks=64, step_s=REPORT_INTERVAL_S / 4)
    engine.submit("r", [1, 2, 3], max_tokens=14)
    engine.run()
    assert [step.steps for step in engine.told] == [0, 1, 4, 4, 4, 1]
    assert all(len(step.one_token_attempts) == 4 for step in engine.told[2:-1])


def test_first_and_last_tokens_are_reported_at_once() -> None:
    engine = Engine(capacity_blocks=64, step_s=REPORT_INTERVAL_S / 100)
    engine.submit("long", [1, 2, 3], max_tokens=20)
    for _ in range(3):
        engine.step()
    engine.submit("short", [7, 8], max_tokens=2)
    engine.step()
    assert engine.told[-1].parts["f"][-1].request == "short"
    engine.step()
    assert engine.told[-1].parts["f"][-1].finish == "length"


def test_what_is_held_goes_out_before_a_prefill() -> None:
    engine = Engine(capacity_blocks=64, step_s=REPORT_INTERVAL_S / 100)
    engine.submit("r", [1, 2, 3], max_tokens=20)
    for _ in range(4):
        engine.step()
    assert engine.tokens("r") == continuation([1, 2, 3], 1, CONTEXT)
    engine.submit("late", [7, 8])
    told, works = engine.core.begin(engine.now_s)
    assert works is not None
    assert [len(report.parts["f"]) for report in told] == [3]


def test_a_digest_is_that_of_the_reported_blocks_though_others_were_evicted_for_the_next_prefill() -> None:
    engine = Engine(step_s=REPORT_INTERVAL_S / 8)
    engine.submit("before", [1, 2, 3, 4, 5, 6], max_tokens=2)
    engine.run()
    engine.submit("decodes", [3, 1], max_tokens=12)
    for _ in range(4):
        engine.step()
    engine.submit("evicts", [4, 3, 2, 1, 2, 3, 4, 1])
    engine.run()


def test_embeddings_of_one_step_come_in_reports_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.engine.core.MOST_EMBEDDED_BYTES", 8)
    engine = Engine(capacity_blocks=64)
    engine.submit("text", [1, 2, 3], max_tokens=2)
    for number in range(5):
        engine.submit(f"r{number}", [1, number % 5, 3], pooling="mean")
    engine.step()
    told = engine.told[1:]
    assert [[part.request for part in step.parts["f"]] for step in told] == [["text", "r0", "r1"], ["r2", "r3"], ["r4"]]
    assert [[part.request for part in step.boundary_parts] for step in told] == [
        ["text", "r0", "r1"],
        ["r2", "r3"],
        ["r4"],
    ]
    assert [(step.steps, bool(step.event_batch)) for step in told] == [(1, True), (0, False), (0, False)]
    assert all(len(part.embedding) == 4 for step in told for part in step.boundary_parts if part.request != "text")


def test_what_is_held_is_bounded() -> None:
    engine = Engine(capacity_blocks=4096, step_s=0.0)
    for number in range(40):
        engine.submit(f"r{number}", [1 + number % 7, 2, 3], max_tokens=25)
    engine.run()
    assert max(len(step.one_token_attempts) for step in engine.told) in range(MOST_PENDING, MOST_PENDING + 40)


def test_deadlines_are_read_against_the_time_that_steps_begin() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3], max_tokens=20, time_left_s=2.5)
    engine.run()
    assert engine.told[-1].parts["f"][-1].finish == "deadline"
    assert len(engine.tokens("r")) == 3


def operate(engine: Engine, operation: EngineOperation, name: str = "", *, failed: str = "") -> str:
    """Have an operation done, which the runner fails to do for the reason `failed`; return why it was not done."""
    answers = list(engine.core.handle(Operate(1, operation, name, "somewhere"), engine.now_s))
    due = engine.core.due_operation()
    if due is not None:
        assert (due.operation, due.name, answers) == (operation, name, [])
        answers += engine.core.operated(failed, engine.now_s)
    *reports, operated = answers
    for report in reports:
        assert isinstance(report, Stepped)
        engine.take(report)
    assert isinstance(operated, Operated)
    assert operated.ticket == 1
    return operated.failed


def load(engine: Engine, name: str) -> None:
    assert operate(engine, "load_lora", name) == ""


def test_an_attempt_with_a_lora_that_is_not_loaded_ends_with_an_error() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3], lora="poet@1")
    engine.run()
    (part,) = engine.parts("r")
    assert (part.finish, part.error) == ("error", "no LoRA poet@1 is loaded")
    assert engine.computed == 0


def test_a_lora_that_failed_to_load_is_not_loaded() -> None:
    engine = Engine()
    assert operate(engine, "load_lora", "poet@1", failed="load_lora: no") == "load_lora: no"
    engine.submit("r", [1, 2, 3], lora="poet@1")
    engine.run()
    assert engine.parts("r")[-1].finish == "error"


def test_operations_that_change_nothing_or_that_an_engine_cannot_do_are_refused() -> None:
    engine = Engine(operations=("load_lora", "unload_lora"))
    assert operate(engine, "sleep") == "sleep: this engine cannot do it"
    assert "no LoRA poet@1 is loaded" in operate(engine, "unload_lora", "poet@1")
    load(engine, "poet@1")
    assert "loaded already" in operate(engine, "load_lora", "poet@1")
    assert operate(engine, "load_lora", "poet@2") == ""


def test_a_lora_is_not_unloaded_while_an_attempt_uses_it() -> None:
    engine = Engine()
    load(engine, "poet@1")
    engine.submit("r", [1, 2, 3], lora="poet@1")
    assert "are running" in operate(engine, "unload_lora", "poet@1")
    engine.run()
    assert engine.parts("r")[-1].finish == "length"
    assert operate(engine, "unload_lora", "poet@1") == ""
    assert "no LoRA poet@1" in operate(engine, "unload_lora", "poet@1")


def test_a_cache_is_cleared_while_an_attempt_runs_on() -> None:
    engine = Engine(capacity_blocks=32)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    undisturbed = Engine(capacity_blocks=32)
    undisturbed.submit("before", prompt, max_tokens=6)
    undisturbed.run()
    engine.submit("before", prompt, max_tokens=6)
    for _ in range(3):
        engine.step()
    assert engine.cached
    assert operate(engine, "clear") == ""
    assert (engine.cached, engine.told[-1].digest, engine.snapshot().blocks) == (set(), 0, [])
    assert engine.told[-1].load.held_blocks == 0
    engine.run()
    assert engine.tokens("before") == undisturbed.tokens("before")
    assert engine.cached


def test_a_clear_that_failed_clears_nothing() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3])
    engine.run()
    cached = set(engine.cached)
    assert operate(engine, "clear", failed="clear: no") == "clear: no"
    assert engine.snapshot().blocks
    assert engine.cached == cached


def test_an_engine_that_sleeps_refuses_all_but_to_wake() -> None:
    engine = Engine()
    assert operate(engine, "wake") == "wake: the engine is awake"
    engine.submit("early", [1, 2, 3])
    assert operate(engine, "sleep") == "sleep: 1 attempts are running"
    engine.run()
    assert operate(engine, "sleep") == ""
    assert (engine.cached, engine.told[-1].digest) == (set(), 0)
    for operation in ("sleep", "clear", "load_lora", "unload_lora"):
        assert operate(engine, operation, "poet@1") == f"{operation}: the engine is asleep"
    engine.submit("asleep", [1, 2, 3])
    engine.run()
    assert not engine.core.busy
    assert [(part.finish, part.error) for part in engine.parts("asleep")] == [("error", "the engine is asleep")]
    assert operate(engine, "wake", failed="wake: no room") == "wake: no room"
    assert operate(engine, "clear") == "clear: the engine is asleep"
    assert operate(engine, "wake") == ""
    engine.submit("awake", [1, 2, 3])
    engine.run()
    assert engine.tokens("awake") == engine.tokens("early")
    assert engine.parts("awake")[0].cached_tokens == 0


def test_an_engine_that_failed_to_fall_asleep_serves_on() -> None:
    engine = Engine()
    engine.submit("before", [1, 2, 3, 4, 5])
    engine.run()
    assert operate(engine, "sleep", failed="sleep: no host memory") == "sleep: no host memory"
    engine.submit("after", [1, 2, 3, 4, 5])
    engine.run()
    assert engine.tokens("after") == engine.tokens("before")
    assert engine.parts("after")[0].cached_tokens > 0


def test_loras_and_none_share_no_blocks() -> None:
    engine = Engine(capacity_blocks=32)
    load(engine, "poet@1")
    load(engine, "poet@2")
    prompt = [1, 2, 3, 4, 5, 6, 7]
    for name, cached in (("first", 0), ("again", 6)):
        for lora in ("", "poet@1", "poet@2"):
            engine.submit(f"{name}-{lora}", prompt, max_tokens=1, lora=lora)
            engine.run()
            assert engine.parts(f"{name}-{lora}")[0].cached_tokens == cached


@pytest.mark.parametrize(
    ("role", "device", "step_s", "block_size", "longest_s"),
    [
        ("aggregated", "cpu", 0.0, 16, 0.25),
        ("aggregated", "cuda", 0.0, 16, 0.1),
        ("aggregated", "cuda", 0.05, 16, 0.05),
        ("prefill", "cpu", 0.0, 16, PREFILL_STEP_S),
        ("decode", "cpu", 0.0, 16, DECODE_STEP_S),
        ("decode", "cpu", 0.0, 512, DECODE_STEP_S),
    ],
)
def test_steps_with_parts_of_prompts_are_short_where_others_wait_for_them(
    role: Literal["aggregated", "prefill", "decode"],
    device: Device,
    step_s: float,
    block_size: int,
    longest_s: float,
) -> None:
    kvbm = KVConnectorConfig(pool="pool")
    engine: EngineName = "native" if device == "cuda" else "simulated"
    settings = WorkerConfig(model="m", engine=engine, role=role, device=device, step_s=step_s, kvbm=kvbm)
    layout = KvLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=block_size)
    facts = Ready(1 << 17, 1000, (), block_size, (1 << 17) // block_size, layout)
    core = EngineCore.of(EngineConfig.of(settings, "m", "w", parent_pid=0), facts)
    core.opening()
    prompt = pack_tokens([7] * 40_000)
    core.handle(Submit("a", 1, "f", prompt, 40_000, Sampling(max_tokens=1), 60.0), 0.0)
    now_s, steps_s = 0.0, []
    while (works := core.begin(now_s)[1]) is not None:
        steps_s.append(sum(work.end - work.start for work in works) / 10_000)  # 10,000 tokens a second
        now_s += steps_s[-1]
        core.finish([Drawn(1) if work.draws else None for work in works], steps_s[-1])
    assert sum(steps_s) == pytest.approx(4.0)
    assert 0.9 * longest_s < max(steps_s) <= longest_s


def test_no_step_has_more_tokens_than_the_setting_says() -> None:
    settings = WorkerConfig(model="m", engine="simulated", step_tokens=48)
    layout = KvLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=16)
    facts = Ready(1 << 12, 1000, (), 16, 256, layout)
    core = EngineCore.of(EngineConfig.of(settings, "m", "w", parent_pid=0), facts)
    core.opening()
    core.handle(Submit("a", 1, "f", pack_tokens([7] * 200), 200, Sampling(max_tokens=1), 60.0), 0.0)
    sizes = list[int]()
    while (works := core.begin(0.0)[1]) is not None:
        sizes.append(sum(work.end - work.start for work in works))
        core.finish([Drawn(1) if work.draws else None for work in works], 1e-6)
    assert max(sizes) == 48
    assert sum(sizes) == 200


def test_a_probe_is_answered_when_it_is_computed_and_counts_for_no_client() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3])
    engine.run()
    cached, computed, output = set(engine.cached), engine.computed, len(engine.parts("r"))
    engine.now_s += 60.0
    assert not engine.core.handle(ProbeDevice(tuple(PROBE)), engine.now_s)
    engine.now_s += 0.5
    engine.run()
    assert engine.probed == [Probed(1.5)], "from the question to the end of its step"
    assert (engine.told[-1].tokens, engine.told[-1].events, engine.told[-1].parts) == (0, [], {})
    assert (engine.cached, engine.computed, len(engine.parts("r"))) == (cached, computed, output)
    assert engine.told[-1].load.held_blocks == 0
    assert not engine.core.busy


def test_a_probe_next_to_short_steps_is_answered_at_once_though_their_report_waits() -> None:
    engine = Engine(step_s=REPORT_INTERVAL_S / 4)
    engine.submit("r", [1, 2, 3], max_tokens=20)
    engine.step()
    reports = len(engine.told)
    engine.core.handle(ProbeDevice(tuple(PROBE)), engine.now_s)
    engine.step()
    assert (len(engine.told), len(engine.probed)) == (reports, 1)
    engine.run()
    undisturbed = Engine(step_s=REPORT_INTERVAL_S / 4)
    undisturbed.submit("r", [1, 2, 3], max_tokens=20)
    undisturbed.run()
    assert engine.tokens("r") == undisturbed.tokens("r")


def test_an_engine_that_sleeps_answers_a_probe_and_one_that_falls_asleep_computes_it_first() -> None:
    engine = Engine()
    engine.core.handle(ProbeDevice(tuple(PROBE)), engine.now_s)
    assert not engine.core.handle(Operate(ticket=7, operation="sleep"), engine.now_s)
    assert engine.core.due_operation() is None
    engine.run()
    assert engine.probed == [Probed(1.0)]
    due = engine.core.due_operation()
    assert due is not None
    for report in engine.core.operated("", engine.now_s):
        if isinstance(report, Stepped):
            engine.take(report)
    assert not engine.core.handle(ProbeDevice(tuple(PROBE)), engine.now_s)
    assert engine.core.take_probed() == Probed(0.0)
    assert engine.core.take_probed() is None
    assert not engine.core.busy


def decoding(block_size: int = 16, waits: int = 0) -> EngineCore:
    """Return a core with two sequences that decode, in a step; their tokens are 9, 10 and so on."""
    limits = SchedulerLimits(
        model="m",
        context_length=200,
        block_size=block_size,
        capacity_blocks=99,
        max_running=2,
        max_waiting=9,
        eos_token_ids=frozenset(),
    )
    core = EngineCore(Scheduler(limits), block_size)
    core.opening()
    for number, tokens in enumerate((3, 5, 4)[: 2 + waits]):
        prompt, sampling = pack_tokens(range(tokens)), Sampling(max_tokens=40, ignore_eos=True)
        core.handle(Submit(str(number), 1, "f", prompt, tokens, sampling, 60.0, number=number), 0.0)
    core.begin(0.0)
    core.finish([Drawn(9), Drawn(9)], 0.5)
    core.begin(0.5)
    return core


def test_steps_that_pass_together_leave_the_engine_as_they_do_one_by_one() -> None:
    together, singly = decoding(), decoding()
    count = together.steady_steps
    assert count == 16 - 5 - 1, "the longer one fills its block in the step after them"
    together.pass_steps([range(10, 10 + count)] * 2, [0.5] * count, 0.5 + 0.5 * count)
    for step in range(count):
        assert singly.steady_steps == count - step
        [report] = singly.finish([Drawn(10 + step)] * 2, 0.5)
        assert not report.event_batch
        singly.begin(1.0 + 0.5 * step)
    assert singly.steady_steps == together.steady_steps == 0
    for core in (together, singly):
        core.finish([Drawn(0)] * 2, 0.25)
        core.begin(20.0)
    reports = [core.finish([Drawn(0)] * 2, 0.5) for core in (together, singly)]
    assert reports[0] == reports[1]
    for core in (together, singly):
        core.validate()


def test_no_steps_are_foreseen_next_to_an_attempt_that_waits() -> None:
    assert decoding().steady_steps > 0
    assert decoding(waits=1).steady_steps == 0


def test_an_answer_is_foreseen_up_to_its_last_token_but_one() -> None:
    assert decoding(block_size=128).steady_steps == 38
