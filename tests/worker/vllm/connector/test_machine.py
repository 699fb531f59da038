"""The connector in an engine of vLLM's shape, step by step: whatever Hypothesis has happen to requests, copies, frames,
engines, the disk and the kvbm, no token is computed from wrong bytes, and nothing is left."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.kvbm.tiers.actions import ReadOutcome
from tests.worker.vllm.connector.socket_drawer import DrawerWorld
from tests.worker.vllm.connector.vllm_shaped import Engine

ENGINES = 2
MOST_LIVING = 4
PROMPTS = [[1 + (place * step // 3) % 2 for place in range(13)] for step in (1, 2, 5)]
TROUBLES = ("long wait", "idle", "copy", "engine", "kvbm", "connection", "look")
picks = st.integers(0, 99)
ANY = st.integers(0, ENGINES - 1)


class ConnectorMachine(RuleBasedStateMachine):
    """Two engines, and a kvbm that comes and goes."""

    @initialize(ranks=st.sampled_from([1, 1, 2]), depth=st.sampled_from([1, 2]), seed=picks, up=st.booleans())
    def start(self, ranks: int, depth: int, seed: int, up: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        directory = self.folder / "pool"
        directory.mkdir(mode=0o700)
        self.world = DrawerWorld(directory, ranks, depth)
        for each in range(ENGINES):
            self.world.start_engine(seed + each)
        if up:
            self.world.settle()
            for prompt in PROMPTS:
                self.world.add(self.engine(0), prompt, 1, "")
                self.world.settle()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.settle()
            self.world.nothing_is_left()
            self.share()
        finally:
            self.world.close()
            shutil.rmtree(self.folder)

    def share(self) -> None:
        """After all of that, one engine loads what the other one computes."""
        one, other = self.world.engines
        for prompt in PROMPTS:
            before = other.loaded_tokens
            self.world.add(one, prompt, 1, "last")
            self.world.settle()
            self.world.add(other, prompt, 1, "last")
            self.world.settle()
            assert other.loaded_tokens > before
        self.world.nothing_is_left()

    def engine(self, which: int) -> Engine:
        return self.world.engines[which]

    # --- what goes on

    @rule(
        which=ANY,
        prompt=st.sampled_from(PROMPTS) | st.lists(st.integers(1, 2), min_size=1, max_size=13),
        most=st.integers(1, 4),
        salt=st.sampled_from(["", "", "s"]),
    )
    def ask(self, which: int, prompt: list[int], most: int, salt: str) -> None:
        if len(self.engine(which).requests) < MOST_LIVING:
            self.world.add(self.engine(which), prompt, most, salt)

    @rule(which=ANY, prompt=st.sampled_from(PROMPTS), times=st.integers(1, 4), copied=st.integers(0, 8))
    def load(self, which: int, prompt: list[int], times: int, copied: int) -> None:
        """An engine asks for what the kvbm may have, and goes on while it is being loaded."""
        self.clear(which)
        self.ask(which, prompt, 1, "")
        for _ in range(times):
            self.world.step(self.engine(which))
            self.world.pass_frames()
        self.copy(which, 0, copied)
        self.world.step(self.engine(which))

    @rule(which=ANY, times=st.integers(1, 4))
    def step(self, which: int, times: int) -> None:
        for _ in range(times):
            self.world.step(self.engine(which))

    @rule(which=ANY, pick=picks, times=st.integers(1, 8))
    def copy(self, which: int, pick: int, times: int) -> None:
        for _ in range(times):
            self.world.copy(self.engine(which), pick)

    @precondition(lambda self: self.world.connections)
    @rule(pick=picks, carried=st.integers(0, 3), delivered=st.integers(0, 3))
    def pass_frames(self, pick: int, carried: int, delivered: int) -> None:
        connection = self.world.connections[pick % len(self.world.connections)]
        for _ in range(carried):
            self.world.carry(connection)
        for _ in range(delivered):
            self.world.deliver(connection)

    @precondition(lambda self: self.world.drawer is not None)
    @rule(which=ANY, times=st.integers(1, 8))
    def go_on(self, which: int, times: int) -> None:
        for _ in range(times):
            self.world.go_on(self.engine(which))

    @rule(span_s=st.sampled_from([0.01, 0.03, 0.1]))
    def wait(self, span_s: float) -> None:
        self.world.now_s += span_s

    @rule(which=ANY)
    def clear(self, which: int) -> None:
        """vLLM's own cache is cleared, where no block is held."""
        if not self.engine(which).pool.held:
            self.engine(which).pool.clear()

    @precondition(lambda self: self.world.drawer is not None)
    @rule(most=st.integers(1, 4), outcome=st.sampled_from(["ok", "ok", "ok", "lost", "failed"]))
    def use_disk(self, most: int, outcome: ReadOutcome) -> None:
        assert self.world.drawer is not None
        self.world.drawer.spill(most)
        if self.world.drawer.reads:
            self.world.drawer.read(outcome, self.world.now_s)

    # --- what goes wrong

    @rule(which=ANY, pick=picks)
    def abort(self, which: int, pick: int) -> None:
        if living := list(self.engine(which).requests):
            self.engine(which).abort(living[pick % len(living)])

    @rule(which=ANY, what=st.sampled_from(TROUBLES), pick=picks)
    def trouble(self, which: int, what: str, pick: int) -> None:
        world, engine = self.world, self.engine(which)
        match what:
            case "long wait":  # past the deadlines of questions, tickets or loads, as where a process is frozen
                world.now_s += (0.6, 1.1, 3.2, 5.0, 31.0)[pick % 5]
            case "idle":
                engine.half.keep_link_now()
            case "copy":
                mover = engine.ranks[pick % world.ranks].steps
                assert mover is not None
                mover.trouble = "the device is lost"
            case "engine":
                world.kill_engine(engine)
                world.start_engine(pick)
            case "kvbm":
                if world.drawer is None:
                    world.open_kvbm()
                else:
                    world.kill_kvbm()
            case "connection":
                world.accept()
                world.drop_ended()
            case "look" if world.drawer is not None:  # at tickets whose time is over, and engines that have died
                world.drawer.look(world.now_s)


ConnectorMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, suppress_health_check=list(HealthCheck)
)
TestConnectorMachine = ConnectorMachine.TestCase
