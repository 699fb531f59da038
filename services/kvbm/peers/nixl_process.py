"""A NIXL process, as the kvbm has it: started, asked in a thread, and killed. See `nixl_program.py` for what it does.

It ends with the thread that started it, so that must be one that lasts. When `close` or a failed `receive` has
returned, the process has ended: nothing writes to the pool for it any more.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec

from services.kvbm.config import PeersConfig
from services.kvbm.peers.messages import LENGTH_BYTES, PeerFault, frame_length, pack_frame
from services.kvbm.peers.nixl_messages import (
    NIXL_ORDER,
    NIXL_REPORT,
    NixlFailed,
    NixlOrder,
    NixlReady,
    NixlReport,
    NixlRole,
    NixlStart,
)
from shared.config import environment
from shared.errors import ConfigError, ProtocolError
from shared.installation import install_command

MODULE = "nixl_cu13"
SEGMENT_BYTES = 1 << 18
"""The bytes of UCX's TCP segments: its own 8 KiB take 1.5 times the CPU time."""
ENDING_S = 5.0
"""Seconds after which it is logged that a process which was killed has not ended."""
_SIOCGIFADDR = 0x8915

_log = logging.getLogger(__name__)


def require_nixl() -> None:
    """Raise ConfigError unless NIXL is installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise ConfigError(f"peers.backend nixl needs NIXL, which is not installed: {install_command('nixl')} (210 MB)")


def nixl_environment(config: PeersConfig) -> dict[str, str]:
    """Return the environment of a NIXL process: it uses the one device. Raise ConfigError."""
    device = config.nixl_device or device_with(config.address[0])
    return {
        **environment(),
        "UCX_TLS": config.nixl_transports,
        "UCX_NET_DEVICES": device,
        "UCX_HANDLE_ERRORS": "none",
        "UCX_LOG_LEVEL": "error",
        "UCX_MEM_EVENTS": "n",
        "UCX_TCP_TX_SEG_SIZE": str(SEGMENT_BYTES),
        "UCX_TCP_RX_SEG_SIZE": str(SEGMENT_BYTES),
        "NIXL_LOG_LEVEL": "ERROR",
    }


def device_with(host: str) -> str:
    """Return the network device that has this host's IPv4 address. Raise ConfigError."""
    try:
        address = socket.inet_aton(socket.gethostbyname(host))
    except OSError as wrong:
        raise ConfigError(f"peers.listen: no IPv4 address of {host}: {wrong.strerror}; set peers.nixl_device") from None
    if address[0] == 127:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # a device without an address
                found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == address:
                    return name
    raise ConfigError(f"peers.nixl_device: no network device has the address of {host}; set it")


class NixlProcess:
    """A running NIXL process; asked by one thread at a time. `cut` may be called from any."""

    def __init__(self, role: NixlRole, agent: str, pool: int, environment: dict[str, str]) -> None:
        """Start it. Raise PeerFault."""
        self._lock = threading.Lock()
        try:
            self._socket, theirs = socket.socketpair()
        except OSError as wrong:
            raise PeerFault("unreachable", f"no socket for a NIXL process: {wrong.strerror}") from None
        start = NixlStart(role, agent, os.getpid(), theirs.fileno(), pool)
        command = [sys.executable, "-P", "-m", "services.kvbm.peers.nixl_program", msgspec.json.encode(start).decode()]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), pool),
                env=environment,
                process_group=0,
            )
        except OSError as wrong:
            self._socket.close()
            raise PeerFault("unreachable", f"no NIXL process: {wrong.strerror}") from None
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True if it has ended."""
        return self._process.poll() is not None

    def begin(self) -> NixlReady:
        """Wait until its agent runs. Raise PeerFault; then it has ended."""
        ready = self.receive()
        assert isinstance(ready, NixlReady), ready
        return ready

    def send(self, order: NixlOrder) -> None:
        """Send an order without waiting. Raise PeerFault if that cannot be: then it was killed."""
        frame = pack_frame(NIXL_ORDER.encode(order))
        try:
            if self._socket.send(frame, socket.MSG_DONTWAIT) == len(frame):
                return
        except OSError:
            pass
        self.cut()
        raise PeerFault("closed", "the NIXL process takes no orders")

    def ask(self, order: NixlOrder) -> None:
        """Send an order of any size. Raise PeerFault; then it has ended."""
        try:
            self._socket.sendall(pack_frame(NIXL_ORDER.encode(order)))
        except OSError:
            raise self._end("it takes no orders") from None

    def receive(self) -> NixlReport:
        """Wait for what it reports next, which is no failure. Raise PeerFault; then it has ended."""
        try:
            report = NIXL_REPORT.decode(self._receive(frame_length(self._receive(LENGTH_BYTES))))
        except (OSError, ProtocolError) as wrong:
            raise self._end(str(wrong)) from None
        if isinstance(report, NixlFailed):
            raise self._end(report.reason)
        return report

    def cut(self) -> None:
        """Kill it. The thread that waits for it returns at once."""
        with suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        """Kill it, and return when it has ended. That can take a while, if it has registered much memory."""
        self.cut()
        self._wait()
        self._socket.close()

    def _receive(self, size_bytes: int) -> bytes:
        data = self._socket.recv(size_bytes, socket.MSG_WAITALL)
        if len(data) < size_bytes:
            raise ConnectionResetError("the NIXL process has ended")
        return data

    def _wait(self) -> None:
        """Return when it has ended, after it was killed, however long that takes: until then it may write."""
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            _log.error(
                "NIXL process %d was killed %g s ago and has not ended: its blocks stay in use until then",
                *(self.pid, ENDING_S),
            )
            self._process.wait()

    def _end(self, reason: str) -> PeerFault:
        self.cut()
        self._wait()
        return PeerFault("closed", f"NIXL: {reason}")
