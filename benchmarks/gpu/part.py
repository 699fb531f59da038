"""The main function of each part of `benchmarks.gpu`: it prints a table or one JSON object."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from benchmarks.gpu.table import goals, lines, unknown
from benchmarks.report import report
from services.worker.engine_main import SWITCH_INTERVAL_S

T = TypeVar("T")
_DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)?")


class PartReport(Struct, frozen=True):
    """The measurements of one part."""

    figures: dict[str, float]
    """The figures, by the names of `table.PROMISES`."""
    rows: Sequence[Any]
    """Structs with a name and their numbers."""
    yardsticks: Mapping[str, Any] = {}
    """The yardsticks of the figures, and other numbers that explain them."""


def main(
    part: str,
    says: str | None,
    measure: Callable[[argparse.Namespace], PartReport],
    flags: Callable[[argparse.ArgumentParser], object] = lambda _parser: None,
) -> int:
    """Measure and print. The exit status is 2 without a GPU. `says` is the module's docstring."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=f"python -m benchmarks.gpu.{part}",
        description=says,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="less of everything, within a minute")
    flags(parser)
    chosen = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in an engine that exchanges blocks
    machine = {} if getattr(chosen, "device", "cuda") == "cpu" else gpu_or_exit()
    measured = measure(chosen)
    assert not unknown(part, measured.figures), unknown(part, measured.figures)
    if chosen.json:
        told = report(f"gpu.{part}", sys.argv[1:], goals(part, measured.figures), measured.rows)
        told |= {"figures": measured.figures, "yardsticks": measured.yardsticks, "gpu": machine}
        print(msgspec.json.encode(told).decode())
        return 0
    for row in measured.rows:
        print("  ".join(f"{name} {_said(value)}" for name, value in msgspec.to_builtins(row).items() if value != ""))
    for name, value in measured.yardsticks.items():
        print(f"{name}: {_said(value)}")
    print("\n".join(lines((part,), {part: measured.figures})))
    return 0


def attempted(what: str, measured: Callable[[], list[T]]) -> list[T]:
    """Return the rows of `measured`; none if it fails, which is printed, so that the rows of others are not lost."""
    try:
        return measured()
    except Exception as wrong:  # noqa: BLE001 - whatever it is
        print(f"{what} failed: {type(wrong).__name__}: {wrong}", file=sys.stderr, flush=True)
        return []


def gpu_or_exit() -> dict[str, str]:
    """Return the GPU's name and the versions of its driver and CuPy. Raises SystemExit(2) without a GPU."""
    try:
        import cupy  # pyright: ignore[reportMissingImports]
    except ImportError as wrong:
        raise _no_gpu(f"CuPy cannot be imported ({wrong})") from None
    runtime = cupy.cuda.runtime
    try:
        device = runtime.getDeviceProperties(0)
        version = runtime.driverGetVersion()
    except runtime.CUDARuntimeError as wrong:
        raise _no_gpu(f"none answers ({wrong})") from None
    module = _VERSION.search(_DRIVER.read_text()) if _DRIVER.exists() else None
    return {
        "name": device["name"].decode(),
        "driver": f"{module[0] if module else 'unknown'}, CUDA {version // 1000}.{version % 1000 // 10}",
        "cupy": cupy.__version__,
    }


def _no_gpu(why: str) -> SystemExit:
    print(f"error: this needs an NVIDIA GPU: {why}", file=sys.stderr)
    return SystemExit(2)


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
