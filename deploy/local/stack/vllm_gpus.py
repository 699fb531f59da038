"""Which GPUs each vLLM worker gets: as many as its parallel sizes need, and none of another worker's. Pure.

CUDA_VISIBLE_DEVICES, or all GPUs      4,5,6,7
2 workers, tensor_parallel_size 2      4,5 │ 6,7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from shared.errors import ConfigError

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
"""The arguments of vLLM whose product is a worker's number of GPUs. Expert parallelism spreads over the same ones."""


def visible_gpus(count: int, chosen: str | None) -> tuple[str, ...]:
    """Return the names of the `count` GPUs that CUDA shows, as CUDA_VISIBLE_DEVICES has them. `chosen` is its value.
    None if it is not set. CUDA ignores all from the first wrong name on."""
    return tuple(map(str, range(count))) if chosen is None else tuple(map(str.strip, chosen.split(",")))[:count]


def parallel_sizes(settings: Sequence[tuple[str, str]], file: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes above 1. `settings` are flags of workers with their values, of which the last one counts; `file`
    holds vLLM's arguments, which they override. Raise ConfigError."""
    given: dict[str, tuple[str, object]] = {}
    for name, value in file.items():
        given[name.replace("-", "_")] = f"--vllm-args: {name}", value
    for flag, text in settings:
        table, _, name = flag.removeprefix("--").partition(".")
        if table == "vllm":
            given[name.replace("-", "_")] = f"--set worker.vllm.{name}", text
    sizes = {name: _size(*given[name]) for name in SIZES if name in given}
    return {name: size for name, size in sizes.items() if size > 1}


def assign_gpus(workers: int | None, sizes: Mapping[str, int], visible: Sequence[str]) -> tuple[str, ...]:
    """Return each worker's CUDA_VISIBLE_DEVICES. `workers` None: two, or one where the GPUs are too few for two. Raise
    ConfigError if there are too few GPUs."""
    each = prod(sizes.values())
    if workers is None:
        workers = 2 if len(visible) >= 2 * each else 1
    if workers * each > len(visible):
        spelled = " * ".join(f"vllm.{name} {size}" for name, size in sizes.items())
        needs = f", {each} each ({spelled})" if sizes else ""
        raise ConfigError(f"--workers {workers} needs {workers * each} GPUs{needs}; CUDA shows {len(visible)}")
    return tuple(",".join(visible[number * each : (number + 1) * each]) for number in range(workers))


def _size(where: str, value: object) -> int:
    try:
        size = int(str(value))
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"{where}: {value!r} is not a whole number above 0")
    return size
