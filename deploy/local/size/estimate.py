"""`headrace estimate`: what a model takes of GPUs, and how fast it is there, from its config.json alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from deploy.local.size.aiconfigurator import decode_s
from deploy.local.size.files import check_parent
from deploy.local.size.flags import check_ranges, whole_numbers
from deploy.local.size.profile_file import Profile, Subject, encode_profile
from deploy.local.size.roofline import ENGINES, GB, GpuFacts, GpuSplit, Roofline, check_split
from deploy.local.size.shape import shape_of
from deploy.local.stack.model import NAME as BUNDLED
from deploy.local.stack.model_source import fetch_named, find_source
from deploy.local.table import table
from deploy.local.terminal import Terminal
from deploy.local.usage import EstimateFlags
from shared.errors import ConfigError, ModelError
from shared.model_file import CONFIG, CONFIG_LIMIT_BYTES, decode_model_json, read_model_file
from shared.model_files.config_json import ConfigJson

GPUS = Path(__file__).with_name("gpus.json")
BUNDLED_CONFIG = Path(__file__).parent / "default_model" / CONFIG
"""The sizes of the model that `up` serves when it is given none, whose GGUF file may not be here."""
BITS = {"bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.5}
"""Bits of a weight; those of 4 bits have half a bit of scales."""
BATCHES = (1, 8, 32, 128)
PROFILE_LONGEST, PROFILE_MOST = 8192, 256
"""The tokens of the longest prompt of an estimated profile, at least, and its answers at once, at most."""
LIMIT = 1 << 24
"""Upper limit of the numbers that `estimate` takes."""


class LoadEstimate(Struct, frozen=True):
    """The estimate of one batch."""

    batch: int
    itl_s: float
    """The time a token while all sequences decode."""
    loaded_itl_s: float
    """The time a token in a steady load, whose prompts are computed in between."""
    output_tokens_per_s: float
    """The output of all sequences in that load."""
    watt_hours_a_million_tokens: float
    """The energy of GPUs at their power limit, in that load."""
    binds: str
    aiconfigurator_itl_s: float | None = None
    """What aiconfigurator says of `itl_s`. None if it was not asked."""


class Estimate(Struct, frozen=True):
    """What `estimate` says."""

    model: str
    gpu: str
    gpus: int
    engine: str
    weights_gb: float
    """The weights on each GPU."""
    kv_token_bytes: float
    """The KV of one token on each GPU."""
    kv_tokens: int
    """The tokens for which the GPUs have room together."""
    largest_batch: int
    """The number of sequences of full length for which there is room."""
    prompt: int
    output: int
    cached: float
    ttft_s: float
    """The time to the first token of a lone prompt."""
    loads: list[LoadEstimate]
    assumed: list[str]
    """Where the figures come from."""


class EstimatedModel(Struct, frozen=True):
    """A model whose config.json is on this machine."""

    config: Path
    name: str
    """Its name for clients."""
    word: str
    """What `up --model` takes."""


def find_model(text: str) -> EstimatedModel:
    """Return the model of a directory, a config.json, the name of the bundled model or a name on the hub, whose small
    files are fetched if they are not in the cache. Raise ConfigError and ModelError."""
    path = Path(text)
    if path.suffix == ".gguf":
        raise ConfigError(f"{text}: a GGUF file; `estimate` takes the ORG/NAME or the config.json of its model")
    if path.exists():
        config = path / CONFIG if path.is_dir() else path
        if not config.exists():
            raise ConfigError(f"{text}: this directory has no {CONFIG}, which is all that `estimate` reads")
        folder = config.resolve().parent
        return EstimatedModel(config, folder.name, str(folder))
    if text == BUNDLED:
        return EstimatedModel(BUNDLED_CONFIG, BUNDLED, BUNDLED)
    source, terminal = find_source(text, weights=False, flag="estimate"), Terminal()
    if source.here or source.on_hub is None:
        return EstimatedModel(source.path / CONFIG, source.name, text)
    try:
        found = fetch_named(source.on_hub, lambda _path: None, terminal, weights=False, newest=False)
    except ModelError as wrong:
        raise ModelError(f"{wrong}; {CONFIG} alone is enough: give its path in place of {text}") from None
    return EstimatedModel(found / CONFIG, source.name, text)


def estimate(flags: EstimateFlags) -> int:
    """Print the estimate and return the exit status. Raise ConfigError, and ModelError if a hub's model cannot be
    had."""
    made = estimate_of(flags)
    if flags.out:
        check_parent("--out", flags.out)
        if Path(flags.out).exists():
            raise ConfigError(f"--out {flags.out}: there is such a file, maybe with measured times: give another name")
        Path(flags.out).write_bytes(encode_profile(estimated_profile(flags)))
    print(msgspec.json.format(msgspec.json.encode(made)).decode() if flags.json else _render(made))
    return 0


def estimate_of(flags: EstimateFlags) -> Estimate:
    """Return the estimate for checked flags. Raise ConfigError."""
    _check(flags)
    roofline = _roofline(flags)
    shape, gpu, split = roofline.shape, roofline.gpu, roofline.split
    length = flags.prompt + flags.output
    kv_tokens = roofline.kv_tokens(flags.memory_share, length)
    if shape.context and length > shape.context:
        raise ConfigError(f"--prompt and --output are {length} tokens; the model's context has {shape.context}")
    largest = kv_tokens // length
    if not largest:
        raise ConfigError(f"there is room for {kv_tokens} tokens of KV, fewer than one sequence has: {length}")
    wanted = whole_numbers(flags.batch, "--batch") if flags.batch else [*BATCHES, largest]
    batches = sorted({each for each in wanted if each <= largest})
    if not batches:
        raise ConfigError(f"--batch {flags.batch}: there is room for {largest} sequences of {length} tokens")
    return Estimate(
        model=flags.model,
        gpu=gpu.full_name,
        gpus=split.gpus,
        engine=flags.engine,
        weights_gb=roofline.gpu_weights_bytes / GB,
        kv_token_bytes=roofline.gpu_kv_token_bytes,
        kv_tokens=kv_tokens,
        largest_batch=largest,
        prompt=flags.prompt,
        output=flags.output,
        cached=flags.cached,
        ttft_s=roofline.first_s(flags.prompt, flags.cached),
        loads=[_load(roofline, batch, flags) for batch in batches],
        assumed=_assumed(roofline),
    )


def _roofline(flags: EstimateFlags) -> Roofline:
    gpu = find_gpu(flags.gpu)
    shape = shape_of(*_settings(find_model(flags.model).config))
    split = GpuSplit(flags.tensor_parallel, flags.pipeline_parallel, flags.expert_parallel)
    check_split(shape, split, flags.engine)
    bits = shape.bits if flags.dtype == "auto" else BITS[flags.dtype]
    bits = 16.0 if flags.engine == "native" else bits  # it expands weights of fewer bits when it loads them
    kv_bits = 16.0 if flags.kv_dtype == "auto" else BITS[flags.kv_dtype]
    return Roofline(shape, gpu, split, ENGINES[flags.engine], bits, kv_bits)


def estimated_profile(flags: EstimateFlags) -> Profile:
    """Return a profile with the estimated times of a worker in place of measured ones. Raise ConfigError."""
    roofline, model = _roofline(flags), find_model(flags.model)
    kv_tokens = roofline.kv_tokens(flags.memory_share, flags.prompt + flags.output)
    words = [
        "--engine",
        flags.engine,
        "--model",
        model.word,
        *(["--device", "cuda"] if flags.engine == "native" else []),
    ]
    for name, size in (("tensor", roofline.split.tensor), ("pipeline", roofline.split.pipeline)):
        flag = [f"--{name}-parallel", str(size)] if flags.engine == "native" else []
        words += (flag or ["--set", f"worker.vllm.{name}_parallel_size={size}"]) if size > 1 else []
    longest = 1 << (max(flags.prompt + flags.output, PROFILE_LONGEST) - 1).bit_length()
    most = max(1, min(PROFILE_MOST, kv_tokens // (flags.prompt + flags.output)))
    tokens = [1 << power for power in range(6, longest.bit_length())]
    batches = sorted({*(1 << power for power in range(most.bit_length())), most})
    first_s = roofline.achieved.first_s
    return Profile(
        subject=Subject(model.name, " ".join(words), f"estimated for {roofline.gpu.full_name}", {}, longest, most),
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        complete=True,
        overhead_s=first_s,
        cached_seen=False,
        kv_tokens=kv_tokens,
        prefill=[(x, y, roofline.first_s(x + y, y / (x + y)) - first_s) for x in tokens for y in (0, longest)],
        decode=[(x, y, roofline.decode(x, y).seconds) for x in batches for y in (64, longest)],
    )


def _load(roofline: Roofline, batch: int, flags: EstimateFlags) -> LoadEstimate:
    step = roofline.decode(batch, flags.prompt + flags.output / 2)
    loaded_s = roofline.loaded_s(batch, flags.prompt, flags.output, flags.cached)
    asked = flags.aiconfigurator
    other_s = asked and decode_s(asked, find_model(flags.model).config, roofline, batch, flags.prompt, flags.output)
    watt_hours = 1e6 * roofline.split.gpus * roofline.gpu.watts * loaded_s / batch / 3600
    return LoadEstimate(batch, step.seconds, loaded_s, batch / loaded_s, watt_hours, step.binds, other_s or None)


def _assumed(roofline: Roofline) -> list[str]:
    done = roofline.achieved
    part, arithmetic = done.memory[roofline.weight_bits < 16], done.arithmetic[roofline.weight_bits == 8]
    return [
        f"figures of the GPU: {roofline.gpu.source}",
        f"WH: GPUs at their power limit, {roofline.gpu.watts:g} W each, without the rest of the machine",
        f"{part:.0%} of the memory's rate, {arithmetic:.0%} of the arithmetic rate: {done.source}",
    ]


def _check(flags: EstimateFlags) -> None:
    names = ("prompt", "output", "tensor_parallel", "pipeline_parallel", "expert_parallel")
    check_ranges(flags, dict.fromkeys(names, (1, LIMIT)))
    if not 0 <= flags.cached < 1:
        raise ConfigError("--cached is a share of the prompt: 0 or more, below 1")
    if not 0 < flags.memory_share <= 1:
        raise ConfigError("--memory-share is above 0, and at most 1")


def find_gpu(name: str) -> GpuFacts:
    """Return the figures of a GPU. Raise ConfigError that lists the known ones."""
    known = msgspec.json.decode(GPUS.read_bytes(), type=list[GpuFacts])
    found = next((gpu for gpu in known if gpu.name.lower() == name.lower()), None)
    if found is None:
        names = ", ".join(gpu.name for gpu in known)
        raise ConfigError(f"--gpu {name}: not known; there are {names}" if name else f"name a GPU with --gpu: {names}")
    return found


def _settings(path: Path) -> tuple[dict[str, object], str]:
    """Return the settings of a model's config.json, and its path."""
    try:
        content = read_model_file(path, CONFIG_LIMIT_BYTES)
        file = ConfigJson(path, content, decode_model_json(path, content, dict[str, Any]))
    except ModelError as wrong:
        raise ConfigError(str(wrong)) from None
    settings = dict(file.settings)
    if file.tied is not None:
        settings["tie_word_embeddings"] = file.tied
    return settings, str(file.path)


def _render(made: Estimate) -> str:
    """Return the estimate as text."""
    each = f"{made.gpus} x {made.gpu}" if made.gpus > 1 else made.gpu
    cached = f", {made.cached:.0%} of it cached" if made.cached else ""
    lines = [
        f"{made.model} on {each}, engine {made.engine}",
        f"weights {made.weights_gb:.1f} GB a GPU, KV {made.kv_token_bytes / 1000:.1f} kB a token and GPU",
        f"room for {made.kv_tokens:,} tokens of KV: {made.largest_batch:,} sequences of {made.prompt} + {made.output}",
        f"first token of a lone prompt of {made.prompt} tokens{cached}: {1000 * made.ttft_s:.0f} ms",
        "",
        table(_columns(made), _cells(made)),
        "",
        *(f"note: {text}" for text in made.assumed),
    ]
    return "\n".join(lines)


def _columns(made: Estimate) -> str:
    other = "  AICONFIGURATOR" if made.loads[0].aiconfigurator_itl_s is not None else ""
    return f"BATCH  MS A TOKEN{other}  MS A TOKEN LOADED  TOKENS/S  TOKENS/S A GPU  WH/M TOKENS  BINDS"


def _cells(made: Estimate) -> list[Sequence[object]]:
    return [
        (
            load.batch,
            f"{1000 * load.itl_s:.1f}",
            *(() if load.aiconfigurator_itl_s is None else (f"{1000 * load.aiconfigurator_itl_s:.1f}",)),
            f"{1000 * load.loaded_itl_s:.1f}",
            f"{load.output_tokens_per_s:,.0f}",
            f"{load.output_tokens_per_s / made.gpus:,.0f}",
            f"{load.watt_hours_a_million_tokens:,.0f}",
            load.binds,
        )
        for load in made.loads
    ]
