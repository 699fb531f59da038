"""The worker's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from shared.config import ServiceConfig
from shared.messages.cards import Role
from shared.subjects import is_id

EngineName = Literal["native", "simulated", "echo", "vllm", "attached", "diffusers"]
_ADDRESS = re.compile(r"([^\s:@/?#\[\]]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):[0-9]{1,5}")
ENGINES_WITH_ROLES = ("native", "simulated", "vllm")
ENGINES_THAT_ENCODE = ("native", "vllm")
NO_IMAGES = "role is encode, but the model takes no images; docs/models.md has those that do"
ENGINES_BY_TURNS = ("native", "simulated", "echo")
ENGINES_WITH_STANDBY = ("native", "simulated", "echo")
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "float16", "bfloat16"]
CopyPath = Literal["auto", "rows", "batch", "staged", "direct"]
Offload = Literal["filled", "evicted", "off"]
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
OVERTAKING = 2.0
LORA_RANK = 64
LORA_BYTES = 512 << 20
MOST_IMAGES = 16
ENCODER_CACHE_BYTES = 256 << 20
Seconds = Annotated[float, Meta(ge=0, le=3600)]
ENGINE_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
)
"""Names of the metrics that dashboards for vLLM show. All that vLLM has would be five times as much text."""
_METRIC_NAME = re.compile(r"vllm:[a-zA-Z0-9_:]*\*?")


class SimulatedConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long the steps of the simulated engine take. `timing.py` has the formula, and the source of its defaults."""

    fixed_s: Seconds = 0.5e-3
    """Fixed seconds of each step."""
    weights_s: Seconds = 3.92e-3
    """Seconds of each step for reading the weights. Each token adds `row_s` to them."""
    row_s: Seconds = 5.1e-6
    """Seconds of each step for each token computed in it, next to `weights_s`. Where the step's tokens times `token_s`
    is more than their sum, that counts instead."""
    token_s: Seconds = 24.4e-6
    """Seconds of a token's arithmetic without attention."""
    pair_s: Seconds = 1.31e-9
    """Seconds of a prefilled token's attention to one token."""
    kv_token_s: Seconds = 28e-9
    """Seconds in which a decode reads one token's KV."""
    speed: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Factor by which everything is faster."""
    table: str = ""
    """Path of a TOML file with measured times, which replace the formula. Empty means the formula."""
    copy_bytes_per_s: Annotated[float, Meta(gt=0)] = 50e9
    """Bytes a second, in each direction, of copies between the device and kvbm's pool."""
    kv_token_bytes: Positive = 131_072
    """Bytes of a token's KV, which copies of blocks move."""
    output_tokens: Natural = 200
    """Tokens after which an answer ends by itself, in the mean: half to one and a half times as many, depending on the
    prompt. 0 if answers end only at their limits."""
    context_length: Natural = 0
    """Tokens of the context. 0 means as many as the model has."""


class SamplingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of requests that do not set them, in place of those in the model's generation_config.json."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Temperature (0 to 2). 0 means the likeliest token."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of probability (above 0, to 1) of the likeliest tokens that are drawn from."""
    top_k: Natural | None = None
    """Number of likeliest tokens that are drawn from. 0 means all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Least probability of a token that is drawn, as a share of the likeliest one's."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    """Factor by which tokens that were there become less likely; 1: none."""


class KVConnectorConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How this worker uses its machine's kvbm. A worker also serves without one: where a kvbm fails or answers late,
    the worker computes the blocks."""

    pool: str = ""
    """Directory of kvbm's pool. Empty if blocks are not exchanged."""
    offload: Offload = "filled"
    """Blocks that kvbm is offered: filled: each as soon as it is full; evicted: only those that will soon be evicted
    from the device; off: none."""
    wait_s: Seconds = 0.0
    """Most seconds that a request waits for blocks that kvbm holds, however long earlier ones took. 0 means as long as
    computing them would take, and not at all if the latest answers took longer."""
    timeout_s: Annotated[float, Meta(gt=0, le=4)] = 2.0
    """Most seconds until each of kvbm's answers. It must be less than the frontends' `frozen_s`, since no step is made
    while all requests wait for an answer."""
    lending: bool = True
    """Whether a decode worker copies blocks of a prompt directly from the device of the prefill worker, where both are
    on one machine and have the native engine. Otherwise, and without this, blocks go through kvbm."""
    embeddings: bool = False
    """Whether embeddings of images are kept in kvbm too, so that each image is encoded once by all workers of the
    machine. They take a part of the pool of their own: raise `pool.arenas` of kvbm to 2, or by one."""
    blocks_in_flight: Positive = 256
    """Most device blocks that copies to the pool hold at once, and never more than a quarter of the device's blocks:
    requests cannot use blocks that copies hold. Copies from the pool have no bound but the device's blocks."""
    verify: bool = False
    """Whether each loaded block is compared with the pool's, to find faults: blocks that differ are counted and
    computed. It costs as much as loading; on a GPU fifteen times as much."""
    checksums: bool = False
    """Whether this worker makes a checksum of each block that it gives to kvbm, and compares that of each block that it
    loads. A block that was damaged in memory is computed, and removed from kvbm. It costs a core some 0.06 s a GiB."""


class WeightsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the native engine has its weights, beyond the model's files."""

    memory: str = ""
    """Directory of the machine's memory service, which keeps weights for all engines that name it: those that are
    converted for a CPU, and those on GPUs. Empty means that they are converted on the disk, and that each engine on a
    GPU has its own. An engine that the service does not serve has them so, too."""
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """Most seconds until the memory service is there, and until each of its answers."""


class CudaConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The native engine on an NVIDIA GPU. These settings are read only where `device` is cuda."""

    gpu: Natural = 0
    """Number of the GPU among those that CUDA shows. CUDA_VISIBLE_DEVICES limits those. The ranks of `tensor_parallel`
    have this GPU and those after it."""
    ranks_share_gpus: bool = False
    """Whether ranks begin again with the first GPU if there are fewer GPUs than ranks. Answers are right, but slow: it
    is for tests."""
    dtype: Dtype = "bfloat16"
    """Type in which weights, activations and KV are stored and multiplied; sums are float32."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Largest share (0 to 1) of the GPU's memory that this worker takes where no capacity is set. Workers on one GPU
    must divide it between them."""
    graphs: bool = True
    """Whether decode steps are CUDA graphs, which are captured at start, and after a wake when a step needs them."""
    graph_lower_bound: Positive = 1
    """Fewest sequences of a step that run as a graph; fewer run eagerly, and are not padded to a captured batch."""
    graph_upper_bound: Positive = 256
    """Most sequences of a captured batch, unless `max_running` is less; larger batches run eagerly."""
    busy_wait_events: bool = True
    """Whether the engine waits for a step by spinning on a core instead of sleeping. On an H200 each step ends 0.2 to
    0.4 ms sooner, 3 to 6 % of an 8B model's. Switch it off where cores are scarce."""
    output_copy_stream: bool = False
    """Whether sampled tokens leave the GPU as a copy on a stream of their own, instead of being written by the kernel
    that draws them. On an H200 that is no faster, within 1 %, and slower while blocks are copied to the pool."""
    hopper_kernels: bool = True
    """Whether a GPU of NVIDIA's Hopper generation (H100, H200) computes the attention of prompts with instructions that
    only this generation has. It is faster; without it the kernels of all other GPUs run, for comparison."""
    copy_path: CopyPath = "auto"
    """Way of copying blocks between GPU and pool: rows, batch, staged, or direct, which ranks alone have; auto: by the
    number of blocks that are copied together and by their shape."""

    def __post_init__(self) -> None:
        """Raise ValueError if settings contradict each other."""
        if self.graph_lower_bound > self.graph_upper_bound:
            raise ValueError(
                f"graph_lower_bound is {self.graph_lower_bound}, above graph_upper_bound, {self.graph_upper_bound};"
                " to capture no graphs, set graphs = false"
            )


class CheckpointConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a worker that sleeps is frozen by a tool such as CRIU, and goes on later."""

    directory: str = ""
    """Directory for the files by which worker and tool talk to each other. A worker that is put to sleep then ends its
    connections, and only these files wake it. Empty if a sleeping worker keeps its connections."""


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an engine that has nothing to do is checked: a device that is lost or hangs looks like an idle one. Native
    engines, vLLM and attached servers are checked."""

    idle_s: Seconds = 60.0
    """Seconds without a request after which the engine is asked for tokens, or one embedding. 0 means never."""
    limit_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    """Seconds that it may take for that; afterwards it is ended, and another is started."""
    prompt: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=1024)] = (1, 1)
    """Token ids of the prompt that it is asked to continue, or to embed."""
    max_tokens: Annotated[int, Meta(ge=1, le=64)] = 2
    """Tokens that vLLM or an attached server is asked for. A native engine draws one, and one for embeddings makes one
    embedding."""

    def fault(self, *, vocab_size: int, context_length: int) -> str:
        """Return why a model cannot be asked this. Empty if it can."""
        if max(self.prompt) >= vocab_size:
            return f"health.prompt: the model's tokens are 0 to {vocab_size - 1}, not {max(self.prompt)}"
        length = len(self.prompt) + self.max_tokens
        if length > context_length:
            return f"health.prompt and health.max_tokens: {length} tokens are more than the context of {context_length}"
        return ""


class AttachedConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server that the attached engine passes requests on to. It runs already, and is not ours."""

    url: str = ""
    """URL of the server, http or https, without the /v1 of its paths."""
    address: str = ""
    """HOST:PORT at which a gateway reaches the server. Empty means that of `url`."""
    ip: str = ""
    """IP address that the worker connects to, if its URL has a name with several addresses. The name still is what its
    certificate must be of. Empty means an address of the URL's host."""
    kind: Literal["vllm", "sglang", "text"] = "vllm"
    """What the server is: vllm or sglang; text: any other with OpenAI's API. Frontends then send requests to it
    themselves, unchanged."""
    model: str = ""
    """Name of the model on the server. Empty means the one that is named as the worker's model is."""
    api_key_file: str = ""
    """Path of a file with the server's API key. Empty if it needs none."""
    ca_file: str = ""
    """Path of a PEM file with the authorities of the server's https certificate. Empty means those of the system."""
    client_cert: str = ""
    """Path of a PEM file with the certificate that is shown to a server which asks for one. Empty if there is none."""
    client_key: str = ""
    """Path of a PEM file with the key of `client_cert`, without a passphrase."""
    events: str = ""
    """ZeroMQ endpoint on which the server publishes its KV events, such as tcp://host:5557. If it is empty, routers
    predict what it caches from their own choices."""
    replay: str = ""
    """ZeroMQ endpoint at which it sends old events again. Empty if what it cached before this worker began is
    unknown."""
    grammars: bool = False
    """Whether the server takes the grammars of frontends: vLLM with the structured output backend guidance does."""
    priorities: bool = False
    """Whether the server schedules by priority: vLLM with the scheduling policy priority does."""
    look_s: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """Seconds between two looks at the server's health and load."""
    limit_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """Seconds within which the server accepts a connection, and answers everything but a prompt."""

    def __post_init__(self) -> None:
        """Raise ValueError if a setting is malformed, or contradicts another."""
        parts = urlsplit(self.url)
        if self.url and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError("url is no http or https URL")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("url has a user or a query; a key belongs in api_key_file")
        if bool(self.client_cert) != bool(self.client_key):
            raise ValueError("client_cert and client_key need each other")
        if self.address and not (_ADDRESS.fullmatch(self.address) and urlsplit(f"//{self.address}").port):
            raise ValueError(f"address is {self.address[:128]}, not HOST:PORT, such as 10.0.0.5:8001 or [fd00::5]:8001")
        if self.ip:
            ip_address(self.ip)
        for name, endpoint in (("events", self.events), ("replay", self.replay)):
            if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
                raise ValueError(f"{name} is {endpoint}, no ZeroMQ endpoint, such as tcp://127.0.0.1:5557")
        if self.replay and not self.events:
            raise ValueError("replay is set without events")
        for name in ("grammars", "priorities"):
            if self.kind != "vllm" and getattr(self, name):
                raise ValueError(f"{name} is set, but kind is {self.kind}, for which it is not built")
        if self.kind == "text" and self.events:
            raise ValueError("events is set, but kind is text: what such a server caches is not known")


MODEL_INDEX = "model_index.json"
"""The file by which a directory is a pipeline of diffusers."""


class DiffusersConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The diffusers engine, which makes pictures and videos. It computes on a GPU if its torch finds one."""

    python: str = ".headrace/diffusers/bin/python"
    """Path of the Python of diffusers' environment, which `headrace install-diffusers` makes."""
    gpu: str = ""
    """GPU that it computes on, as CUDA_VISIBLE_DEVICES names it. Empty means the first that is visible."""
    dtype: Dtype | Literal["auto"] = "auto"
    """Type of weights and activations. auto: float32, or on a GPU bfloat16."""
    most_together: Natural = 0
    """Most pictures that a step computes together; their size, steps and guidance must be the same. 0 means 1 on a CPU,
    and on a GPU `max_running`. With 1, equal seeds give equal bytes whatever else is computed; a batch may round the
    last bit of a few pixels in another way."""
    most_pixels: Annotated[int, Meta(ge=4096, le=1 << 26)] = 2048 * 2048
    """Most pixels of a picture, or of a frame of a video."""
    most_steps: Annotated[int, Meta(ge=1, le=1000)] = 200
    """Most denoising steps of a picture."""
    most_frames: Annotated[int, Meta(ge=1, le=1000)] = 161
    """Most frames of a video."""


class WorkerConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker: one engine, one model."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "connectors": "kvbm.pool alone gives vLLM our connector; others are set by vllm.kv_transfer_config, without it"
    }
    model: str
    """A Hugging Face directory or a GGUF file."""
    model_name: str = ""
    """Name of the model for clients. Empty means the directory's or file's name."""
    chat_template: str = ""
    """Chat template that replaces the model's own: a file, or one of the names in `shared/chat_templates`."""
    sampling: SamplingConfig = SamplingConfig()
    cache: str = ".headrace/models"
    """Directory of converted weights, which the machine's workers share."""
    engine: EngineName = "native"
    role: Role = "aggregated"
    """What the worker does of a request: aggregated: all of it; prefill: prompts, each handed over with its first token
    through the machine's kvbm; decode: it takes such requests over, and computes prompts where that costs less; encode:
    it encodes images for the other workers of the kvbm, and nothing else."""
    block_size: Positive = 16
    """Tokens of a block."""
    capacity_blocks: Natural = 0
    """Blocks of the device tier. 0 means as many as `capacity_bytes` holds, or 4096 if no arithmetic needs the
    bytes."""
    capacity_bytes: Natural = 0
    """Bytes of the device tier. 0 means 512 MiB, or on a GPU what `cuda.memory_share` leaves after the weights."""
    kv_dtype: Dtype | Literal["auto"] = "auto"
    """Type in which the native engine keeps KV: float32 or, in half of the memory and of kvbm's pool, bfloat16. auto:
    float32, or on a GPU `cuda.dtype`, which is the only choice there."""
    device: Device = "cpu"
    """Device on which the native engine computes."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=8)] = 1
    """Processes that compute each layer of the native engine together, on a CPU or each on a GPU of its own: each has a
    part of its heads and of its feed-forward width."""
    cuda: CudaConfig = CudaConfig()
    weights: WeightsConfig = WeightsConfig()
    max_running: Annotated[int, Meta(ge=1, le=65_535)] = 64
    """Most sequences that a step computes. No GPU takes more than 65,535 blocks of threads in one direction."""
    step_s: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Seconds that a step with parts of prompts should take at most. 0 means 0.25, or on a GPU 0.1, and for vLLM no
    bound but its `max_num_batched_tokens`. Other answers of the worker pause for that long. Shorter steps compute fewer
    tokens of prompts a second; a step has room for 16 tokens of one, or a block. Other roles than aggregated have
    shorter steps, but not of vLLM."""
    step_tokens: Annotated[int, Meta(ge=16, le=8192)] = 8192
    """Most tokens that a step computes, however short it would be. vLLM has `max_num_batched_tokens` for it."""
    max_waiting: Positive = 256
    """Most attempts in the queue; if there are more, Generate is refused as overloaded."""
    max_waiting_tokens: Positive = 1 << 20
    """Most uncomputed tokens in the queue; if there are more, Generate is refused as overloaded."""
    overtaking: Annotated[float, Meta(ge=0, le=1000)] = OVERTAKING
    """For how long a prompt lets shorter ones that come after it be computed first, in times of its own computing. What
    is cached is not computed. 0 means first come, first served. vLLM and attached servers have an order of their
    own."""
    simulated: SimulatedConfig = SimulatedConfig()
    kvbm: KVConnectorConfig = KVConnectorConfig()
    lora_rank: Positive = LORA_RANK
    """Highest rank of a LoRA that the native engine loads."""
    lora_bytes: Natural = LORA_BYTES
    """Most bytes of all LoRAs that the native engine has loaded, counted as float32. 0 if it loads none. On a GPU this
    memory is left free by KV."""
    most_images: Natural = MOST_IMAGES
    """Most images of a request, if the model takes images. 0 means that it takes none."""
    encoder_cache_bytes: Natural = ENCODER_CACHE_BYTES
    """Most bytes of images' embeddings that the native engine keeps, for later requests with the same images. The
    newest always stay."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine by the names that AsyncEngineArgs gives them, such as max_num_seqs."""
    vllm_args: str = ""
    """Path of a YAML file with arguments of vLLM, as `vllm serve --config` takes it; the table `vllm` overrides it."""
    vllm_python: str = ".headrace/vllm/bin/python"
    """Path of the Python of vLLM's environment, which `headrace install-vllm` makes."""
    engine_metrics: tuple[str, ...] = ENGINE_METRICS
    """Names of vLLM's own metrics that /metrics shows, too; a `*` at the end stands for any rest. Empty if there is
    none."""
    vllm_gpus: str = ""
    """GPUs that vLLM computes on, as CUDA_VISIBLE_DEVICES names them, separated by commas. Empty means as many as it
    needs of those that are visible."""
    attached: AttachedConfig = AttachedConfig()
    diffusers: DiffusersConfig = DiffusersConfig()
    turns: str = ""
    """Name of the device on which this worker's model takes turns with those of other workers: it starts asleep, and
    `python -m services.worker.turns` for that device wakes it. Empty means that it serves all the time."""
    health: HealthConfig = HealthConfig()
    threads: Natural = 0
    """Threads of the engine's arithmetic. 0 means one a core, or as many as the time that the container's limit allows
    (`docker run --cpus`), or vLLM's own choice on a GPU. If workers share a machine, set cores ÷ workers."""
    stall_s: Annotated[float, Meta(gt=0, le=86400)] = 30.0
    """Seconds after which an engine that makes no step while requests wait is killed and started again. It may already
    happen after half of that time."""
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """Seconds that running attempts may go on after SIGTERM."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    standby: bool = False
    """Whether a second engine process stands by, with all but KV, and takes over when the engine ends. Only the native
    engine, and those that compute nothing, can."""

    def __post_init__(self) -> None:
        """Raise ValueError if settings contradict each other."""
        if self.device == "cuda" and self.engine != "native":
            own = {"vllm": "computes on what vLLM was installed for", "diffusers": "computes on what its torch finds"}
            instead = own.get(self.engine, "computes nothing")
            raise ValueError(f"device is cuda, but the {self.engine} engine {instead}: set device = cpu")
        faults = (self._ranks_fault, self._role_fault, self._connector_fault, self._standby_fault, self._turns_fault)
        for fault in filter(None, (each() for each in faults)):
            raise ValueError(fault)
        if self.engine in ("attached", "diffusers") and self.kvbm.pool:
            raise ValueError(f"kvbm.pool is set, but the {self.engine} engine exchanges no blocks with a kvbm")
        if self.weights.memory and self.engine != "native":
            raise ValueError(
                f"weights.memory is set, but engine is {self.engine}; only the native engine shares weights"
            )
        if self.engine == "attached" and not self.attached.url:
            raise ValueError("engine is attached, but attached.url is empty")
        if self.engine == "attached" and self.attached.kind == "text" and not self.model_name:
            raise ValueError("attached.kind is text, but model_name, the model's name on the server, is empty")
        if self.engine != "attached" and self.attached.url:
            raise ValueError(f"attached.url is set, but engine is {self.engine}")
        for name in self.engine_metrics:
            if not _METRIC_NAME.fullmatch(name):
                raise ValueError(f"engine_metrics: {name[:128]!r} is not vllm: and the name of a metric")
        if self.device == "cuda" and self.kv_dtype not in ("auto", self.cuda.dtype):
            raise ValueError(f"kv_dtype is {self.kv_dtype}; on a GPU KV is kept in cuda.dtype, {self.cuda.dtype}")
        if self.device == "cpu" and self.kv_dtype == "float16":
            raise ValueError("kv_dtype is float16; on a CPU there are float32 and bfloat16")

    @property
    def places(self) -> int:
        """How many sequences the engine computes at once; 0 if another server, or vLLM's own arguments, may say so."""
        own = self.vllm_args or not self.vllm.keys().isdisjoint(("max_num_seqs", "max-num-seqs"))
        return 0 if self.engine == "attached" or (self.engine == "vllm" and own) else self.max_running

    @property
    def shares_blocks(self) -> bool:
        """Whether other engines may copy blocks of this one."""
        return self.role == "prefill" and self.kvbm.lending

    @property
    def reads_shared(self) -> bool:
        """Whether this engine copies blocks of others."""
        return self.role == "decode" and self.kvbm.lending

    def _ranks_fault(self) -> str:
        """Return why the engine cannot be several ranks. Empty if it can, or need not."""
        setting = f"tensor_parallel is {self.tensor_parallel}"
        if self.tensor_parallel == 1:
            return ""
        if self.engine != "native":
            instead = "vllm.tensor_parallel_size" if self.engine == "vllm" else "tensor_parallel = 1"
            return f"{setting}, but engine is {self.engine}; only the native engine has it: set {instead}"
        if self.device == "cuda" and self.role != "aggregated":
            return f"{setting} on GPUs, but role is {self.role}; such a worker does all: set role = aggregated"
        if self.device == "cuda" and self.weights.memory:
            return f"{setting} on GPUs, but weights.memory is set; each rank has its own weights: leave it empty"
        return ""

    def _standby_fault(self) -> str:
        """Return why no engine can stand by. Empty if one can, or need not."""
        setting = "checkpoint.directory" if self.checkpoint.directory else "standby"
        if not (self.standby or self.checkpoint.directory):
            return ""
        if self.engine not in ENGINES_WITH_STANDBY:
            able = ", ".join(ENGINES_WITH_STANDBY)
            return f"{setting} is set, but engine is {self.engine}; only {able} can stand by"
        if self.device == "cuda" and self.checkpoint.directory:
            return f"{setting} is set, but device is cuda; a worker can be frozen on a CPU alone"
        if self.tensor_parallel > 1:
            return (
                f"{setting} is set, but tensor_parallel is {self.tensor_parallel}; an engine of one rank can stand by"
            )
        if self.turns:
            return f"{setting} is set, but the model takes turns (turns = {self.turns!r}), and sleeps meanwhile"
        if self.checkpoint.directory and self.weights.memory:
            return "checkpoint.directory is set, and so is weights.memory, to which an engine keeps a connection"
        return ""

    def _role_fault(self) -> str:
        """Return why the worker cannot have its role. Empty if it can."""
        if self.role == "aggregated":
            return ""
        if self.engine not in ENGINES_WITH_ROLES:
            return f"role is {self.role}, but engine is {self.engine}; only {', '.join(ENGINES_WITH_ROLES)} have roles"
        if not self.kvbm.pool:
            return f"role is {self.role}, but kvbm.pool is empty: blocks are handed over through the machine's kvbm"
        if self.role == "encode":
            return self._encode_fault()
        if self.role == "prefill" and self.kvbm.offload != "filled":
            return (
                f"role is prefill, but kvbm.offload is {self.kvbm.offload}; what is handed over must be stored: filled"
            )
        return ""

    def _encode_fault(self) -> str:
        """Return why the worker cannot encode images for others. Empty if it can."""
        if self.engine not in ENGINES_THAT_ENCODE:
            return f"role is encode, but engine is {self.engine}; only {', '.join(ENGINES_THAT_ENCODE)} encode images"
        if self.tensor_parallel > 1:
            return f"role is encode, but tensor_parallel is {self.tensor_parallel}; an engine of one rank encodes"
        if not self.kvbm.embeddings:
            return "role is encode, but kvbm.embeddings is false: embeddings are handed over through the kvbm"
        return "role is encode, but most_images is 0" if not self.most_images else ""

    def _turns_fault(self) -> str:
        """Return why the worker's model cannot take turns. Empty if it can, or need not."""
        if not self.turns:
            return ""
        if not is_id(self.turns):
            return f"turns: {self.turns!r} must be 1 to 64 letters, digits, - and _"
        if self.engine not in ENGINES_BY_TURNS:
            return f"turns is set, but engine is {self.engine}; {', '.join(ENGINES_BY_TURNS)} take turns"
        if self.role != "aggregated":
            return f"turns is set, but role is {self.role}; a model that takes turns has one worker, which does all"
        if self.tensor_parallel > 1:
            return f"turns is set, but tensor_parallel is {self.tensor_parallel}; an engine of one rank takes turns"
        return ""

    def _connector_fault(self) -> str:
        """Return which settings of vLLM's connector contradict each other. Empty if none do."""
        if self.engine != "vllm" or not self.kvbm.pool:
            return ""
        if self.kvbm.offload == "evicted":
            return "kvbm.offload is evicted, which vLLM does not show; set filled or off"
        if "kv_transfer_config" in self.vllm or "kv-transfer-config" in self.vllm:
            return "vllm.kv_transfer_config is set, and so is kvbm.pool; set one of them"
        if self.kvbm.embeddings and ("ec_transfer_config" in self.vllm or "ec-transfer-config" in self.vllm):
            return "vllm.ec_transfer_config is set, and so is kvbm.embeddings; set one of them"
        return ""

    @property
    def kept_dtype(self) -> Dtype:
        """The type of KV that `kv_dtype` and the device come to."""
        if self.kv_dtype != "auto":
            return self.kv_dtype
        return self.cuda.dtype if self.device == "cuda" else "float32"

    @property
    def shown_device(self) -> str:
        """The device as the model card names it; empty if the engine computes nothing."""
        if self.engine != "native":
            return ""
        return f"cuda:{self.cuda.gpu}" if self.device == "cuda" else "cpu"


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the engine process, which gets them as JSON in its first argument."""

    instance: str
    """The worker's instance id."""
    model_name: str
    worker: WorkerConfig
    """The worker's settings, without those of NATS, discovery and metrics, and without the token of traces: these
    secrets would be in the argument. It has those settings of `observe` that are about logs."""
    parent_pid: int
    """Process id of the shell; the engine does not outlive it."""
    stands_by: bool = False
    """True if it waits for TakeOver before it makes KV and serves."""

    @staticmethod
    def of(
        config: WorkerConfig, model_name: str, instance: str, *, parent_pid: int, stands_by: bool = False
    ) -> EngineConfig:
        """Return the engine's part of a worker's settings."""
        plain = ServiceConfig()
        logs = replace(plain.observe, log_level=config.observe.log_level, log_format=config.observe.log_format)
        trace = replace(config.trace, token="")
        own = replace(config, nats=plain.nats, discovery=plain.discovery, observe=logs, trace=trace)
        return EngineConfig(
            instance=instance, model_name=model_name, worker=own, parent_pid=parent_pid, stands_by=stands_by
        )
