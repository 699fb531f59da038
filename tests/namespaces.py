"""Machines as network namespaces, joined by a switch that this machine is joined to, too: each can be cut off.

this machine ──┐
machine "a" ───┼── bridge, in a namespace of its own, where no firewall's rules are
machine "b" ───┘     a port that is taken out of the bridge drops all packets, without a word to either side
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager


def unfit() -> str:
    """Return why there can be no namespaces here. Empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root"
    if not all(map(shutil.which, ("ip", "nsenter"))):
        return "no programs ip and nsenter (Debian's iproute2 and util-linux)"
    tried = subprocess.run(["ip", "link", "add", _prefix(), "type", "bridge"], capture_output=True, text=True)
    if tried.returncode:
        return f"this kernel makes no bridge: {tried.stderr.strip()}"
    _ip("link", "del", _prefix())
    return ""


class Machines:
    """The machines of one network. Made by `machines`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 2)}
        self._net = f"10.98.{os.getpid() % 256}"
        self._switch = f"{_prefix()}s"

    def address(self, name: str) -> str:
        """Return a machine's address."""
        return f"{self._net}.{self._numbers[name]}"

    def inside(self, name: str) -> list[str]:
        """Return the command that runs another one on a machine; it has the same files."""
        return [shutil.which("nsenter") or "nsenter", f"--net=/run/netns/{self._namespace(name)}"]

    def cut(self, name: str) -> None:
        """Nothing passes from or to a machine any more."""
        _ip("-n", self._switch, "link", "set", f"p{self._numbers[name]}", "nomaster")

    def mend(self, name: str) -> None:
        """Take it to the others again."""
        self._join(self._numbers[name])

    def _namespace(self, name: str) -> str:
        return f"{_prefix()}m{self._numbers[name]}"

    def make(self, undo: ExitStack) -> None:
        """Make all of it; `undo` takes it away."""
        for namespace in (self._switch, *map(self._namespace, self._numbers)):
            _ip("netns", "add", namespace)
            undo.callback(_ip, "netns", "del", namespace)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        _ip("link", "add", _prefix(), "type", "veth", "peer", "name", "p1", "netns", self._switch)
        undo.callback(_ip, "link", "del", _prefix())
        _ip("addr", "add", f"{self._net}.1/24", "dev", _prefix())
        _ip("link", "set", _prefix(), "up")
        self._join(1)
        for name, number in self._numbers.items():
            namespace = self._namespace(name)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip(
                *("-n", namespace, "link", "add", "eth0", "type", "veth"),
                *("peer", "name", f"p{number}", "netns", self._switch),
            )
            _ip("-n", namespace, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            self._join(number)

    def _join(self, number: int) -> None:
        _ip("-n", self._switch, "link", "set", f"p{number}", "master", "switch")
        _ip("-n", self._switch, "link", "set", f"p{number}", "up")


@contextmanager
def machines(*names: str) -> Iterator[Machines]:
    """A network of machines with these names; it is gone on leaving, and so must be the processes in it."""
    made = Machines(names)
    with ExitStack() as undo:
        made.make(undo)
        yield made


def _prefix() -> str:
    return f"hr{os.getpid() % 100000}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
