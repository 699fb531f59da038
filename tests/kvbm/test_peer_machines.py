"""Two machines as network namespaces, a kvbm and a pool in each: the link between them is cut and either is frozen
while one reads the other's blocks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kvbm.peer_machine import CONTENTS
from tests.kvbm.peer_rig import BACKENDS

ALL = len(CONTENTS)
LIMIT_S = 120.0
READ_S = 1.2
"""Seconds for a read that is disturbed; an undisturbed one takes a little longer, so no disturbed one is whole."""
RATE = "100mbit"
FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


def _unfit() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") and shutil.which("tc") else "no programs ip and tc (Debian's iproute2)"


UNFIT = _unfit()
pytestmark = pytest.mark.skipif(bool(UNFIT), reason=UNFIT or "-")


class Machine:
    """One namespace and its kvbm."""

    def __init__(self, namespace: str, link: str, host: str, process: subprocess.Popen[bytes]) -> None:
        self.namespace = namespace
        self.link = link
        self.at = f"{host}:7000"
        self.process = process

    def ask(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({"do": do, **more}) + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the machine's kvbm has ended"
        return msgspec.json.decode(line, type=dict[str, Any])

    def do(self, do: str, **more: Any) -> dict[str, Any]:
        self.ask(do, **more)
        return self.answer()

    def until(self, **state: int) -> None:
        """Return when the kvbm's state is this."""
        deadline = time.monotonic() + LIMIT_S
        while any((now := self.do("state"))[name] != value for name, value in state.items()):
            assert time.monotonic() < deadline, now
            time.sleep(0.002)

    def set_link(self, state: str) -> None:
        _ip("-n", self.namespace, "link", "set", self.link, state)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def machine(folder: Path, namespace: str, link: str, host: str, backend: str) -> Iterator[Machine]:
    (folder / namespace).mkdir()
    started = subprocess.Popen(
        [
            *("ip", "netns", "exec", namespace),
            sys.executable,
            "-m",
            "tests.kvbm.peer_machine",
            str(folder / namespace),
            f"{host}:7000",
            backend,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with started:
        try:
            made = Machine(namespace, link, host, started)
            assert made.answer() == {"ready": True}
            yield made
        finally:
            started.send_signal(signal.SIGCONT)
            started.kill()


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a slow link; the first one has all blocks. In the end neither holds anything."""
    name = f"hr{os.getpid() % 100000}"
    sides = [(f"{name}{side}", f"{name}{side}", f"10.97.0.{number}") for number, side in enumerate("ab", 1)]
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="peer-machines-", dir=FOLDER)))
        for namespace, _, _ in sides:
            _ip("netns", "add", namespace)
            undo.callback(_ip, "netns", "del", namespace)
        (first, link, _), (second, other, _) = sides
        try:
            _ip("link", "add", link, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
            for namespace, each, host in sides:
                _ip("-n", namespace, "addr", "add", f"{host}/24", "dev", each)
                _ip("-n", namespace, "link", "set", each, "up")
                _ip("-n", namespace, "link", "set", "lo", "up")  # NIXL's agent connects to itself
            shape = ("tbf", "rate", RATE, "burst", "64kbit", "latency", "400ms")
            slow = ["ip", "netns", "exec", first, "tc", "qdisc", "add", "dev", link, "root", *shape]
            subprocess.run(slow, check=True, capture_output=True)
        except subprocess.CalledProcessError as wrong:
            pytest.skip(f"this kernel has no veth or no tbf: {wrong.stderr.decode()[-200:]}")
        lender, reader = (undo.enter_context(machine(folder, *side, request.param)) for side in sides)
        assert lender.do("store") == {"stored": ALL}
        yield lender, reader
        for ended in (lender, reader):
            ended.until(loans=0, busy=0)


def whole(lender: Machine, reader: Machine) -> None:
    """Read what is missing: then all blocks are right. NIXL's process may have ended with the last read, and starts
    again."""
    deadline = time.monotonic() + LIMIT_S
    while reader.do("load")["right"] < ALL:
        assert time.monotonic() < deadline
        reader.do("read", at=lender.at, limit_s=LIMIT_S)
    assert reader.do("load") == {"right": ALL}


def begin(lender: Machine, reader: Machine) -> None:
    """Begin a read, and return while it is under way."""
    reader.ask("read", at=lender.at, limit_s=READ_S)
    lender.until(loans=1)


def test_one_machine_reads_the_others_blocks(pair: tuple[Machine, Machine]) -> None:
    lender, reader = pair
    assert reader.do("read", at=lender.at, limit_s=LIMIT_S) == {"written": ALL, "fault": ""}
    assert reader.do("load") == {"right": ALL}


def test_a_link_that_is_cut_in_the_middle_of_a_read_leaves_right_blocks_and_nothing_held(
    pair: tuple[Machine, Machine],
) -> None:
    lender, reader = pair
    begin(lender, reader)
    lender.set_link("down")
    done = reader.answer()
    assert done["written"] < ALL
    reader.until(busy=0)
    lender.until(loans=0, busy=0)
    assert reader.do("load")["right"] <= done["written"]
    lender.set_link("up")
    whole(lender, reader)


def test_a_lender_that_freezes_in_the_middle_of_a_read_costs_its_reader_a_deadline(
    pair: tuple[Machine, Machine],
) -> None:
    lender, reader = pair
    begin(lender, reader)
    lender.process.send_signal(signal.SIGSTOP)
    done = reader.answer()
    assert done["written"] < ALL
    reader.until(busy=0)
    lender.process.send_signal(signal.SIGCONT)
    lender.until(loans=0, busy=0)
    whole(lender, reader)


def test_a_reader_that_freezes_in_the_middle_of_a_read_holds_its_lenders_blocks_for_a_while(
    pair: tuple[Machine, Machine],
) -> None:
    lender, reader = pair
    begin(lender, reader)
    reader.process.send_signal(signal.SIGSTOP)
    lender.until(loans=0, busy=0)
    reader.process.send_signal(signal.SIGCONT)
    assert reader.answer()["written"] < ALL
    reader.until(busy=0)
    whole(lender, reader)


def test_what_lends_is_killed_in_the_middle_of_a_read_and_lends_again(pair: tuple[Machine, Machine]) -> None:
    lender, reader = pair
    state = lender.do("state")
    if state["pid"] == lender.process.pid:
        pytest.skip("with sockets the kvbm itself lends: tests/chaos kills it")
    begin(lender, reader)
    os.kill(state["pid"], signal.SIGKILL)
    assert reader.answer()["written"] < ALL
    reader.until(busy=0)
    lender.until(loans=0, busy=0)
    whole(lender, reader)
