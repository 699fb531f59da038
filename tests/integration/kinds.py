"""On what a test's workers compute, and in which type: one scenario runs on each.

Those of a GPU are skipped if there is none; only the device differs, and where the pool lies: a GPU copies at full
speed only to memory that it can pin.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from services.worker.config import Device, Dtype
from tests.gpu.device import missing

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

SHARED_MEMORY = Path("/dev/shm")


class Kind(NamedTuple):
    device: Device
    dtype: Dtype
    more: tuple[str, ...] = ()
    """Flags of its workers."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of its workers, all of them."""
        if self.device == "cpu":
            return ("--kv-dtype", self.dtype, *self.more)
        return ("--device", "cuda", "--cuda-dtype", self.dtype, *self.more)

    def __str__(self) -> str:
        return "-".join((self.device, self.dtype, *(word.lstrip("-") for word in self.more)))

    @contextmanager
    def pool(self, folder: Path) -> Iterator[Path]:
        """Where a machine's pool may be."""
        if self.device == "cpu":
            yield folder / "pool"
            return
        with tempfile.TemporaryDirectory(prefix="headrace-test-", dir=SHARED_MEMORY) as memory:
            yield Path(memory) / "pool"


CPU = (Kind("cpu", "float32"), Kind("cpu", "bfloat16"))
EAGER = Kind("cuda", "float32", ("--cuda-graphs", "false"))
GPU = (Kind("cuda", "float32"), EAGER)
"""Those that compute in float32 answer what a CPU does."""
GPU_16_BITS = (Kind("cuda", "float16"), Kind("cuda", "bfloat16"))


def params(kinds: Iterable[Kind], *, cpu_stands_in: bool = False) -> list[ParameterSet]:
    """For `pytest.mark.parametrize` and fixtures. With `cpu_stands_in` the kinds of a CPU only stand in for a GPU, and
    are skipped if there is one: what they test, every machine without one tests."""
    return [pytest.param(kind, marks=_marks(kind, cpu_stands_in), id=str(kind)) for kind in kinds]


def _marks(kind: Kind, cpu_stands_in: bool) -> list[pytest.MarkDecorator]:
    reason = missing()
    if kind.device == "cpu":
        return [pytest.mark.skipif(not reason, reason="a GPU runs this test")] if cpu_stands_in else []
    return [pytest.mark.gpu, pytest.mark.skipif(bool(reason), reason=reason)]
