"""The commands of `headrace` and their flags: a Struct for each command, whose docstrings are the text of `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Struct
from msgspec.structs import FieldInfo, fields

from deploy.local.state import DEFAULT_HOME, StateDirectory
from shared.errors import ConfigError
from shared.installation import as_here, version_text

DEFAULT_URL = "http://127.0.0.1:8000/v1"
DEFAULT_MODEL = "default"
GPU_MEMORY_SHARE = 0.9

By = Literal["auto", "tokens", "text"]
"""How requests go to servers that run already."""
Directory = Annotated[Path, "DIR"]
File = Annotated[Path, "FILE"]
Url = Annotated[str, "URL"]
Address = Annotated[str, "HOST:PORT"]
Size = Annotated[str, "SIZE"]
Numbers = Annotated[str, "N,…"]
Pairs = Annotated[list[str], "KEY=VALUE"]
Seconds = Annotated[float, "[SECONDS]"]
Listening = Annotated[str, "[HOST:PORT]"]
WATCH_S = 2.0
OPTIONAL: dict[str | None, Any] = {"[SECONDS]": WATCH_S, "[HOST:PORT]": "127.0.0.1:8770"}
"""Values that may be left out after their flag, by their placeholder: what they are then."""
WORD, WORDS = "WORD", "WORD…"
Word = Annotated[str, WORD]
Words = Annotated[list[str], WORDS]
"""A word after the command, or any number of them; the other fields are flags, with the second part of their type in
place of the value."""


class StateFlags(Struct, frozen=True, kw_only=True):
    """The flags of a command that uses the files of `up`."""

    state: Directory | None = None
    """The directory where `up` keeps its files (.headrace in a checkout, else ~/.local/state/headrace)."""

    @property
    def state_dir(self) -> StateDirectory:
        return StateDirectory((self.state or DEFAULT_HOME).absolute())


class StackFlags(StateFlags, frozen=True, kw_only=True):
    """The flags of a command that runs services on this machine."""

    port: int = 8000
    """The port of the HTTP API on 127.0.0.1."""
    frontends: int | None = None
    """The number of frontends, on one port (2; with one or two cores 1). 0 will do if --nats and --etcd name a fleet
    that has some."""
    routers: int | None = None
    """The number of routers (2; with one or two cores 1). 0 as with --frontends."""
    chat_template: Annotated[str, "FILE|NAME"] = ""
    """The chat template in place of the model's own: a file, or a name in docs/tools.md."""
    policy: str = "kv"
    """The routing policy: kv, round-robin, random, least-loaded, power-of-two or module:attribute."""
    keys: File | None = None
    """The file with API keys, one of which is required of clients (docs/access.md)."""
    tls_cert: File | None = None
    """The certificate, with its chain, of the API, which then has only TLS."""
    tls_key: File | None = None
    """The private key of that certificate."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The log level of all services."""
    nats: Url = ""
    """The URL of a NATS server that runs already; commas separate those of a cluster."""


class UpFlags(StackFlags, frozen=True, kw_only=True):
    """Run everything on this machine, until Ctrl-C."""

    single: bool = False
    """Run one frontend, one router and one worker as one process, with neither NATS nor etcd (docs/single.md)."""
    workers: int | None = None
    """The number of workers (2; with --engine attached or --single 1)."""
    prefill: int | None = None
    """The number of workers that only compute prompts, and hand them over; with --decode, instead of --workers.
    One of the two is enough where --nats and --etcd name a fleet that has the other."""
    decode: int | None = None
    """The number of workers that decode what others hand over."""
    encode: int | None = None
    """The number of further workers that only encode images, for those that answer (docs/encoder_cache.md)."""
    model: str = DEFAULT_MODEL
    """The model's directory, GGUF file, or name ORG/NAME[@REVISION][:FILE.gguf] on the hub (SmolLM2-135M-Instruct,
    fetched once)."""
    model_name: str = ""
    """The name of the model for clients (the file's name)."""
    models: Annotated[str, "MODEL,MODEL,…"] = ""
    """Several models, in place of --model, that take turns on this machine: a request wakes its model, and another one
    goes to sleep for it (docs/model_turns.md)."""
    awake: int | None = None
    """The number of --models that may be awake at once (1)."""
    discovery: Literal["etcd", "file"] = "etcd"
    """Where processes register and find each other."""
    engine: Literal["native", "vllm", "attached", "simulated", "echo", "diffusers"] = "native"
    """What workers run; diffusers makes pictures and videos (docs/pictures.md), attached uses the server at
    worker.attached.url, simulated has the timing of a GPU without one, echo returns the prompt."""
    vllm_args: File | None = None
    """The YAML file with arguments of vLLM, as `vllm serve --config` takes it; --set worker.vllm.NAME=VALUE overrides
    it."""
    simulated: Pairs = []
    """A setting of the simulated engine, such as speed=2 or fixed_s=0.02."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the native engine computes; cuda: workers take the visible GPUs in turn."""
    tensor_parallel: int = 1
    """The number of processes that compute each layer together, for the native engine on a CPU, or each on a GPU
    (docs/tensor_parallel.md)."""
    gpu_memory_share: float | None = None
    """The share of each GPU's memory for all of its workers together (0.9)."""
    cuda: Pairs = []
    """A setting of workers on GPUs, such as dtype=float16 or graphs=false."""
    kvbm_bytes: Size = ""
    """The size of the memory for KV blocks that all workers share: 512M, 2G. 0 means none (a 16th of the machine's
    memory, at most 1G; with GPUs an 8th, at most 32G)."""
    kvbm_disk: Directory | None = None
    """The directory for blocks that do not fit into that memory (none)."""
    kvbm_disk_bytes: Size = ""
    """The size of the blocks in that directory (10G)."""
    weights_bytes: Size = ""
    """The size of the memory in which workers share converted weights, which outlive them: 4G. 0 means that weights are
    converted on the disk (0; docs/memory_service.md)."""
    standby: bool = False
    """Keep a second engine process next to that of each worker, which takes over when it ends (docs/standby.md)."""
    set: Annotated[list[str], "SERVICE.SETTING=VALUE"] = []
    """A setting of all frontends, routers or workers, or of the kvbm: frontend.limits.requests=64,
    worker.max_running=8, …; `.venv/bin/python -m services.frontend --help` lists those of a service."""
    etcd: Address = ""
    """The address of an etcd server that runs already."""
    on: Literal["machine", "ray"] = "machine"
    """Where the processes run; ray: on the nodes of a Ray cluster, which restarts them (docs/ray.md)."""
    ray_address: Address = ""
    """The address of that cluster (that of RAY_ADDRESS, or the one that runs here)."""


class RouteFlags(StackFlags, frozen=True, kw_only=True):
    """Run a fleet in front of vLLM and other servers that run already, until Ctrl-C (docs/route.md)."""

    servers: Words = []
    """The URLs of the servers; a /v1 at their end is left out."""
    file: File | None = None
    """The file with these URLs, one a line, in place of arguments. It is read again when it changes."""
    inference_pool: Annotated[str, "NAMESPACE/NAME"] = ""
    """The InferencePool whose Pods are the servers, in place of URLs (docs/picker.md)."""
    kube_api: Url = ""
    """The URL of the Kubernetes API server (that of the cluster that this Pod is in)."""
    kube_token_file: File | None = None
    """The file with the token for that server (the Pod's, unless --kube-api names another server)."""
    kube_ca_file: File | None = None
    """The authorities of that server's certificate, in PEM (the Pod's, or those of the system)."""
    model: str = ""
    """The model's tokenizer and config.json: a directory, or a name on the hub (what the first server names)."""
    model_name: str = ""
    """The name of the model for clients, and the one that servers must have (that of the first server)."""
    by: By = "auto"
    """How requests go to the servers: as tokens, which vLLM takes; or as text, unchanged; auto: as the first one
    takes."""
    api_key_file: File | None = None
    """The file that contains only the servers' API key (none)."""
    ca_file: File | None = None
    """The authorities of the servers' https certificates, in PEM (those of the system)."""
    client_cert: File | None = None
    """The certificate that is shown to https servers which ask for one, in PEM (none)."""
    client_key: File | None = None
    """The key of --client-cert, in PEM without a passphrase (none)."""
    set: Annotated[list[str], "SERVICE.SETTING=VALUE"] = []
    """A setting of all frontends, routers or workers, such as worker.attached.grammars=true."""
    etcd: Address = ""
    """The address of an etcd server that runs already (discovery is in files)."""
    picker: int | None = None
    """The port on 127.0.0.1 of the endpoint picker, which a gateway asks where requests go"""


class PickerFlags(RouteFlags, frozen=True, kw_only=True):
    """Run `route` with an endpoint picker, for Envoy or a Kubernetes gateway (docs/picker.md)."""

    picker: int | None = 9002


class PullFlags(StateFlags, frozen=True, kw_only=True):
    """Fetch a model from the hub, and print its path (docs/model_files.md)."""

    name: Word
    """The name of the model: ORG/NAME[@REVISION][:FILE.gguf]."""


class AddressFlags(StateFlags, frozen=True, kw_only=True):
    """The flags that say which fleet is meant."""

    nats: Url = ""
    """The NATS server (that of `up`)."""
    etcd: Address = ""
    """The etcd server (that of `up`)."""
    namespace: str = "default"
    """The namespace of the fleet."""


class FleetFlags(AddressFlags, frozen=True, kw_only=True):
    """The flags of a command that shows a fleet."""

    json: bool = False
    """Print one JSON object."""


class OperationFlags(AddressFlags, frozen=True, kw_only=True):
    """The flags of an operation on workers."""

    timeout_s: float = 600.0
    """The seconds to wait for each worker."""


class WorkerFlags(OperationFlags, frozen=True, kw_only=True):
    """The flags of an operation on one worker."""

    instance: Word
    """The id of the worker, or how it begins."""


class SleepFlags(WorkerFlags, frozen=True, kw_only=True):
    """Send a worker to sleep, which frees its engine's memory (docs/workers.md)."""

    level: Annotated[int, "1|2"] = 1
    """The depth: 1 keeps the weights in host memory, 2 drops them."""


class WakeFlags(WorkerFlags, frozen=True, kw_only=True):
    """Wake a worker that sleeps."""


class DrainFlags(WorkerFlags, frozen=True, kw_only=True):
    """Let a worker finish what it computes, and give it nothing new."""


class ResumeFlags(WorkerFlags, frozen=True, kw_only=True):
    """Let a drained worker serve again."""


class ClearFlags(WorkerFlags, frozen=True, kw_only=True):
    """Clear the prefix cache of a worker."""


class LoraFlags(OperationFlags, frozen=True, kw_only=True):
    """The flags that say which workers a LoRA is for."""

    name: Word
    """The name of the LoRA, which is also that of a model for clients."""
    instance: Annotated[list[str], "ID"] = []
    """The id of a worker, or how it begins (all workers of the model)."""
    model: str = ""
    """The name of the model whose workers are meant (the only one)."""


class LoadLoraFlags(LoraFlags, frozen=True, kw_only=True):
    """Load a LoRA into workers (docs/workers.md)."""

    directory: Word
    """The directory of the LoRA, as PEFT writes it and as the workers see it."""


class UnloadLoraFlags(LoraFlags, frozen=True, kw_only=True):
    """Unload a LoRA from the workers that have it."""


class StatusFlags(FleetFlags, frozen=True, kw_only=True):
    """Show which processes are alive, and how busy they are."""

    watch: Seconds | None = None
    """The seconds between two views, until Ctrl-C, with requests and tokens a second (2)."""


class FreeWeightsFlags(StateFlags, frozen=True, kw_only=True):
    """Free shared weights that no engine maps (docs/memory_service.md)."""

    name: Word | None = None
    """The name of the model (all models)."""
    memory: Directory | None = None
    """The directory of the memory service (that of the `up` that runs here)."""


class CheckFlags(FleetFlags, frozen=True, kw_only=True):
    """Measure what this machine, its servers and another machine can do, and say what to set (docs/check.md)."""

    kvbm_pool: Directory | None = None
    """The directory for the block store's memory (/dev/shm)."""
    kvbm_bytes: Size = ""
    """The size of the block store that is planned (that of `up`)."""
    kvbm_disk: Directory | None = None
    """The directory of its disk tier, or one on the same disk (that of --state)."""
    peer: Address = ""
    """The machine to measure the way to, where `headrace check --serve` runs."""
    serve: Listening | None = None
    """The address at which to answer another machine's --peer, until Ctrl-C (127.0.0.1:8770)."""


class TopFlags(AddressFlags, frozen=True, kw_only=True):
    """Show a running fleet live in this terminal (docs/top.md)."""

    every: Annotated[float, "SECONDS"] = WATCH_S
    """The seconds between two views."""


class ExplainFlags(FleetFlags, frozen=True, kw_only=True):
    """Show what became of requests and blocks, and why (docs/explain.md)."""

    request: Word | None = None
    """The `id` of the answer, or its X-Request-Id (the latest requests, one line each); or the word block."""
    key: Word | None = None
    """After the word block: the last 16 hex digits of the block's key, or all 32."""


class LogFlags(AddressFlags, frozen=True, kw_only=True):
    """Change the log level of processes that run (docs/logs.md)."""

    level: Annotated[Literal["debug", "info", "warning", "error"], WORD]
    """The least level that is logged from now on."""
    instance: Word | None = None
    """The id of a process, or how it begins (all processes of the fleet)."""
    for_s: float = 0.0
    """The seconds after which the level is again what it was (0: it stays)."""


class ClientFlags(StateFlags, frozen=True, kw_only=True):
    """The flags of a client of the API."""

    url: str = ""
    """The URL of an OpenAI endpoint (that of `up`, or http://127.0.0.1:8000/v1)."""
    model: str = ""
    """The name of the model (the first one served)."""
    api_key_file: File | None = None
    """The file that contains only the API key (OPENAI_API_KEY of the environment)."""


class ChatFlags(ClientFlags, frozen=True, kw_only=True):
    """Ask one question, or have a conversation (docs/command_line.md)."""

    question: Word | None = None
    """The text of the question (a conversation on a terminal; from a pipe: all that comes)."""
    system: str = ""
    """The system prompt: instructions to the model before the first question (none)."""
    max_tokens: int = 512
    """The limit of the answer in tokens."""
    temperature: float | None = None
    """The sampling temperature; 0 is greedy (the model's own, as the server has it)."""


class BenchFlags(ClientFlags, frozen=True, kw_only=True):
    """Measure loads at an endpoint, or compare fleets that are started for it; see docs/bench.md."""

    up: Words = []
    """plot FILE… shows files of bench, AIPerf and GuideLLM next to each other. After --: the flags of an `up` to start
    and measure, with simulated workers unless --engine names another engine (the API at --url)."""
    compare: Annotated[list[str], "NAME=V,V"] = []
    """A setting in which fleets differ, each started for this bench: policy=round-robin,kv or another flag of `up`,
    worker.max_running=8,32, simulated.speed=1,2, topology=aggregated,store,split,1+3."""
    rounds: int = 3
    """The number of rounds, in each of which all compared fleets get the same requests."""
    one_at_a_time: bool = False
    """Start each fleet for its turn alone, in place of all of them side by side."""
    concurrency: Numbers = ""
    """The numbers of requests in flight; each is one load."""
    rate: Numbers = ""
    """Requests per second, sent at random times, in place of `--concurrency`."""
    requests: int = 0
    """The number of requests of each load (4 x concurrency or 20 s x rate; at least 32)."""
    words: int = 512
    """The number of words of each prompt."""
    shared_words: int = 0
    """The number of words that all prompts begin with."""
    prefix_ratio: Annotated[str, "R,…"] = ""
    """The share of each prompt that is shared, in place of --shared-words; each is one load."""
    prefixes: int = 1
    """The number of different beginnings that are shared; each request has one of them at random."""
    spread: float = 0.0
    """The standard deviation of the lengths of prompts and answers, divided by their mean."""
    scenarios: Annotated[str, "NAME,…"] = "mixed"
    """What is measured of each load: mixed; prefill (answers of one token); decode (prompts that were sent before)."""
    trace: File | None = None
    """The file with requests and their times, in place of drawn ones: Mooncake's JSON lines, Azure's CSV, or a
    frontend's access log as JSON; or a directory of ServeGen's clients."""
    speed: Annotated[str, "S,…"] = "1"
    """How many times as fast the trace's clock runs, each as one load; or one number for the pauses of agents."""
    agentic: Annotated[float, "SCALE"] = 0.0
    """Send sessions of agents, with many turns, pauses for tools and subagents, in place of single requests; 1 has the
    published lengths, 142,000 tokens in, 0.1 a tenth of them."""
    tokens: bool = False
    """Send prompts as token ids to /v1/completions, so that a word is exactly one token."""
    prompts: File | None = None
    """The file with one prompt per line, in place of generated prompts."""
    images: int = 0
    """The number of images of each prompt: noise that the seed makes, no two alike, for models that see."""
    image_size: Annotated[str, "WIDTHxHEIGHT"] = "336x336"
    """The size of these images in pixels."""
    output_tokens: int = 128
    """The number of tokens of each answer."""
    saturate: bool = False
    """Find the highest rate at which all requests are done, targets hold and the queue does not grow, from --rate (1)
    on."""
    ttft_p50: float = 0.0
    """Target of the median time to the first token, in seconds. 0 means none, here and below."""
    ttft_p90: float = 0.0
    """Target of the 90th percentile of the time to the first token, in seconds."""
    ttft_p99: float = 0.0
    """Target of the 99th percentile of the time to the first token, in seconds."""
    itl_p50: float = 0.0
    """Target of the median time between two tokens of an answer, in seconds."""
    itl_p90: float = 0.0
    """Target of the 90th percentile of the time between two tokens, in seconds."""
    itl_p99: float = 0.0
    """Target of the 99th percentile of the time between two tokens, in seconds."""
    gpus: int = 1
    """The GPUs of what is measured."""
    price: float = 0.0
    """The price of a GPU hour."""
    watts_per_gpu: float = 0.0
    """The power of a GPU under load, in watts, for the energy of a million tokens."""
    may_stop: bool = False
    """Allow shorter answers: send only OpenAI's own fields, without `ignore_eos`."""
    warmup: int = 2
    """The number of unmeasured requests before each load."""
    timeout_s: float = 120.0
    """The time limit of each request, in seconds."""
    seed: int = 0
    """The random seed of prompts and times."""
    out: Annotated[str, "PREFIX"] = "bench"
    """The path of the .json and .png files, with or without one of these endings."""
    json: bool = False
    """Print one JSON object in place of the table."""
    driver: Literal["own", "aiperf"] = "own"
    """The load generator."""
    tokenizer: str = ""
    """The tokenizer for aiperf: a directory or a name on the hub."""


class EstimateFlags(Struct, frozen=True, kw_only=True):
    """Say what a model takes of GPUs, and how fast it is there, without a GPU; see docs/sizing.md."""

    model: Word
    """The model's directory, its config.json, or ORG/NAME on the hub, of which only small files are fetched."""
    gpu: Annotated[str, "NAME"] = ""
    """The GPU: H200, H100, …; a wrong name lists them."""
    engine: Literal["vllm", "native"] = "vllm"
    """The engine whose measured fractions of the GPU's rates are taken."""
    tensor_parallel: int = 1
    """The number of GPUs that share each layer."""
    pipeline_parallel: int = 1
    """The number of stages that share the layers."""
    expert_parallel: int = 1
    """The number of GPUs that share the experts: 1, or that of --tensor-parallel."""
    dtype: Literal["auto", "bfloat16", "float16", "fp8", "int8", "int4"] = "auto"
    """The type of the weights; auto is that in config.json."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """The type of the KV cache; auto has 16 bits."""
    prompt: int = 2048
    """The tokens of each prompt."""
    output: int = 256
    """The tokens of each answer."""
    cached: float = 0.0
    """The share of each prompt that is cached."""
    batch: Numbers = ""
    """The numbers of sequences at once (1, 8, 32, 128 and the largest)."""
    memory_share: float = 0.9
    """The share of each GPU's memory for weights and KV."""
    aiconfigurator: File | None = None
    """The program of NVIDIA's aiconfigurator 0.12, in an environment of its own; its times get a column."""
    out: Annotated[str, "FILE"] = ""
    """A profile of the estimated times to write, for `plan` and `autoscale` (none)."""
    json: bool = False
    """Print one JSON object in place of the table."""


class ProfileFlags(ClientFlags, frozen=True, kw_only=True):
    """Measure the steps of an engine, for `plan` and for the simulated engine; see docs/sizing.md."""

    up: Words = []
    """The flags of an `up` with one worker to start and measure, after --: -- --engine vllm --model ORG/NAME
    (the API at --url)."""
    longest: int = 0
    """The tokens of the longest prompt, and of the longest context before it (8192, or what the worker has room
    for)."""
    most: int = 0
    """The most answers at once (32, or as many as the worker has room for)."""
    workers: int = 1
    """The workers of a machine. If they are several, each point is also measured while all of them do the same."""
    limit_s: float = 600.0
    """The seconds after which no further point is begun; the same command goes on."""
    out: Annotated[str, "FILE"] = "profile.json"
    """The file to write, and to go on with."""


class PlanFlags(Struct, frozen=True, kw_only=True):
    """Find the cheapest fleet that meets targets, by simulating it with measured times; see docs/sizing.md."""

    profile: Annotated[list[str], "FILE"] = []
    """The file that `profile` has written (profile.json). Several, such as those of two tensor-parallel sizes, are all
    tried: the cheapest by GPUs is the answer."""
    trace: File | None = None
    """The trace with the requests: Mooncake's JSON lines, Azure's CSV, or a directory of ServeGen's clients (drawn from
    --rate and lengths)."""
    rate: float = 0.0
    """The requests a second; a trace is stretched to it (the trace's own)."""
    requests: int = 500
    """The number of requests, of a trace the first ones."""
    prompt_tokens: int = 2048
    """The mean tokens of prompts that are drawn."""
    output_tokens: int = 256
    """The mean tokens of their answers."""
    spread: float = 0.5
    """The standard deviation of both, divided by the mean."""
    shared_tokens: int = 0
    """The tokens that all prompts that are drawn begin with."""
    seed: int = 0
    """The random seed of requests that are drawn."""
    ttft_p50: float = 0.0
    """Target of the median time to the first token, in seconds. 0 means none, here and below."""
    ttft_p90: float = 0.0
    """Target of the 90th percentile of the time to the first token, in seconds."""
    ttft_p99: float = 0.0
    """Target of the 99th percentile of the time to the first token, in seconds."""
    itl_p50: float = 0.0
    """Target of the median time between two tokens of an answer, in seconds."""
    itl_p90: float = 0.0
    """Target of the 90th percentile of the time between two tokens, in seconds."""
    itl_p99: float = 0.0
    """Target of the 99th percentile of the time between two tokens, in seconds."""
    price: float = 0.0
    """The price of a GPU hour."""
    watts_per_gpu: float = 0.0
    """The power of a GPU under load, in watts, for the energy of a million tokens."""
    gpus_a_worker: Annotated[str, "N,…"] = ""
    """The GPUs of each worker, for each profile in turn (by the vLLM flags in the profile, or 1)."""
    most: int = 16
    """The most workers of a fleet."""
    policies: Annotated[str, "NAME,…"] = "kv"
    """The routing policies to try."""
    max_running: Numbers = ""
    """The limits of sequences of a step to try (the most of the profile)."""
    step_s: Annotated[str, "S,…"] = "0.25,0.05"
    """The lengths of steps with parts of prompts to try, in seconds."""
    store_gb: Annotated[str, "GB,…"] = "0"
    """The sizes of the block store to try; 0 means none."""
    roles: bool = False
    """Try also fleets of workers that only compute prompts and others that only decode; needs a block store."""
    kv_tokens: int = 0
    """The tokens of KV for which a worker has room (the profile's)."""
    kv_token_bytes: int = 131_072
    """The bytes of KV of a token, for the block store."""
    jobs: int = 0
    """The fleets that are simulated at the same time (one for each core)."""
    out: Annotated[str, "FILE"] = "plan.up"
    """The file with the flags of `up` for the answer: up @plan.up. Next to it: a page with all fleets (.html, and .png
    with matplotlib), an overlay of compose (.compose.yaml), values of the chart (.values.yaml)."""
    measured: File | None = None
    """A file of `bench`, whose figures the page shows next to those of the answer."""
    json: bool = False
    """Print one JSON object in place of the table."""


class AutoscaleFlags(AddressFlags, frozen=True, kw_only=True):
    """Keep as many workers of a running fleet as its load needs, until Ctrl-C; see docs/autoscale.md."""

    profile: File = Path("profile.json")
    """The file that `profile` has written for one of these workers (profile.json)."""
    ttft_p90: float = 1.0
    """Target of the time to the first token of nine requests of ten, in seconds."""
    itl: float = 0.05
    """Target of the mean time between two tokens of an answer, in seconds."""
    min: Annotated[str, "N|ROLE=N,…"] = "1"
    """The fewest workers, of each role or by role; 0 lets all go while nothing is asked."""
    max: Annotated[str, "N|ROLE=N,…"] = "8"
    """The most workers, of each role or by role."""
    total: int = 0
    """The most workers of all roles together (0: only --max holds)."""
    schedule: Annotated[list[str], "'HH:MM-HH:MM ROLE=N'"] = []
    """A time of the day, by this machine's clock, with at least N workers."""
    launcher: Literal["up", "compose", "metric"] = "up"
    """What starts and stops workers: the `up` of this machine; docker compose; metric: what reads --metrics."""
    compose_file: Annotated[list[str], "FILE"] = []
    """A file of the Compose project (those that docker compose finds)."""
    metrics: Address = ""
    """The address at which /metrics shows how many workers are wanted."""
    every: float = 5.0
    """The seconds between two looks."""
    start_s: float = 60.0
    """The seconds from an order to a worker that serves."""
    cool_down: float = 300.0
    """The seconds for which fewer workers must have been enough before any is taken away."""
    headroom: float = 1.1
    """The factor by which more requests are planned for than are expected."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""


class HeatFlags(FleetFlags, frozen=True, kw_only=True):
    """Show which prefixes of prompts are asked for often, and where they are cached (docs/autoscale.md)."""

    top: int = 20
    """The number of prefixes, the hottest first."""
    png: Annotated[str, "FILE"] = ""
    """The picture to write (none)."""


class InstallGpuFlags(Struct, frozen=True, kw_only=True):
    """Install what --device cuda needs: CuPy, cuBLAS, a compiler (0.6 GB). Outside a checkout, say how pip does."""


class InstallNixlFlags(Struct, frozen=True, kw_only=True):
    """Install what kvbm's peers.backend nixl needs: NIXL (210 MB). Outside a checkout, say how pip does."""


class InstallVllmFlags(Struct, frozen=True, kw_only=True):
    """Install vLLM for --engine vllm, into an environment of its own (2.4 GB for a CPU)."""

    device: Literal["cpu", "cuda"] | None = None
    """The device to install it for; not given: cuda where an NVIDIA driver is there."""
    version: str | None = None
    """The version to install, of 0.32 or 0.33 (0.32.0)."""


class InstallDiffusersFlags(Struct, frozen=True, kw_only=True):
    """Install diffusers for --engine diffusers, into an environment of its own (1.5 GB for a CPU)."""

    device: Literal["cpu", "cuda"] | None = None
    """The device to install it for; not given: cuda where an NVIDIA driver is there. For cuda, a torch that the
    machine's Python has is used."""


class UnitFlags(Struct, frozen=True, kw_only=True):
    """Print a systemd unit that runs a service from here (docs/operations.md)."""

    service: Annotated[Literal["frontend", "router", "worker", "kvbm"], WORD]
    """The name of the service."""
    settings: Words = []
    """Its settings: NAME=VALUE, such as limits.requests=64 or config=FILE, and no secrets."""
    user: bool = False
    """Write it for `systemctl --user`. This flag comes last."""


class DocsFlags(Struct, frozen=True, kw_only=True):
    """Print a document of Headrace as Markdown, or list them."""

    topic: Words = []
    """The topic, such as gpu, or the path of a document, such as docs/gpu.md; a subject names the documents on it (all
    topics are listed)."""


class VersionFlags(Struct, frozen=True, kw_only=True):
    """Print the version."""


class NewKeyFlags(Struct, frozen=True, kw_only=True):
    """Make a key and print it (docs/access.md)."""

    name: Word
    """The name of the key's owner: a-z, 0-9, - and _."""
    file: File | None = None
    """The keys file that gets the key's line (the line is printed)."""
    out: File | None = None
    """The new file that gets the key, readable for you alone (the key is printed)."""
    requests_per_minute: Annotated[int | None, "N"] = None
    """The limit of the key in requests per minute (none)."""
    tokens_per_minute: Annotated[int | None, "N"] = None
    """The limit of the key in tokens per minute (none)."""
    concurrency: Annotated[int | None, "N"] = None
    """The limit of the key in requests at once (none)."""
    min_priority: Annotated[int | None, "N"] = None
    """The lowest `priority` that requests with the key may ask for (the frontend's)."""
    salt: Annotated[str | None, "own|NAME"] = None
    """The keys that share cached prompts with it: no other (`own`), or those of the same name (all without one)."""


class KeysFileFlags(StateFlags, frozen=True, kw_only=True):
    """The flags of a command that uses a keys file."""

    file: File | None = None
    """The keys file (that of the `up` that runs here)."""


class ListKeysFlags(KeysFileFlags, frozen=True, kw_only=True):
    """Show the names and limits in a keys file."""


class RevokeKeyFlags(KeysFileFlags, frozen=True, kw_only=True):
    """Remove a key from a keys file."""

    name: Word
    """The name of the key's owner."""


class CompletionFlags(Struct, frozen=True, kw_only=True):
    """Print what a shell needs to complete commands and flags: eval "$(./headrace completion bash)"."""

    shell: Annotated[Literal["bash", "zsh"], WORD]
    """The shell that reads it."""


COMMANDS: dict[str, type[Struct]] = {
    "check": CheckFlags,
    "up": UpFlags,
    "route": RouteFlags,
    "picker": PickerFlags,
    "pull": PullFlags,
    "status": StatusFlags,
    "top": TopFlags,
    "explain": ExplainFlags,
    "log": LogFlags,
    "chat": ChatFlags,
    "bench": BenchFlags,
    "estimate": EstimateFlags,
    "profile": ProfileFlags,
    "plan": PlanFlags,
    "autoscale": AutoscaleFlags,
    "heat": HeatFlags,
    "sleep": SleepFlags,
    "wake": WakeFlags,
    "drain": DrainFlags,
    "resume": ResumeFlags,
    "clear": ClearFlags,
    "lora load": LoadLoraFlags,
    "lora unload": UnloadLoraFlags,
    "weights free": FreeWeightsFlags,
    "key new": NewKeyFlags,
    "key list": ListKeysFlags,
    "key revoke": RevokeKeyFlags,
    "install-gpu": InstallGpuFlags,
    "install-nixl": InstallNixlFlags,
    "install-vllm": InstallVllmFlags,
    "install-diffusers": InstallDiffusersFlags,
    "completion": CompletionFlags,
    "unit": UnitFlags,
    "docs": DocsFlags,
    "version": VersionFlags,
}
GROUPS = {
    "key": "Make, list and revoke API keys.",
    "lora": "Load and unload LoRAs.",
    "weights": "Free the memory of weights that workers share.",
}
"""The first words of commands that have a second one."""


VLLM_FLAGS = {"--host": "--set frontend.http.host=ADDRESS", "--api-key": "--keys FILE"}
"""Flags of `vllm serve` that look like others of `up` than those that do the same → the ones that do."""
FROM_FILE = "@"
"""What a word of `up` begins with that names a file of flags."""


class CommandParser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated flags: a flag that is added later would change their meaning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def parse(words: Sequence[str]) -> Struct | None:
    """Return the flags of the command in `words`; without a command, print the commands and return None.

    Wrong usage, `--help` and `--version` end the process. Raise ConfigError for a file of flags that cannot be read.
    """
    if list(words[:1]) == ["up"]:
        _check_files(words[1:])
    explain = not {"-h", "--help"}.isdisjoint(words)
    parser = CommandParser(prog="headrace", description="Serves language models: one API for many workers.")
    parser.add_argument("--version", action="version", version=version_text())
    commands = parser.add_subparsers(metavar="COMMAND")
    groups: dict[str, Any] = {}
    for name, schema in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = commands.add_parser(group, help=GROUPS[group]).add_subparsers(required=True, metavar="VERB")
        _add_command(groups.get(group, commands), last, schema, explain=explain)
    known, more = parser.parse_known_args(words)
    given = vars(known)
    if not given:
        if more:
            parser.error(f"unrecognized arguments: {' '.join(more)}")
        parser.print_help()
        return None
    chosen: type[Struct] = given.pop("schema")
    command: str = given.pop("command")
    if more:
        flag = more[0].partition("=")[0]
        instead = [VLLM_FLAGS[flag]] if flag in VLLM_FLAGS and issubclass(chosen, StackFlags) else []
        near = instead or get_close_matches(more[0], [_flag(field) for field in fields(chosen)], n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; `{command} --help` says what it takes"
        parser.exit(2, f"{command}: error: unrecognized: {' '.join(more)}{meant}\n")
    return chosen(**given)


def _check_files(words: Sequence[str]) -> None:
    """Raise ConfigError for an @FILE that cannot be read. argparse would say no more than the number of the error."""
    for word in words:
        if not word.startswith(FROM_FILE):
            continue
        try:
            Path(word.removeprefix(FROM_FILE)).read_text(encoding="utf-8")
        except (OSError, ValueError) as wrong:
            why = getattr(wrong, "strerror", None) or "not text"
            raise ConfigError(
                f"up {word}: {why}; @FILE names a file with a flag or a value of `up` in each line, such as `plan` "
                "writes; a model is --model DIRECTORY, FILE.gguf or ORG/NAME"
            ) from None


def _add_command(commands: Any, name: str, schema: type[Struct], *, explain: bool) -> None:
    """Add a command. The texts of its flags, which cost time to read, are added only to `explain` them."""
    about = as_here(schema.__doc__ or "")
    files = FROM_FILE if schema is UpFlags else None  # `up @FILE` reads a flag or a value from each line
    command = commands.add_parser(name, help=about, description=about, fromfile_prefix_chars=files)
    command.set_defaults(schema=schema, command=command.prog)
    said: dict[str, str] = {}
    if explain:
        from shared.runtime.usage import field_docstrings

        said = field_docstrings(schema)
    for field in fields(schema):
        kind, placeholder = flag_value(field.type)
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _text(said.get(field.name, ""), field)}
        flag = _flag(field)
        if placeholder == WORDS:
            command.add_argument(field.name, nargs="*", metavar=field.name.upper(), **options)
        elif placeholder == WORD:
            choices = get_args(kind) or None
            command.add_argument(field.name, nargs=None if field.required else "?", choices=choices, **options)
        elif kind is bool:
            command.add_argument(flag, action="store_true", **options)
        elif get_origin(kind) is Literal:
            command.add_argument(flag, choices=get_args(kind), **options)
        elif get_origin(kind) is list:
            command.add_argument(flag, action="append", metavar=placeholder, **options)
        elif placeholder in OPTIONAL:
            metavar = str(placeholder).strip("[]")
            command.add_argument(flag, nargs="?", type=kind, const=OPTIONAL[placeholder], metavar=metavar, **options)
        else:
            command.add_argument(flag, type=kind, metavar=placeholder, **options)


def _flag(field: FieldInfo) -> str:
    return "--" + field.name.replace("_", "-")


def flag_value(kind: Any, placeholder: str | None = None) -> tuple[Any, str | None]:
    """Return the type of a flag's value without None, and the placeholder that it has in the usage."""
    if get_origin(kind) is Annotated:
        return flag_value(*get_args(kind))
    if NoneType in get_args(kind):
        [kind] = [each for each in get_args(kind) if each is not NoneType]
        return flag_value(kind, placeholder)
    return kind, placeholder


def _text(docstring: str, field: FieldInfo) -> str:
    """Return the help of a flag, with its default unless the text has one in parentheses or there is none."""
    text, default = as_here(" ".join(docstring.split())).removesuffix("."), field.default
    shown = isinstance(default, int | float | str) and default is not False and default != "" and text[-1:] != ")"
    return f"{text} ({default})" if shown else text
