"""The memory service on a GPU: writers, readers and the service as processes that are killed in each state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu.device import cupy_on_a_device
from tests.worker.memory import test_memory_processes as on_the_host
from tests.worker.memory.memory_process import sum_of
from tests.worker.memory.test_service import shown

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

SIZE = 64 << 20
LIMIT_S = 60.0


class GpuMachine(on_the_host.Machine):
    ENGINE = "tests.gpu.memory_process"
    KEPT = "/dev/nvidia"
    SIZE, SUM = SIZE, sum_of(on_the_host.MODEL, SIZE)
    REFUSAL = "cudaErrorIllegalAddress"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[GpuMachine]:
    with ExitStack() as opened:
        yield GpuMachine(tmp_path / "memory", opened)


test_a_writer_that_is_killed_leaves_nothing_and_the_next_writes = (
    on_the_host.test_a_writer_that_is_killed_leaves_nothing_and_the_next_writes
)
test_a_writer_that_is_killed_alone_leaves_nothing = on_the_host.test_a_writer_that_is_killed_alone_leaves_nothing
test_a_service_that_is_killed_takes_nothing_from_its_readers = (
    on_the_host.test_a_service_that_is_killed_takes_nothing_from_its_readers
)
test_a_service_that_is_killed_while_weights_are_written_refuses_the_commit = (
    on_the_host.test_a_service_that_is_killed_while_weights_are_written_refuses_the_commit
)
test_a_frozen_reader_keeps_its_weights_and_a_frozen_writer_loses_its_turn = (
    on_the_host.test_a_frozen_reader_keeps_its_weights_and_a_frozen_writer_loses_its_turn
)


def free_bytes() -> int:
    cp.cuda.runtime.deviceSynchronize()
    return int(cp.cuda.runtime.memGetInfo()[0])


def until_freed(free: int, *, kept: int) -> None:
    """Wait until all but `kept` bytes of the weights are free again."""
    begun_s = time.monotonic()
    while free - free_bytes() > kept + SIZE // 2:
        assert time.monotonic() - begun_s < LIMIT_S
        time.sleep(0.05)


def test_weights_survive_their_writer_and_a_reader_that_writes_and_are_freed_after_the_last(
    machine: GpuMachine,
) -> None:
    free = free_bytes()
    machine.writer("commit").kill()
    until_freed(free, kept=SIZE)
    assert free - free_bytes() >= SIZE, "the service alone keeps them"
    first, second = machine.reader(), machine.reader()
    assert first.ask("poke") == machine.REFUSAL
    assert int(second.ask("sum")) == machine.SUM
    first.kill()
    assert int(machine.reader().ask("sum")) == int(second.ask("sum")) == machine.SUM
    assert machine.kept_files() == 1
    machine.service.kill()
    assert int(second.ask("sum")) == machine.SUM


def test_memory_is_free_once_the_last_reader_and_the_time_to_keep_it_are_gone(machine: GpuMachine) -> None:
    machine.service.kill()
    machine.start_service("--keep-s", "0.01")
    free = free_bytes()
    machine.writer("commit").kill()
    until_freed(free, kept=0)
    assert shown(machine.directory).rows == ()
