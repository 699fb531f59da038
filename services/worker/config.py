"""The worker's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.config import DiscoveryConfig, NatsConfig, ObserveConfig

EngineName = Literal["native", "simulated", "echo"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "float16", "bfloat16"]
CopyPath = Literal["auto", "rows", "batch", "staged", "zero_copy"]
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
    verify: bool = False
    """For finding faults: compares each block that was loaded with the pool's, and counts and computes what differs.
    Costs as much as loading; on a GPU fifteen times as much."""
    checksums: bool = False
    """Blocks go to kvbm with a checksum, made by this worker, and it compares that of each block that it loads: one
    that is damaged in memory is computed, and leaves kvbm. Costs a core some 0.06 s a GiB."""


class CudaConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The native engine on an NVIDIA GPU; read where `device` is cuda."""

    gpu: Natural = 0
    """Of those that CUDA shows; CUDA_VISIBLE_DEVICES chooses before."""
    dtype: Dtype = "bfloat16"
    """What weights, activations and KV are stored and multiplied in; sums are float32."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Of the GPU's memory, what this worker takes at most where no capacity is set; workers on one GPU share it."""
    graphs: bool = True
    """Decode steps are CUDA graphs, captured at start."""
    graph_lower_bound: Positive = 1
    """Fewer sequences run eagerly, rather than padded to a captured batch."""
    graph_upper_bound: Positive = 256
    """The largest batch that is captured, unless `max_running` is less; larger ones run eagerly."""
    busy_wait_events: bool = True
    """Wait for a step by spinning on a core, instead of sleeping: on an H200 0.2 to 0.4 ms a step sooner, 3 to 6 % of
    an 8B model's. Off where cores are scarcer than that."""
    output_copy_stream: bool = False
    """Sampled tokens leave the GPU as a copy on a stream of their own, instead of being written by the kernel that
    draws them: on an H200 no sooner, within 1 %, and later where blocks are on their way to the pool."""
    copy_path: CopyPath = "auto"
    """How blocks go between GPU and pool; auto: as measured at start."""

    def __post_init__(self) -> None:
        """Raises ValueError where settings contradict each other."""
        if self.graph_lower_bound > self.graph_upper_bound:
            raise ValueError(
                f"graph_lower_bound is {self.graph_lower_bound}, above graph_upper_bound, {self.graph_upper_bound};"
                " graphs = false captures none"
            )


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
    capacity_bytes: Natural = 0
    """0: 512 MiB; on a GPU what `cuda.memory_share` leaves beside the weights."""
    kv_dtype: Dtype | Literal["auto"] = "auto"
    """How the native engine keeps KV: float32 or, in half of the memory and of kvbm's pool, bfloat16. auto: float32;
    on a GPU `cuda.dtype`, and nothing else."""
    device: Device = "cpu"
    """Where the native engine computes."""
    cuda: CudaConfig = CudaConfig()
    max_running: Annotated[int, Meta(ge=1, le=65_535)] = 64
    """Sequences a step computes at most; no GPU takes more blocks of threads in one direction."""
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

    def __post_init__(self) -> None:
        """Raises ValueError where settings contradict each other."""
        if self.device == "cuda" and self.engine != "native":
            raise ValueError(f"device is cuda; the {self.engine} engine computes nothing")
        if self.device == "cuda" and self.kv_dtype not in ("auto", self.cuda.dtype):
            raise ValueError(f"kv_dtype is {self.kv_dtype}; on a GPU KV is kept in cuda.dtype, {self.cuda.dtype}")
        if self.device == "cpu" and self.kv_dtype == "float16":
            raise ValueError("kv_dtype is float16; on a CPU there are float32 and bfloat16")

    @property
    def kept_dtype(self) -> Dtype:
        """Of KV."""
        if self.kv_dtype != "auto":
            return self.kv_dtype
        return self.cuda.dtype if self.device == "cuda" else "float32"

    @property
    def shown_device(self) -> str:
        """Where the engine computes, as the model card has it; empty where it computes nothing."""
        if self.engine != "native":
            return ""
        return f"cuda:{self.cuda.gpu}" if self.device == "cuda" else "cpu"


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
    kv_dtype: Dtype
    device: Device
    cuda: CudaConfig
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
            kv_dtype=config.kept_dtype,
            device=config.device,
            cuda=config.cuda,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            simulated=config.simulated,
            kvbm=config.kvbm,
            threads=config.threads,
            parent_pid=parent_pid,
        )
