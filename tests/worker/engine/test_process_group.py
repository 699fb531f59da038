"""services/worker/engine/process_group.py, with real processes and real shared memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.engine.process_group import kill_group, members
from tests.integration.stack import eventually
from tests.worker.shell import LIMIT_S

PROGRAM = """
import os, time
from multiprocessing.shared_memory import SharedMemory

block = SharedMemory(create=True, size=1 << 20)
if os.fork():
    print(block.name, flush=True)
time.sleep(600)
"""
"""A process with a child of its own and a block of shared memory, for which Python has started a tracker."""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        yield process
        kill_group(process.pid)


def memory_of(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    memory = Path("/dev/shm", holder.stdout.readline().strip())
    assert memory.is_file()
    return memory


def gone(group: int, memory: Path) -> None:
    eventually(lambda: not list(members(group)), limit_s=LIMIT_S, what="no process of the group is left")
    assert not memory.exists()


def test_a_killed_group_leaves_no_process_and_no_shared_memory(holder: subprocess.Popen[str]) -> None:
    memory = memory_of(holder)
    assert len(list(members(holder.pid))) == 3
    kill_group(holder.pid)
    assert holder.wait() == -signal.SIGKILL
    gone(holder.pid, memory)


def test_a_process_whose_name_is_cut_within_a_letter_stops_nothing(tmp_path: Path) -> None:
    program = tmp_path / "a日本語日本語"
    program.symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([program, "600"], process_group=0) as other:
        assert list(members(other.pid)) == [other.pid]
        kill_group(other.pid)


def test_a_group_that_was_frozen_leaves_nothing_either(holder: subprocess.Popen[str]) -> None:
    memory = memory_of(holder)
    os.killpg(holder.pid, signal.SIGSTOP)
    kill_group(holder.pid)
    assert holder.wait() == -signal.SIGKILL
    gone(holder.pid, memory)


def test_a_group_whose_processes_have_ended_is_no_error(holder: subprocess.Popen[str]) -> None:
    memory = memory_of(holder)
    kill_group(holder.pid)
    holder.wait()
    gone(holder.pid, memory)
    kill_group(holder.pid)
