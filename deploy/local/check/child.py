"""Runs a probe of this machine in a process of its own, which can be given up if it hangs.

python -m deploy.local.check.child LOCAL_PROBE      prints one measurement; both are JSON
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from deploy.local.check.measurements import DiskMeasured, GpusMeasured, MemoryMeasured, Unmeasured
from shared.errors import MALFORMED

GRACE_S = 0.5
"""How long a killed process may take to end before it is left to itself, in seconds."""


Part = Literal["memory", "disk", "gpus"]
LIMITS_S: dict[Part, float] = {"memory": 4.0, "disk": 9.0, "gpus": 20.0}


class LocalProbe(Struct, frozen=True):
    """A question about this machine, with the time limit of its process in seconds."""

    part: Part
    directory: str
    limit_s: float


Measured = MemoryMeasured | DiskMeasured | GpusMeasured | Unmeasured
_PROBE = msgspec.json.Decoder(LocalProbe)
_MEASURED: msgspec.json.Decoder[Measured] = msgspec.json.Decoder(Measured)


def ask(part: Part, directory: Path, limit_s: float | None = None) -> Measured:
    """Return what a process of its own measured, within the part's limit."""
    probe = LocalProbe(part, str(directory), LIMITS_S[part] if limit_s is None else limit_s)
    command = [sys.executable, "-P", "-m", "deploy.local.check.child", msgspec.json.encode(probe).decode()]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=probe.limit_s)
    except subprocess.TimeoutExpired:
        return Unmeasured(f"no answer within {probe.limit_s:g} s: the device or its driver hangs", wanted=True)
    finally:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    try:
        return _MEASURED.decode(out)
    except MALFORMED:
        said = err.decode(errors="replace").strip().splitlines() or [f"the probe ended with status {child.returncode}"]
        return Unmeasured(said[-1], wanted=True)


def main(words: list[str]) -> None:
    """Print what the probe in `words` measures. The process ends at the latest with the probe's limit."""
    probe = _PROBE.decode(words[0])
    signal.alarm(int(probe.limit_s) + 1)  # should the parent be killed meanwhile
    from deploy.local.check import disk, gpu, memory

    measure: dict[str, Callable[[Path], Measured]] = {
        "memory": memory.measure,
        "disk": disk.measure,
        "gpus": gpu.measure,
    }
    measured = measure[probe.part](Path(probe.directory))
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
