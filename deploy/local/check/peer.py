"""Measures the way to another machine's `headrace check --serve`: round trips, its clock, bytes in both directions."""

from __future__ import annotations

import importlib.util
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median

from deploy.local.check import frames
from deploy.local.check.measurements import ClockSample, PeerMeasured, Rate, Road, Unmeasured, clock_bounds
from deploy.local.check.wire import Address, Wire
from shared.errors import ProtocolError
from shared.installation import COMMAND, install_command
from shared.version import VERSION

LIMIT_S = 12.0
CONNECT_S = 3.0
ECHOES = 40
STREAMS = 4
FIRST_BYTES = 256 << 10
ENOUGH_S, WANTED_S = 0.25, 0.5
"""A transfer of less than ENOUGH_S is repeated with as many bytes as would take WANTED_S."""
GROWTH = 16
"""The most by which a transfer grows at once: the first ones are slower than the network."""


def measure(address: Address) -> PeerMeasured | Unmeasured:
    """Return what was measured within LIMIT_S."""
    shown = f"{address[0]}:{address[1]}"
    try:
        with ExitStack() as opened:
            return _measure(address, shown, opened, time.monotonic() + LIMIT_S)
    except PeerRefusal as refused:
        return Unmeasured(f"{shown}: {refused}", wanted=True)
    except (OSError, EOFError, ProtocolError, UnicodeError) as wrong:
        said = getattr(wrong, "strerror", None) or str(wrong) or "it did not answer in time"
        advice = f"on the other machine: {COMMAND} check --serve 0.0.0.0:{address[1]}; a firewall may be between"
        return Unmeasured(f"{shown}: {said}", wanted=True, advice=advice)


class PeerRefusal(ProtocolError):
    """The peer refuses to be measured, and says why."""


def _measure(address: Address, shown: str, opened: ExitStack, until_s: float) -> PeerMeasured:
    wire, welcome = _connect(address, frames.ProbeHello(frames.VERSION, VERSION), opened, until_s)
    trips, samples = list[float](), list[ClockSample]()
    for number in range(ECHOES):
        asked_s, began = time.time(), time.perf_counter()
        theirs_s = _echo(wire, number)
        trips.append(time.perf_counter() - began)
        samples.append(ClockSample(asked_s, time.time(), theirs_s))
    join = frames.ProbeJoin(frames.VERSION, welcome.session)
    wires = [wire, *(_connect(address, join, opened, until_s)[0] for _ in range(STREAMS - 1))]
    rates, fault = list[Rate](), ""
    try:
        for outward in (True, False):
            rate, size_bytes = _grown(wire, outward)
            rates.append(Rate(outward, 1, rate))
            rates.append(Rate(outward, STREAMS, _together(wires, outward, size_bytes)))
    except (OSError, EOFError) as wrong:
        fault = str(wrong)
    clock = clock_bounds(samples)
    return PeerMeasured(shown, welcome.software, median(trips), clock, tuple(rates), _roads(welcome), fault)


def _connect(
    address: Address, greeting: frames.ProbeHello | frames.ProbeJoin, opened: ExitStack, until_s: float
) -> tuple[Wire, frames.ProbeWelcome]:
    connection = opened.enter_context(
        socket.create_connection(address, max(0.1, min(CONNECT_S, until_s - time.monotonic())))
    )
    wire = Wire(connection, until_s)
    wire.send(greeting)
    answer = frames.answer(wire.receive())
    if isinstance(answer, frames.ProbeBusy):
        raise PeerRefusal(answer.reason)
    if not isinstance(answer, frames.ProbeWelcome) or answer.version != frames.VERSION:
        raise ProtocolError("it does not greet as this protocol says")
    return wire, answer


def _grown(wire: Wire, outward: bool) -> tuple[float, int]:
    """Return the rate of one stream in bytes a second, and the bytes of the transfer that showed it."""
    size_bytes = FIRST_BYTES
    while True:
        took_s = _transfer(wire, outward, size_bytes)
        if took_s >= ENOUGH_S or size_bytes == frames.TRANSFER_LIMIT_BYTES:
            return size_bytes / took_s, size_bytes
        more = min(GROWTH, WANTED_S / max(took_s, 1e-6))
        size_bytes = min(frames.TRANSFER_LIMIT_BYTES, int(size_bytes * more))


def _together(wires: list[Wire], outward: bool, size_bytes: int) -> float:
    """Return the rate of all streams at once, each with half of the bytes, in bytes a second."""
    each = max(1, size_bytes // 2)
    with ThreadPoolExecutor(len(wires)) as threads:
        began = time.perf_counter()
        for _ in threads.map(lambda wire: _transfer(wire, outward, each), wires):
            pass
        return each * len(wires) / (time.perf_counter() - began)


def _transfer(wire: Wire, outward: bool, size_bytes: int) -> float:
    """Move bytes and return the seconds, from the first byte until the receiver has the last one."""
    began = time.perf_counter()
    if outward:
        wire.send(frames.ProbeUpload(size_bytes))
        wire.send_bytes(size_bytes)
        uploaded = frames.answer(wire.receive())
        if not isinstance(uploaded, frames.ProbeUploaded) or uploaded.size_bytes != size_bytes:
            raise ProtocolError("it says that it has other bytes than were sent")
    else:
        wire.send(frames.ProbeDownload(size_bytes))
        wire.receive_bytes(size_bytes)
    took_s = time.perf_counter() - began
    _echo(wire, size_bytes)  # shows a peer that has sent more than it was asked for
    return took_s


def _echo(wire: Wire, number: int) -> float:
    """Ask for the time and return it."""
    wire.send(frames.ProbeEcho(number))
    echoed = frames.answer(wire.receive())
    if not isinstance(echoed, frames.ProbeEchoed) or echoed.number != number:
        raise ProtocolError("it answers another question than it was asked")
    return echoed.clock_s


def _roads(welcome: frames.ProbeWelcome) -> tuple[Road, ...]:
    packages = (("here", importlib.util.find_spec("nixl") is not None), ("there", welcome.nixl))
    lacking = " and ".join(where for where, has in packages if not has)
    install = f"The package nixl is not installed {lacking}: {install_command('nixl')}"
    why = install if lacking else "Its rate is not measured here"
    return (
        Road("sockets", there=True),
        Road("CUDA IPC", there=False, reason="It joins GPUs of one machine, not two machines"),
        Road("NIXL", there=False, reason=f"{why}; see peers.backend of kvbm"),
    )
