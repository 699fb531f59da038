"""The worker's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.config import DiscoveryConfig, NatsConfig, ObserveConfig

EngineName = Literal["native", "simulated", "echo"]
KvDtype = Literal["float32", "bfloat16"]
Offload = Literal["filled", "evicted", "off"]
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


Seconds = Annotated[float, Meta(ge=0, le=3600)]


class SimulatedConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long the simulated engine takes; `timing.py` has the formula, and where its default numbers come from."""

    fixed_s: Seconds = 0.5e-3
    """Each step."""
    weights_s: Seconds = 3.92e-3
    """Each step, for reading the weights …"""
    row_s: Seconds = 5.1e-6
    """… and a token computed beside; or, where that is more:"""
    token_s: Seconds = 24.4e-6
    """A token's arithmetic but for attention."""
    pair_s: Seconds = 1.31e-9
    """A prefilled token's attention to one token."""
    kv_token_s: Seconds = 28e-9
    """A decode's reading of one token's KV."""
    speed: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Everything takes its time ÷ this."""
    table: str = ""
    """A TOML file with measured times, instead of the formula."""
    copy_bytes_per_s: Annotated[float, Meta(gt=0)] = 50e9
    """How fast blocks are copied between the device and kvbm's pool."""
    kv_token_bytes: Positive = 131_072
    """What there is to copy for a token."""
    output_tokens: Natural = 200
    """An answer ends by itself after this many tokens in the mean (half to one and a half times, by prompt); 0: only
    at its limits."""
    context_length: Natural = 0
    """0: the model's."""


class KvbmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The machine's block store, as this worker uses it. A worker serves without one, too: every failure of it, and
    every answer that comes late, means that blocks are computed."""

    pool: str = ""
    """The directory of kvbm's pool; empty: blocks are not exchanged."""
    offload: Offload = "filled"
    """Which blocks kvbm is offered: each as soon as it is full; only those that will leave the device soon; none."""
    wait_s: Seconds = 0.0
    """How long a request waits at most for blocks that kvbm holds; 0: as long as computing them would take."""
    timeout_s: Annotated[float, Meta(gt=0, le=4)] = 2.0
    """For each of kvbm's answers. Less than frontends' `frozen_s`: where all requests wait for one, no step is made."""
    blocks_in_flight: Positive = 256
    """Device blocks that copies to the pool hold at most, and never more than a quarter of the device's: what copies
    hold is no room for requests. Those that load are bounded by the pool of the device."""


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker: one engine, one model."""

    namespace: str = "default"
    model: str
    """A Hugging Face directory or a GGUF file."""
    model_name: str = ""
    """What clients call it; empty: the directory's or file's name."""
    cache: str = ".headrace/models"
    """Where converted weights are kept, shared by the machine's workers."""
    engine: EngineName = "native"
    block_size: Positive = 16
    """Tokens a block."""
    capacity_blocks: Natural = 0
    """Blocks of the device tier; 0: as many as `capacity_bytes` holds, or 4096 where no arithmetic needs the bytes."""
    capacity_bytes: Positive = 512 << 20
    kv_dtype: KvDtype = "float32"
    """How the native engine keeps KV; bfloat16 takes half of the memory, and of kvbm's pool."""
    max_running: Positive = 64
    """Sequences a step computes at most."""
    max_waiting: Positive = 256
    """Attempts in the queue; beyond, Generate is refused as overloaded."""
    max_waiting_tokens: Positive = 1 << 20
    """Uncomputed tokens in the queue."""
    simulated: SimulatedConfig = SimulatedConfig()
    kvbm: KvbmConfig = KvbmConfig()
    threads: Natural = 0
    """Of the engine's arithmetic; 0: one a core. Workers that share a machine share its cores: set cores ÷ workers."""
    stall_s: Annotated[float, Meta(gt=0, le=86400)] = 30.0
    """An engine that makes no step for half to all of this time while requests wait is killed and started again."""
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """How long running attempts may go on after SIGTERM."""
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    observe: ObserveConfig = ObserveConfig()


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the engine process is started with, as JSON in its first argument."""

    instance: str
    """The worker's instance id."""
    engine: EngineName
    model: str
    model_name: str
    cache: str
    block_size: int
    capacity_blocks: int
    capacity_bytes: int
    kv_dtype: KvDtype
    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    simulated: SimulatedConfig
    kvbm: KvbmConfig
    threads: int
    parent_pid: int
    """The shell; the engine does not outlive it."""

    @staticmethod
    def of(config: WorkerConfig, model_name: str, instance: str, *, parent_pid: int) -> EngineConfig:
        """The engine's part of a worker's settings."""
        return EngineConfig(
            instance=instance,
            engine=config.engine,
            model=config.model,
            model_name=model_name,
            cache=config.cache,
            block_size=config.block_size,
            capacity_blocks=config.capacity_blocks,
            capacity_bytes=config.capacity_bytes,
            kv_dtype=config.kv_dtype,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            simulated=config.simulated,
            kvbm=config.kvbm,
            threads=config.threads,
            parent_pid=parent_pid,
        )
