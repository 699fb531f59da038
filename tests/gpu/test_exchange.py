"""Sums and columns that ranks exchange. Here ranks are streams of one process, whose kernels run at once on one GPU.

What the calls need lies on the device beforehand: a kernel that waits for a peer keeps the process from allocating.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from services.worker.native.parallel.peers import Peers, RankLost
from tests.gpu.device import cupy_on_a_device
from tests.worker.native.parallel.threaded import connected

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.exchange import PLACE_BYTES, DeviceExchange  # noqa: E402

LIMIT_S = 60.0
COLUMNS = {
    2: [slice(0, 160), slice(160, 320)],
    3: [slice(0, 107), slice(107, 213), slice(213, 321)],
    4: [slice(0, 80), slice(80, 160), slice(160, 240), slice(240, 320)],
}


class StreamRank:
    """One rank, on a stream of its own."""

    def __init__(self, peers: Peers, rank: int, columns: Sequence[slice], width: int) -> None:
        cp.cuda.Device(0).use()
        self.peers = peers
        self.stream = cp.cuda.Stream(non_blocking=True)
        with self.stream:
            self.exchange = DeviceExchange(peers, rank, columns, width, 0)
            self.exchange.limit(LIMIT_S)
            self.stream.synchronize()


@contextmanager
def ranks_of(ranks: int, width: int) -> Iterator[list[StreamRank]]:
    group = connected(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        made = [pool.submit(StreamRank, peers, rank, COLUMNS[ranks], width) for rank, peers in enumerate(group)]
        found = [each.result(LIMIT_S) for each in made]
    try:
        yield found
    finally:
        for rank in found:
            rank.stream.synchronize()
            rank.exchange.close()
        for peers in group:
            peers.close()


Call = Callable[[StreamRank, int], object]


def run_all(ranks: Sequence[StreamRank], call: Call) -> None:
    """Have ranks make a call, each in a thread of its own, and wait for it."""

    def run(rank: StreamRank, number: int) -> None:
        cp.cuda.Device(0).use()
        with rank.stream:
            call(rank, number)
        rank.stream.synchronize()

    with ThreadPoolExecutor(len(ranks)) as pool:
        for each in [pool.submit(run, rank, number) for number, rank in enumerate(ranks)]:
            each.result()


def check_all(ranks: Sequence[StreamRank]) -> None:
    for rank in ranks:
        rank.exchange.check()


def adding(to: Sequence[Any], parts: Sequence[Any], factor: float, times: int = 1) -> Call:
    """Return the call by which each rank adds the sum of the parts to its own array."""

    def call(rank: StreamRank, number: int) -> None:
        for _ in range(times):
            rank.exchange.add_total(to[number], parts[number], factor)

    return call


def totalling(parts: Sequence[Any], times: int = 1) -> Call:
    def call(rank: StreamRank, number: int) -> None:
        for _ in range(times):
            rank.exchange.total(parts[number])

    return call


def joining(rows: Sequence[Any]) -> Call:
    def call(rank: StreamRank, number: int) -> None:
        rank.exchange.join(rows[number])

    return call


def on_device(array: Any) -> Any:
    found = cp.asarray(array)
    cp.cuda.get_current_stream().synchronize()
    return found


@pytest.mark.parametrize("width", [4, 18, 64])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_have_the_same_sums_bit_for_bit_whatever_the_sizes(ranks: int, width: int) -> None:
    random = np.random.default_rng(ranks * width)
    sizes = [1, 7, 1, 300, 2, 64, PLACE_BYTES // 4 // width + 3, 5]
    with ranks_of(ranks, width) as group:
        for rows in sizes:
            parts = random.normal(size=(ranks, rows, width)).astype(np.float32)
            parts[0, 0, 0] = np.uint32(0xFFFFFFFF).view(np.float32)  # the word that says that nothing is there
            before = random.normal(size=(rows, width)).astype(np.float32)
            own = [on_device(part) for part in parts]
            to = [on_device(before) for _ in range(ranks)]
            run_all(group, adding(to, own, 0.5))
            added = [each.get() for each in to]
            run_all(group, totalling(own))
            check_all(group)
            sums = [each.get() for each in own]
            for found, expected in ((added, before + 0.5 * parts.sum(0)), (sums, parts.sum(0))):
                assert all(np.isnan(each[0, 0]) for each in found)
                first, *others = (each.reshape(-1)[1:] for each in found)
                np.testing.assert_allclose(first, expected.reshape(-1)[1:], rtol=1e-4, atol=1e-4)
                for other in others:
                    np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_have_the_columns_of_all(ranks: int) -> None:
    columns = COLUMNS[ranks]
    vocab = columns[-1].stop
    with ranks_of(ranks, 64) as group:
        for rows in (1, 3, 1, 64, PLACE_BYTES // 4 // 80 + 1, 2):
            whole = np.random.default_rng(rows).normal(size=(rows, vocab)).astype(np.float32)
            own = []
            for part in columns:
                mine = np.full_like(whole, -1)
                mine[:, part] = whole[:, part]
                own.append(on_device(mine))
            run_all(group, joining(own))
            check_all(group)
            for each in own:
                np.testing.assert_array_equal(each.get(), whole)


def test_captured_calls_among_others_find_their_rooms() -> None:
    """A graph knows nothing of the calls before it, of which there may be any number."""
    with ranks_of(2, 64) as group:
        own = [on_device(np.full((8, 64), number + 1, np.float32)) for number in range(2)]
        to = [on_device(np.zeros((8, 64), np.float32)) for _ in range(2)]
        run_all(group, adding(to, own, 1.0))
        graphs: list[Any] = []
        for number, rank in enumerate(group):
            with rank.stream:
                rank.stream.begin_capture()
                for _ in range(4):
                    rank.exchange.add_total(to[number], own[number], 1.0)
                graphs.append(rank.stream.end_capture())
                graphs[-1].upload(rank.stream)

        def launch(rank: StreamRank, number: int) -> None:
            graphs[number].launch(rank.stream)

        for turn in range(7):
            run_all(group, launch)
            run_all(group, adding(to, own, 1.0, turn % 3))
        check_all(group)
        expected = 3.0 * (1 + 7 * 4 + sum(turn % 3 for turn in range(7)))
        for each in to:
            assert (each.get() == expected).all()


def test_a_peer_that_stands_still_ends_the_call_and_all_later_ones_by_its_name() -> None:
    with ranks_of(3, 64) as group:
        own = [on_device(np.ones((8, 64), np.float32)) for _ in range(3)]
        run_all(group, totalling(own))
        for rank in group:
            rank.peers.limit(0.3)
            with rank.stream:
                rank.exchange.limit(0.3)
                rank.stream.synchronize()
        begun_s = time.monotonic()
        run_all(group[:2], totalling(own, 500))
        assert time.monotonic() - begun_s < LIMIT_S, "only the first call waits"
        for rank in group[:2]:
            with pytest.raises(RankLost, match=r"rank 2 did not answer in 0\.3 s: it stands still"):
                rank.exchange.check()


def test_a_peer_that_hangs_up_ends_the_call_long_before_its_limit() -> None:
    with ranks_of(2, 64) as group:
        own = [on_device(np.ones((8, 64), np.float32))]
        with group[0].stream:
            group[0].exchange.limit(LIMIT_S)
            group[0].stream.synchronize()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(run_all, group[:1], totalling(own))
            for _, connection in group[1].peers.connections:
                connection.shutdown(socket.SHUT_RDWR)  # as the end of a process; its own thread still has them open
            waiting.result(2 * LIMIT_S)
        with pytest.raises(RankLost, match="rank 1 has ended"):
            group[0].exchange.check()
