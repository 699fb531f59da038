"""One blocking TCP or TLS connection between two kvbms, which `cut` ends.

    thread   send_frame, receive_frame, send_slot, receive_into    block, without Python's lock
    loop     cut: shuts the connection down, so that the thread's call ends at once with PeerFault
    thread   close: drops what the kernel has queued, so that it reads no slot any more

The connection has no time limits of its own: Python's would bound each system call and not the whole, and cost two
more calls each. Every wait is bounded by a timer of the event loop that calls `cut`.

Without TLS a slot's bytes go from the pool's file to the network by `sendfile`: the kernel sends the pool's own pages,
and no byte is copied in this process. Received bytes are written by the kernel into the slot, in pieces, and each piece
is added to the checksum while it is in the core's cache. With TLS both are copied once more, to be encrypted.

A certificate that is renewed counts from the next connection on; those that are there stay.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import struct
import threading
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec import Struct
from xxhash import xxh3_64, xxh3_64_intdigest

from services.kvbm.config import PeersConfig
from services.kvbm.peers.messages import (
    BLOCK_HEADER_BYTES,
    LENGTH_BYTES,
    BlockHeader,
    PeerFault,
    check_header,
    frame_length,
    pack_frame,
    pack_header,
)
from shared.errors import ConfigError, ModelError
from shared.file_reads import READ_LIMIT_S, FileReads
from shared.model_file import read_model_file

SEND_BYTES = 1 << 20
"""The most bytes of one `sendfile`."""
PIECE_BYTES = 1 << 18
"""The bytes that are received and then summed: a core's cache holds them in between."""
_NO_LINGER = struct.pack("ii", 1, 0)
FILE_LIMIT_BYTES = 1 << 20
"""The maximum size of a file with a certificate, a key or authorities."""


class _TlsSocket(ssl.SSLSocket):
    """One that is closed if its connection was reset before it is made. Python's stays open until it is collected."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as wrong:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, str(wrong)) from None


class PeerStream:
    """A connected socket; owned by one thread at a time. `cut` may be called from any."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._knife = connected.dup()  # of its own: TLS takes the other one over, and its `shutdown` is not for threads
        self._guard = threading.Lock()
        """Keeps `cut` from the descriptor of another file, which may have the number as soon as it is closed."""
        self.number = 0
        """The number of the last question that was asked on it."""

    def encrypt(self, context: ssl.SSLContext, *, server: bool, name: str = "") -> None:
        """Do the TLS handshake. Raise PeerFault."""
        try:
            context.sslsocket_class = _TlsSocket
            self._socket = context.wrap_socket(self._socket, server_side=server, server_hostname=name or None)
        except (OSError, ValueError) as wrong:
            raise PeerFault("unreachable", f"no TLS: {wrong}") from None

    def cut(self) -> None:
        """End the connection for both sides, and every call that waits for it. Any thread may call it at any time."""
        with self._guard, suppress(OSError):
            self._knife.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection after the last call has returned; what is queued for sending is dropped."""
        with self._guard:
            with suppress(OSError):
                self._knife.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            for each in (self._socket, self._knife):
                with suppress(OSError):
                    each.close()

    @property
    def ended(self) -> bool:
        """Whether the other side has closed the connection, as far as is known."""
        try:
            return self._knife.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    # --- frames

    def next_number(self) -> int:
        """Return the number for the next question."""
        self.number = (self.number + 1) & 0xFFFFFFFF
        return self.number

    def send_frame(self, body: bytes) -> None:
        """Send one message. Raise PeerFault."""
        self._send(pack_frame(body))

    def receive_frame(self, most_bytes: int) -> bytes:
        """Receive one message of at most `most_bytes`. Raise PeerFault."""
        length = frame_length(self._receive(LENGTH_BYTES))
        if length > most_bytes:
            raise PeerFault("garbage", f"a frame of {length} bytes, where at most {most_bytes} are allowed")
        return self._receive(length)

    # --- blocks

    def send_slot(self, header: BlockHeader, pool: int, offset: int, memory: memoryview) -> None:
        """Send a block's header and bytes: those at `offset` of the pool's file, which are also at `memory`. Raise
        PeerFault."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._send(pack_header(header))
            self._send(memory)
            return
        try:
            self._socket.sendall(pack_header(header), socket.MSG_MORE)
            there, left = self._socket.fileno(), header.size_bytes
            while left:
                sent = os.sendfile(there, pool, offset, min(left, SEND_BYTES))
                if not sent:
                    raise PeerFault("closed", "the pool's file is shorter than its slots")
                offset += sent
                left -= sent
        except OSError as wrong:
            raise PeerFault("closed", f"closed while a block was sent: {wrong.strerror}") from None

    def receive_header(self, number: int, index: int, block_bytes: int) -> BlockHeader:
        """Receive the header of the block that comes next. Raise PeerFault for any other."""
        return check_header(self._receive(BLOCK_HEADER_BYTES), number, index, block_bytes)

    def receive_into(self, memory: memoryview) -> int:
        """Fill the memory, and return the checksum of what came. Raise PeerFault."""
        total = xxh3_64()
        for start in range(0, memory.nbytes, PIECE_BYTES):
            with memory[start : start + PIECE_BYTES] as piece:
                self._fill(piece)
                if piece.nbytes == memory.nbytes:
                    return xxh3_64_intdigest(piece)
                total.update(piece)
        return total.intdigest()

    def _fill(self, memory: memoryview) -> None:
        filled = 0
        flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL
        while filled < memory.nbytes:
            with memory[filled:] as rest:
                try:
                    got = self._socket.recv_into(rest, rest.nbytes, flags)
                except (OSError, ValueError) as wrong:
                    raise PeerFault("closed", f"closed: {wrong}") from None
            if not got:
                raise PeerFault("closed", f"closed, {memory.nbytes - filled} bytes early")
            filled += got

    def _receive(self, size_bytes: int) -> bytes:
        buffer = bytearray(size_bytes)
        with memoryview(buffer) as memory:
            self._fill(memory)
        return bytes(buffer)

    def send_raw(self, data: bytes) -> None:
        """Send bytes as they are. Raise PeerFault."""
        self._send(data)

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except (OSError, ValueError) as wrong:
            raise PeerFault("closed", f"closed: {wrong}") from None


class PeerTls:
    """The TLS of both directions, used on one event loop. The files are read for each handshake; handshakes at the same
    time share a read, so that a file system which hangs keeps one thread."""

    def __init__(self, config: PeersConfig) -> None:
        """Raise ConfigError if a file cannot be used."""
        self._config = config
        self._loaded = self._load(None)
        self._reads = FileReads()
        self._reading: asyncio.Task[PeerContexts] | None = None

    async def current(self) -> PeerContexts:
        """Return the contexts of the files as they are. Raise PeerFault if a file cannot be used."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._reading.add_done_callback(lambda read: read.cancelled() or read.exception())  # all may have left
        return await asyncio.shield(self._reading)

    async def _read(self) -> PeerContexts:
        try:
            self._loaded = await self._reads.read(partial(self._load, self._loaded))
        except ConfigError as wrong:
            raise PeerFault("unreachable", str(wrong)) from None
        except TimeoutError:
            files = "peers.tls_cert, tls_key and tls_ca"
            raise PeerFault("unreachable", f"{files}: not read in {READ_LIMIT_S:g} s") from None
        return self._loaded

    def _load(self, former: PeerContexts | None) -> PeerContexts:
        """Return the contexts; the former ones if no file has changed."""
        config = self._config
        files = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
        digests = [blake2b(_read(name, Path(path))).digest() for name, path in files.items()]
        if former is not None and former.digests == digests:
            return former
        loaded = PeerContexts(digests, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        for context in (loaded.lender, loaded.reader):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the authority is the fleet's own; PeerHello says which kvbm it is
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
                context.load_verify_locations(config.tls_ca)
            except (OSError, ValueError) as wrong:  # an ssl.SSLError is an OSError
                where = f"peers.tls_cert {config.tls_cert}, tls_key {config.tls_key}, tls_ca {config.tls_ca}"
                raise ConfigError(f"{where}: {getattr(wrong, 'strerror', None) or wrong}") from None
        return loaded


class PeerContexts(Struct, frozen=True):
    """What the files had when they were read."""

    digests: list[bytes]
    lender: ssl.SSLContext
    """What accepts connections."""
    reader: ssl.SSLContext
    """What makes connections."""


def peer_tls(config: PeersConfig) -> PeerTls | None:
    """Return the TLS; None if the settings name no certificate. Raise ConfigError."""
    return PeerTls(config) if config.tls_cert else None


def _read(name: str, path: Path) -> bytes:
    try:
        return read_model_file(path, FILE_LIMIT_BYTES)
    except ModelError as wrong:
        raise ConfigError(f"peers.{name}: {wrong}") from None
