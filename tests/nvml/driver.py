"""A driver for processes of tests, on machines without a GPU: NVML as a library of C, whose numbers a test sets.

Nothing of ours is replaced: the worker's reader loads this library as it would load NVIDIA's, by its name.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
MISSING = (
    "nvidia-ml-py is not installed"
    if importlib.util.find_spec("pynvml") is None
    else "there is no C compiler"
    if shutil.which("cc") is None
    else ""
)
"""Why this machine cannot make the driver. Empty if it can."""
NUMBERS: Mapping[str, int] = {
    **{"utilization": 73, "memory_used": 60 << 30, "memory_size": 140 << 30, "power": 512_500, "power_limit": 700_000},
    **{"energy": 9_000_500, "temperature": 61, "margin": 26, "throttled": 0, "corrected": 3, "uncorrected": 0},
}
"""What a GPU without troubles says, in NVML's units."""


def bus_id(gpu: int) -> str:
    return f"0000:{gpu:02x}:00.0"


class Driver:
    """A driver with some GPUs, in a directory of its own."""

    def __init__(self, directory: Path, gpus: int = 1) -> None:
        """Compile it. Its GPUs are those with an energy."""
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / "libnvidia-ml.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, SOURCE], check=True)
        self._state = directory / "state"
        self._gpus = {gpu: dict(NUMBERS) for gpu in range(gpus)}
        self._xids: list[tuple[int, int]] = []
        self.environment = {"LD_LIBRARY_PATH": str(directory), "NVML_STATE": str(self._state)}
        """What the environment of processes that have this driver has in addition."""
        self._write()

    def set(self, gpu: int, **numbers: int | None) -> None:
        """Set numbers of a GPU, and `hang` or `lost`; None takes one away."""
        for name, number in numbers.items():
            if number is None:
                self._gpus[gpu].pop(name, None)
            else:
                self._gpus[gpu][name] = number
        self._write()

    def report_xid(self, gpu: int, xid: int) -> None:
        self._xids.append((gpu, xid))
        self._write()

    def _write(self) -> None:
        lines = [f"{gpu} {name} {number}" for gpu, numbers in self._gpus.items() for name, number in numbers.items()]
        lines += [f"{gpu} xid {xid}" for gpu, xid in self._xids]
        new = self._state.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self._state)
