"""How many GPUs the workers of one `up` would see. Asks NVIDIA's driver itself, which needs neither CuPy nor CUDA's
programs, and heeds CUDA_VISIBLE_DEVICES; in a process of its own, as whoever has asked keeps the devices open."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from typing import Any

from shared.config import environment
from shared.errors import ConfigError

DRIVER = "libcuda.so.1"
MIN_CUDA = 13000
"""As the driver says it: 13.0, of release 580."""
LIMIT_S = 60.0
"""Without a persistence daemon a driver may take seconds for each GPU."""


def count_visible() -> int:
    """At least 1. Raises ConfigError, saying what was looked for."""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.local.stack.gpus"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--device cuda: the NVIDIA driver has not answered in {LIMIT_S:g} s") from None
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines() or [f"asking the NVIDIA driver ended with status {asked.returncode}"]
        raise ConfigError(f"--device cuda: {said[-1]}")
    require_cupy()
    return int(asked.stdout)


def require_cupy() -> None:
    """Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(
            "--device cuda needs CuPy, which is not installed: ./headrace install-gpu (0.6 GB),"
            " or in an environment of your own pip install '.[gpu]', from a checkout"
        )


def count_of_driver(driver: Any) -> int:
    """Of the GPUs that a loaded `libcuda` shows. Raises ConfigError."""
    number, version = ctypes.c_int(), ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    if status:
        spelled = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(spelled))
        said = (spelled.value or b"it says no more").decode(errors="replace")
        raise ConfigError(f"the NVIDIA driver shows no GPU: {said} (status {status}){_chosen()}")
    if number.value == 0:
        raise ConfigError(f"the NVIDIA driver shows no GPU{_chosen()}")
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < MIN_CUDA:
        raise ConfigError(f"the NVIDIA driver is one for CUDA {_spell(version.value)}; 13.0 is needed, release 580")
    return number.value


def _chosen() -> str:
    chosen = environment().get("CUDA_VISIBLE_DEVICES")
    return "" if chosen is None else f"; CUDA_VISIBLE_DEVICES is {chosen!r}"


def _spell(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def main() -> int:
    """Their number on stdout, or why there is none on stderr and status 1."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as wrong:
        print(f"there is no NVIDIA driver here ({wrong})", file=sys.stderr)
        return 1
    try:
        print(count_of_driver(driver))
    except ConfigError as wrong:
        print(wrong, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
