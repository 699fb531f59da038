"""Peers: what a rank exchanges with the other ranks of its group: sums, logits and plans, through shared memory.

    the memory        | rank 0: buffer 0, buffer 1 | rank 1: buffer 0, buffer 1 | …      each written by its rank alone
    exchange k        each rank writes to its buffer k mod 2 ─▶ sends each peer one byte ─▶ has a byte of each peer
                      ─▶ reads their buffers

**Order.** The byte is sent (write) after the numbers are stored and read before they are loaded. Both calls take the
lock of the socket's queue in the kernel: what was stored before the sender's call is seen after the receiver's, on x86
and on ARM. So nothing depends on the order in which a processor or NumPy stores, and there is no flag to spin on.

**Two buffers are enough.** A rank that writes for exchange k has heard everyone in exchange k - 1, and each sent that
byte after it had read everything of exchange k - 2, which lay in the same buffer.

**A peer that is dead** closes its socket, and one that is stopped sends no byte in `limit_s`: both raise RankLost with
its number. A rank that cannot go on says why instead of the byte. Every rank adds in the order of ranks, so that all
have the same sums, bit for bit.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.native.linear import Array
from shared.errors import MALFORMED

BUFFER_BYTES = 1 << 20
"""Bytes of a buffer, unless a row of logits is longer. What is longer is exchanged in turns."""
_HERE, _FAILED = b"\x01", b"\x02"
_MOST_REASON_BYTES = 4096
ENDED = "has ended"
"""The reason of a rank that closed its connections without a word."""
_LENGTH = struct.Struct("<Q")


class RankLost(Exception):
    """A rank of the group does not go on, so the group is lost."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"tensor_parallel: rank {rank} {reason}")
        self.rank = rank
        self.reason = reason


class _Reason(Struct, frozen=True):
    rank: int
    reason: str


_reasons = msgspec.msgpack.Decoder(_Reason)


def buffer_bytes(vocab: int, ranks: int) -> int:
    """Return the bytes of a buffer that holds at least one row of a rank's logits."""
    return max(BUFFER_BYTES, 4 * -(-vocab // ranks))


class Peers:
    """The other ranks, as one rank sees them. All ranks call the same methods in the same order."""

    def __init__(
        self, rank: int, sockets: Sequence[socket.socket | None], memory: NDArray[np.uint8], columns: Sequence[slice]
    ) -> None:
        """`sockets` has the connection to each rank, None for this one; `memory` all buffers; `columns` each rank's
        part of the vocabulary. No wait has a limit before `limit`."""
        ranks = len(sockets)
        self._rank = rank
        self._sockets = [(number, one) for number, one in enumerate(sockets) if one is not None]
        self._columns = columns
        self._buffers = [memory.reshape(ranks, 2, -1)[:, parity] for parity in range(2)]
        self._floats = [buffers.view(np.float32) for buffers in self._buffers]
        self._parity = 0
        """The buffer of the next exchange."""
        self._limit_s = 0.0

    def limit(self, limit_s: float) -> None:
        """Wait at most `limit_s` for each peer from now on."""
        self._limit_s = limit_s
        timeval = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
        for _, connection in self._sockets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def meet(self, *, patient: bool = False) -> int:
        """Return when all ranks are here: the buffer that they have written. `patient` waits for as long as they
        live. Raise RankLost."""
        for _, connection in self._sockets:
            with suppress(OSError):  # it has ended: what it said before is read below
                connection.send(_HERE)
        for number, connection in self._sockets:
            self._await(number, connection, patient)
        parity, self._parity = self._parity, 1 - self._parity
        return parity

    def _await(self, number: int, connection: socket.socket, patient: bool) -> None:
        said = b""
        while not said:
            try:
                said = connection.recv(1)
            except BlockingIOError:
                if not patient:
                    raise RankLost(number, self._stands_still) from None
                continue
            except ConnectionResetError:
                pass
            if not said:
                raise RankLost(number, ENDED)
        if said == _FAILED:
            raise _read_reason(number, connection)

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Return each rank's numbers, of which all give as many. Raise RankLost."""
        said = np.array(own, np.int64).view(np.uint8)
        self._buffers[self._parity][self._rank, : said.size] = said
        heard = self._buffers[self.meet()]
        return [heard[rank, : said.size].copy().view(np.int64).tolist() for rank in range(len(heard))]

    def words(self, own: str) -> list[str]:
        """Return what each rank says, cut to a length. Raise RankLost."""
        text = own.encode()[: _MOST_REASON_BYTES // 2]
        said = np.frombuffer(_LENGTH.pack(len(text)) + text, np.uint8)
        self._buffers[self._parity][self._rank, : said.size] = said
        heard = [each.data for each in self._buffers[self.meet()]]
        ends = [_LENGTH.size + _LENGTH.unpack(each[: _LENGTH.size])[0] for each in heard]
        return [bytes(each[_LENGTH.size : end]).decode(errors="ignore") for each, end in zip(heard, ends, strict=True)]

    def descriptors(self, own: int) -> dict[int, int]:
        """Give a descriptor to each peer; return those that they gave, by rank. They are the caller's. Raise
        RankLost."""
        found: dict[int, int] = {}
        for _, connection in self._sockets:
            with suppress(OSError):  # it has ended: what it said before is read below
                socket.send_fds(connection, [_HERE], [own])
        for number, connection in self._sockets:
            try:
                said, given, _, _ = socket.recv_fds(connection, 1, 1)
            except BlockingIOError:
                raise RankLost(number, self._stands_still) from None
            except ConnectionResetError:
                raise RankLost(number, ENDED) from None
            if said == _FAILED:
                raise _read_reason(number, connection)
            if not given:
                raise RankLost(number, ENDED)
            found[number] = given[0]
        return found

    def lost(self, number: int) -> RankLost:
        """Return why a peer did not give what its step must give: it has ended, has said why, or stands still."""
        connection = dict(self._sockets)[number]
        said = _HERE
        while said == _HERE:
            try:
                said = connection.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return RankLost(number, self._stands_still)
            except OSError:
                said = b""
        return _read_reason(number, connection) if said == _FAILED else RankLost(number, ENDED)

    @property
    def connections(self) -> Sequence[tuple[int, socket.socket]]:
        """Each peer's number and the connection to it, which hangs up when the peer ends."""
        return self._sockets

    @property
    def _stands_still(self) -> str:
        return f"did not answer in {self._limit_s:g} s: it stands still"

    def say_failed(self, lost: RankLost) -> None:
        """Say to all peers why this rank does not go on; it makes no further exchange."""
        told = _FAILED + msgspec.msgpack.encode(_Reason(lost.rank, lost.reason[: _MOST_REASON_BYTES // 8]))
        for _, connection in self._sockets:
            with suppress(OSError):  # it has ended, too
                connection.send(told, socket.MSG_DONTWAIT)

    def total(self, part: Array) -> Array:
        """Return the sum of all ranks' parts, contiguous float32 arrays of one shape, in place of `part`."""
        flat = part.reshape(-1)
        most = self._floats[0].shape[1]
        for first in range(0, flat.size, most):
            piece = flat[first : first + most]
            self._floats[self._parity][self._rank, : piece.size] = piece
            parts = self._floats[self.meet()][:, : piece.size]
            np.add(parts[0], parts[1], out=piece)
            for other in parts[2:]:
                piece += other
        return part

    def joined(self, part: Array) -> Array:
        """Return the columns of all ranks next to one another at rank 0; at others, nothing of use. `part` is this
        rank's columns, (rows, its part of the vocabulary)."""
        rows = len(part)
        whole = np.empty((rows, self._columns[-1].stop), np.float32) if self._rank == 0 else part
        most = self._floats[0].shape[1] // max(columns.stop - columns.start for columns in self._columns)
        for first in range(0, rows, most):
            turn = part[first : first + most]
            self._floats[self._parity][self._rank, : turn.size] = turn.reshape(-1)
            parts = self._floats[self.meet()]
            if self._rank == 0:
                for number, columns in enumerate(self._columns):
                    size = len(turn) * (columns.stop - columns.start)
                    whole[first : first + len(turn), columns] = parts[number, :size].reshape(len(turn), -1)
        return whole

    def tell(self, message: bytes) -> None:
        """Give a message to all peers, which `hear` it. Raise RankLost."""
        data = np.frombuffer(_LENGTH.pack(len(message)) + message, np.uint8)
        most = self._buffers[0].shape[1]
        for first in range(0, data.size, most):
            piece = data[first : first + most]
            self._buffers[self._parity][self._rank, : piece.size] = piece
            self.meet()

    def hear(self) -> bytearray:
        """Return the message that rank 0 tells, however long that takes. Raise RankLost."""
        said = self._buffers[self.meet(patient=True)][0]
        size_bytes = _LENGTH.size + _LENGTH.unpack(said[: _LENGTH.size].tobytes())[0]
        data = bytearray(said[:size_bytes].data)
        while len(data) < size_bytes:
            said = self._buffers[self.meet()][0]
            data += said[: size_bytes - len(data)].data
        return data[_LENGTH.size :]

    def close(self) -> None:
        """End the connections, which ends the group."""
        for _, connection in self._sockets:
            connection.close()


def _read_reason(number: int, connection: socket.socket) -> RankLost:
    """Return what a peer says of the end of the group."""
    said = b""
    try:
        said = connection.recv(_MOST_REASON_BYTES)
        told = _reasons.decode(said)
    except (OSError, *MALFORMED):
        return RankLost(number, "has failed")
    return RankLost(told.rank, told.reason)
