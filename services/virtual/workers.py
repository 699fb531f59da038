"""A worker of a fleet in virtual time: the engine as it makes itself from a worker's settings, and what its shell says.

Real: `EngineCore.of` with the settings of a worker and its role, the KV connector, the simulated engine's copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from services.virtual.loads import VOCABULARY
from services.virtual.machine import SimulatedMachine, StepTime
from services.virtual.steady import FIRST_AHEAD, SteadySteps
from services.virtual.store import KVBM, BlockStore, FleetClock, PoolPlace
from services.worker.config import EngineConfig, KVConnectorConfig, WorkerConfig
from services.worker.contracts.messages import EngineOrder, Ready, Stepped
from services.worker.contracts.runner import Drawn, Work
from services.worker.engine.core import EngineCore
from services.worker.simulated.mover import SimulatedMover
from shared.hashing import self_test
from shared.messages.cards import KvLayout, ModelCard, Role
from shared.messages.load import KvState, LoadReport

MODEL = "model"
WEIGHTS = "weights"
LONGEST_STEP_S = 0.25
MAX_RUNNING = 64
COPY_BYTES_PER_S = 50e9
"""The rate of copies between a device and the block store's memory, in each direction."""
UNBOUNDED = 1 << 40


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One engine, and what its shell knows about it."""

    name: str
    core: EngineCore
    machine: SimulatedMachine
    step_s: StepTime
    last: Stepped
    attempts: dict[tuple[str, int], None] = field(default_factory=dict)
    """The attempts that wait or run here, in order."""
    arrived: list[EngineOrder] = field(default_factory=list)
    """Orders that came during a step."""
    stepping: bool = False
    steady: SteadySteps | None = None
    """Steps under way that the engine has not ended, though they may have ended by now."""
    ahead: int = FIRST_AHEAD
    """How many such steps are computed at once at most. It halves when a command cuts them off. Otherwise it grows by
    their number when they have passed."""
    wakes_s: float = inf
    """When the engine wakes up by itself."""
    gone: bool = False

    def report(self, capacity_blocks: int) -> LoadReport:
        """Return a load report like a shell's: as of the engine's last step, with the current attempts."""
        load = self.last.load
        return LoadReport(
            instance=self.name,
            epoch=0,
            progress=self.last.progress,
            waiting=load.waiting,
            running=load.running,
            waiting_tokens=load.waiting_tokens,
            total_blocks=capacity_blocks,
            held_blocks=load.held_blocks,
            cached_blocks=load.cached_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            step_s=load.step_s,
            kv=[KvState(0, 0, self.last.event_sequence, self.last.digest)],
            attempts=list(self.attempts),
        )


def engine_core(
    name: str,
    role: Role,
    longest_s: float,
    max_running: int,
    block_size: int,
    capacity_blocks: int,
    clock: FleetClock,
    store: BlockStore | None,
    overtaking: float,
) -> EngineCore:
    """Return the engine that a worker with these settings has. `longest_s` is `step_s`; `store` is its kvbm."""
    settings = WorkerConfig(
        model=MODEL,
        engine="simulated",
        role=role,
        step_s=longest_s,
        max_running=max_running,
        max_waiting=UNBOUNDED,
        max_waiting_tokens=UNBOUNDED,
        overtaking=overtaking,
        kvbm=KVConnectorConfig(pool="" if store is None else KVBM),
    )
    config = EngineConfig.of(settings, MODEL, name, parent_pid=0)
    facts = Ready(
        context_length=UNBOUNDED,
        vocab_size=VOCABULARY,
        eos_token_ids=(),
        block_size=block_size,
        capacity_blocks=capacity_blocks,
        kv_layout=kv_layout(block_size),
        weights=WEIGHTS,
    )
    if store is None:
        return EngineCore.of(config, facts)
    mover = SimulatedMover(facts.kv_layout.block_bytes, COPY_BYTES_PER_S, lambda: clock.now_s)
    return EngineCore.of(config, facts, mover, PoolPlace(name, store.table))


def model_card(
    name: str, role: Role, block_size: int, capacity_blocks: int, store: BlockStore | None, max_running: int
) -> ModelCard:
    """Return the card of a worker."""
    return ModelCard(
        model=MODEL,
        instance=name,
        path="",
        tokenizer_digest="",
        hash_self_test=self_test(block_size),
        context_length=1 << 20,
        vocab_size=VOCABULARY,
        role=role,
        block_size=block_size,
        capacity_blocks=capacity_blocks,
        max_running=max_running,
        kv_layout=kv_layout(block_size),
        kvbm="" if store is None else KVBM,
        kvbm_layout="" if store is None else store.layout.digest,
    )


def kv_layout(block_size: int) -> KvLayout:
    """Return the layout of an 8B model's blocks."""
    return KvLayout(dtype="bfloat16", layers=32, kv_heads=8, head_dim=128, block_size=block_size)


_DRAWN = [Drawn(token) for token in range(VOCABULARY)]


def drawn(work: Work) -> Drawn | None:
    """Draw a token, if the step yields one."""
    return _DRAWN[_token(work, work.end)] if work.end == len(work.history) else None


def drawn_ahead(work: Work, count: int) -> Sequence[int]:
    """Return the tokens of `count` steps that each draw one."""
    return [_token(work, end) for end in range(work.end, work.end + count)]


def _token(work: Work, end: int) -> int:
    """Return the token of a step that ends at `end`. The outputs of two sequences differ within three tokens."""
    return work.sequence >> 8 * ((end - work.prompt_tokens) % 3) & 255
