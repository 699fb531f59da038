"""Counts the GPUs that the workers of one `up` would see, and shares them out among vLLM workers.

It asks NVIDIA's driver, which needs neither CuPy nor CUDA's programs and follows CUDA_VISIBLE_DEVICES. It asks in a
process of its own, because a process that has asked the driver keeps the devices open.

CUDA_VISIBLE_DEVICES, or all GPUs      4,5,6,7
2 workers, tensor_parallel_size 2      4,5 │ 6,7
5 workers that share (OWN_PART)        4 │ 5 │ 6 │ 7 │ 4
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shared.config import environment
from shared.errors import ConfigError
from shared.installation import install_command

DRIVER = "libcuda.so.1"
MIN_CUDA = 13000
"""Version in the driver's notation: CUDA 13.0, which driver release 580 has."""
LIMIT_S = 60.0
"""Limit of the question. Without a persistence daemon the driver may take seconds for each GPU."""
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
"""The arguments of vLLM whose product is a worker's number of GPUs. Expert parallelism spreads over the same ones."""
OWN_PART = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
"""The arguments of vLLM with which workers can share a GPU: its KV, which it otherwise measures while no other worker
may take memory, and the share of the GPU that must be free when it starts, otherwise nearly all."""


def count_visible() -> int:
    """Return the number of visible GPUs that the native engine can use, at least 1. Raise ConfigError if there is none,
    or no CuPy."""
    number = ask_driver("--device cuda", MIN_CUDA)
    require_cupy()
    return number


def ask_driver(asker: str, least_cuda: int) -> int:
    """Return the number of visible GPUs, at least 1. `asker` is the flag that needs them, `least_cuda` the least
    version that the driver must support. Raise ConfigError."""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.local.stack.gpus", str(least_cuda)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{asker}: the NVIDIA driver did not answer within {LIMIT_S:g} s") from None
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines() or [f"asking the NVIDIA driver ended with status {asked.returncode}"]
        raise ConfigError(f"{asker}: {said[-1]}")
    return int(asked.stdout)


def require_cupy() -> None:
    """Raise ConfigError if CuPy is not installed."""
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(f"--device cuda needs CuPy, which is not installed: {install_command('gpu')} (0.6 GB)")


def count_of_driver(driver: Any, least_cuda: int = MIN_CUDA) -> int:
    """Return how many GPUs a loaded `libcuda` shows. Raise ConfigError if none, or if the driver is too old."""
    number, version = ctypes.c_int(), ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    if status:
        spelled = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(spelled))
        said = (spelled.value or b"no further message").decode(errors="replace")
        raise ConfigError(f"the NVIDIA driver shows no GPU: {said} (status {status}){_chosen()}")
    if number.value == 0:
        raise ConfigError(f"the NVIDIA driver shows no GPU{_chosen()}")
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < least_cuda:
        found = f"{version.value // 1000}.{version.value % 1000 // 10}"
        raise ConfigError(f"the NVIDIA driver supports CUDA {found}; CUDA 13.0 is needed: driver release 580")
    return number.value


def _chosen() -> str:
    chosen = environment().get("CUDA_VISIBLE_DEVICES")
    return "" if chosen is None else f"; CUDA_VISIBLE_DEVICES is {chosen!r}"


def main(least_cuda: int) -> int:
    """Print the number of GPUs to stdout; or the reason why there is none to stderr, with status 1."""
    try:
        print(count_of_driver(ctypes.CDLL(DRIVER), least_cuda))
    except OSError as wrong:
        print(f"there is no NVIDIA driver here ({wrong})", file=sys.stderr)
    except ConfigError as wrong:
        print(wrong, file=sys.stderr)
    else:
        return 0
    return 1


def visible_gpus(count: int, chosen: str | None) -> tuple[str, ...]:
    """Return the names of the `count` GPUs that CUDA shows, as CUDA_VISIBLE_DEVICES has them. `chosen` is its value.
    None if it is not set. CUDA ignores all from the first wrong name on."""
    return tuple(map(str, range(count))) if chosen is None else tuple(map(str.strip, chosen.split(",")))[:count]


def parallel_sizes(settings: Sequence[tuple[str, str]], file: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes above 1. `settings` and `file` are those of `vllm_arguments`. Raise ConfigError."""
    given = vllm_arguments(settings, file)
    sizes = {name: _size(*given[name]) for name in SIZES if name in given}
    return {name: size for name, size in sizes.items() if size > 1}


def vllm_arguments(settings: Sequence[tuple[str, str]], file: Mapping[str, object]) -> dict[str, tuple[str, object]]:
    """Return vLLM's arguments: where each was given, and its value. `settings` are flags of workers with their values,
    of which the last one counts; `file` holds arguments that they override. *Pure.*"""
    given: dict[str, tuple[str, object]] = {}
    for name, value in file.items():
        given[name.replace("-", "_")] = f"--vllm-args: {name}", value
    for flag, text in settings:
        table, _, name = flag.removeprefix("--").partition(".")
        if table == "vllm":
            given[name.replace("-", "_")] = f"--set worker.vllm.{name}", text
    return given


def assign_gpus(
    workers: int | None, sizes: Mapping[str, int], visible: Sequence[str], *, shared: bool = False
) -> tuple[str, ...]:
    """Return each worker's CUDA_VISIBLE_DEVICES: as many GPUs as its parallel sizes need, and none of another worker's.
    With `tensor_parallel_size` 2, two workers get 4,5 and 6,7 of the GPUs 4,5,6,7. `workers` None: two, or one
    where the GPUs are too few for two. With `shared` workers share GPUs if these are too few for all of them. Raise
    ConfigError if there are too few GPUs."""
    each = prod(sizes.values())
    if workers is None:
        workers = 2 if len(visible) >= 2 * each else 1
    groups = len(visible) // each
    if workers > groups and not (shared and groups):
        spelled = " * ".join(f"vllm.{name} {size}" for name, size in sizes.items())
        needs = f", {each} each ({spelled})" if sizes else ""
        both = " and worker.vllm.".join(sorted(OWN_PART))
        remedy = f"; with worker.vllm.{both}, each for one worker, they share GPUs" if groups else ""
        raise ConfigError(f"--workers {workers} needs {workers * each} GPUs{needs}; CUDA shows {len(visible)}{remedy}")
    firsts = (number % groups * each for number in range(workers))
    return tuple(",".join(visible[first : first + each]) for first in firsts)


def _size(where: str, value: object) -> int:
    try:
        size = int(str(value))
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"{where}: {value!r} is not a whole number above 0")
    return size


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
