"""Writers, readers and the service as processes that are killed in each state: what is mapped stays right, what is not
complete is never mapped, and the memory is freed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from services.worker.memory.__main__ import main
from tests.worker.memory.memory_process import sum_of
from tests.worker.memory.test_service import shown

SIZE = 1 << 20
MODEL = 7


class Spawned:
    """A process that answers lines."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)
        return self.line()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it; a second time nothing happens."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Machine:
    """A memory service and engines, all processes of their own."""

    ENGINE = "tests.worker.memory.memory_process"
    KEPT = "memfd:headrace-test"
    """What the link of a descriptor of such memory has in it."""
    SIZE, SUM = SIZE, sum_of(MODEL, SIZE)
    REFUSAL = "EPERM EPERM"
    """The answer to an engine that writes to what it maps."""

    def __init__(self, directory: Path, opened: ExitStack) -> None:
        self.directory = directory
        self._opened = opened
        self.service = self.start_service()

    def start_service(self, *flags: str) -> Spawned:
        arguments = ("--directory", str(self.directory), "--size-bytes", str(4 * self.SIZE), "--log-level", "warning")
        self.service = Spawned("services.worker.memory", *arguments, *flags)
        self._opened.callback(self.service.kill)
        return self.service

    def engine(self, model: int = MODEL) -> Spawned:
        engine = Spawned(self.ENGINE, str(self.directory), str(model), str(self.SIZE))
        self._opened.callback(engine.kill)
        return engine

    def writer(self, *words: str) -> Spawned:
        """Return an engine that writes, and has done this."""
        engine = self.engine()
        assert engine.line() == "writes"
        for word in words:
            engine.ask(word)
        return engine

    def reader(self) -> Spawned:
        engine = self.engine()
        assert engine.line() == "maps"
        return engine

    def kept_files(self) -> int:
        """Return how much memory of weights the service holds, in pieces."""
        places = Path(f"/proc/{self.service.process.pid}/fd").iterdir()
        kept = 0
        for place in places:
            with suppress(FileNotFoundError):  # it was closed meanwhile
                kept += self.KEPT in str(place.readlink())
        return kept

    def committed(self) -> Spawned:
        """Return an engine that has committed, perhaps after others were too slow."""
        while True:
            engine = self.engine()
            while (said := engine.line()) == "waits":
                pass
            if said == "writes" and engine.ask("commit") == "committed":
                return engine

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            time.sleep(0.01)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with ExitStack() as opened:
        yield Machine(tmp_path / "memory", opened)


@pytest.mark.parametrize("words", [(), ("half",)], ids=["before it writes", "in mid-write"])
def test_a_writer_that_is_killed_leaves_nothing_and_the_next_writes(machine: Machine, words: tuple[str, ...]) -> None:
    writer = machine.writer(*words)
    waiting = machine.engine()
    assert waiting.line() == "waits"
    writer.kill()
    assert waiting.line() == "writes"
    assert machine.kept_files() == 0
    assert waiting.ask("commit") == "committed"
    assert int(waiting.ask("sum")) == machine.SUM


def test_a_writer_that_is_killed_alone_leaves_nothing(machine: Machine) -> None:
    machine.writer("half").kill()
    machine.until(lambda: shown(machine.directory).rows == ())
    machine.until(lambda: machine.kept_files() == 0)


def test_weights_survive_their_writer_and_every_reader(machine: Machine) -> None:
    machine.writer("commit").kill()
    first = machine.reader()
    first.kill()
    second = machine.reader()
    assert int(second.ask("sum")) == machine.SUM
    assert second.ask("poke") == machine.REFUSAL
    assert int(second.ask("sum")) == machine.SUM
    assert machine.kept_files() == 1


def test_a_service_that_is_killed_takes_nothing_from_its_readers(machine: Machine) -> None:
    writer = machine.writer("commit")
    reader = machine.reader()
    machine.service.kill()
    assert [int(each.ask("sum")) for each in (writer, reader)] == [machine.SUM] * 2
    machine.start_service()
    again = machine.writer("commit")
    assert int(machine.reader().ask("sum")) == int(again.ask("sum")) == machine.SUM
    assert int(reader.ask("sum")) == machine.SUM


@pytest.mark.parametrize("words", [(), ("half",)], ids=["before it writes", "in mid-write"])
def test_a_service_that_is_killed_while_weights_are_written_refuses_the_commit(
    machine: Machine, words: tuple[str, ...]
) -> None:
    writer = machine.writer(*words)
    waiting = machine.engine()
    assert waiting.line() == "waits"
    machine.service.kill()
    assert waiting.line().startswith("refused weights.memory")
    assert writer.ask("commit").startswith("refused weights.memory")
    machine.start_service()
    assert machine.writer("commit").ask("sum") == str(machine.SUM)


def test_a_frozen_reader_keeps_its_weights_and_a_frozen_writer_loses_its_turn(machine: Machine) -> None:
    machine.service.kill()
    machine.start_service("--write-s", "1", "--keep-s", "0.01")
    writer = machine.writer()
    writer.send(signal.SIGSTOP)
    second = machine.committed()
    writer.send(signal.SIGCONT)
    assert writer.ask("commit").startswith("refused")
    reader = machine.reader()
    reader.send(signal.SIGSTOP)
    second.kill()
    machine.until(lambda: shown(machine.directory).rows[0].readers == (reader.process.pid,))
    reader.send(signal.SIGCONT)
    assert int(reader.ask("sum")) == machine.SUM
    reader.kill()
    machine.until(lambda: shown(machine.directory).rows == ())
    machine.until(lambda: machine.kept_files() == 0)


def test_a_signal_ends_the_service_and_its_socket(machine: Machine) -> None:
    assert machine.writer("commit").ask("sum") == str(machine.SUM)
    machine.service.send(signal.SIGTERM)
    assert machine.service.process.wait(60) == 0
    assert not (machine.directory / "socket").exists()


def test_wrong_settings_end_it_with_status_two_and_one_line(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "services.worker.memory", "--directory", str(tmp_path / "missing" / "memory")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("headrace-memory: directory: ")
    assert ran.stderr.count("\n") == 1


def test_settings_are_checked_without_a_start(tmp_path: Path) -> None:
    assert main(["--check-settings", "--directory", str(tmp_path / "memory")]) == 0
    assert main(["--check", "--directory", str(tmp_path / "memory"), "--keep-s", "-1"]) == 2
    assert not (tmp_path / "memory").exists()
