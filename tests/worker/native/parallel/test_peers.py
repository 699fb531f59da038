"""What ranks exchange, in threads: sums, columns and messages of any length."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.native.parallel.peers import BUFFER_BYTES, ENDED, Peers, RankLost, buffer_bytes
from tests.worker.native.parallel.threaded import at_once, closing_all, connected

BYTES_EACH = 1 << 12


def parts_of(ranks: int, shape: tuple[int, ...]) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(len(shape) + ranks)
    return [random.normal(size=shape).astype(np.float32) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5), (64, 16), (65, 16), (77, 131)])
def test_all_ranks_have_the_same_sum_bit_for_bit(ranks: int, shape: tuple[int, int]) -> None:
    with closing_all(connected(ranks, bytes_each=BYTES_EACH)) as group:
        for _ in range(3):
            parts = parts_of(ranks, shape)
            expected = np.sum(parts, axis=0)
            sums = at_once([partial(peers.total, part) for peers, part in zip(group, parts, strict=True)])
            np.testing.assert_allclose(sums[0], expected, rtol=1e-5, atol=1e-5)
            for other in sums[1:]:
                np.testing.assert_array_equal(sums[0], other)


@pytest.mark.parametrize("rows", [0, 1, 3, 100])
def test_rank_zero_has_the_columns_of_all(rows: int) -> None:
    columns = [slice(0, 33), slice(33, 67), slice(67, 100)]
    whole = np.arange(rows * 100, dtype=np.float32).reshape(rows, 100)
    with closing_all(connected(3, bytes_each=BYTES_EACH, columns=columns)) as group:
        for _ in range(2):
            joined = at_once(
                [partial(peers.joined, whole[:, part].copy()) for peers, part in zip(group, columns, strict=True)]
            )
            np.testing.assert_array_equal(joined[0], whole)


@pytest.mark.parametrize("size", [0, 1, BYTES_EACH - 8, BYTES_EACH - 7, 5 * BYTES_EACH])
def test_messages_of_any_length_reach_all(size: int) -> None:
    message = bytes(number % 251 for number in range(size))
    with closing_all(connected(3, bytes_each=BYTES_EACH)) as group:
        first, *others = group
        calls: list[Callable[[], object]] = [partial(first.tell, message), *(peers.hear for peers in others)]
        assert at_once(calls)[1:] == [message, message]


def test_exchanges_of_all_kinds_follow_one_another() -> None:
    def rank(peers: Peers) -> float:
        found = 0.0
        for turn in range(300):
            if peers is group[0]:
                peers.tell(bytes([turn % 256]))
            else:
                assert peers.hear() == bytes([turn % 256])
            found = float(peers.total(np.full((turn % 7 + 1, 3), found + 1, np.float32))[0, 0])
            found = found / 2 - turn % 5
        return found

    with closing_all(connected(2, bytes_each=64)) as group:
        first, second = at_once([partial(rank, peers) for peers in group])
        assert first == second


def test_a_peer_that_ends_and_one_that_says_why_are_named() -> None:
    with closing_all(connected(3, bytes_each=64)) as group:
        group[2].close()
        with pytest.raises(RankLost, match=f"^tensor_parallel: rank 2 {ENDED}$") as lost:
            at_once([group[0].meet, group[1].meet])
        group[1].say_failed(lost.value)
        with pytest.raises(RankLost, match=f"rank 2 {ENDED}"):
            group[0].meet()


def test_a_reason_is_cut_and_one_that_is_no_message_is_none() -> None:
    with closing_all(connected(2, bytes_each=64)) as group:
        group[1].say_failed(RankLost(1, "é" * 100_000))
        with pytest.raises(RankLost, match=r"rank 1 é+$"):
            group[0].meet()
    with closing_all(connected(2, bytes_each=64)) as group:
        [(_, connection)] = group[1]._sockets
        connection.send(b"\x02\xff")
        with pytest.raises(RankLost, match="rank 1 has failed"):
            group[0].meet()


def test_a_silent_peer_is_named_at_the_limit() -> None:
    with closing_all(connected(2, bytes_each=64)) as group:
        group[0].limit(0.05)
        with pytest.raises(RankLost, match=r"rank 1 did not answer in 0\.05 s"):
            group[0].meet()


def test_what_peers_exchange_is_a_stream_of_unix_sockets() -> None:
    one, other = socket.socketpair()  # the order of memory, which peers.py explains, rests on it
    with one, other:
        assert one.family == socket.AF_UNIX


def test_a_row_of_logits_fits_into_a_buffer() -> None:
    assert buffer_bytes(49_152, 2) == BUFFER_BYTES
    assert buffer_bytes(1_000_001, 2) == 4 * 500_001


def test_numbers_and_descriptors_reach_all() -> None:
    with closing_all(connected(3)) as group:
        for turn in range(3):
            told = at_once([partial(peers.numbers, [turn, -rank, 1 << 40]) for rank, peers in enumerate(group)])
            assert told == [[[turn, -rank, 1 << 40] for rank in range(3)]] * 3
            files = [os.memfd_create(f"of-rank-{rank}") for rank in range(3)]
            given = at_once([partial(peers.descriptors, file) for peers, file in zip(group, files, strict=True)])
            inodes = [os.fstat(file).st_ino for file in files]
            for rank, heard in enumerate(given):
                assert {peer: os.fstat(each).st_ino for peer, each in heard.items()} == {
                    peer: inodes[peer] for peer in range(3) if peer != rank
                }
            for descriptor in [*files, *(each for heard in given for each in heard.values())]:
                os.close(descriptor)


def test_a_peer_that_gives_no_descriptor_is_lost_by_its_number() -> None:
    file = os.memfd_create("own")
    for says in ("nothing", "why", "stands still"):
        with closing_all(connected(2)) as group:
            own, other = group
            if says == "why":
                other.say_failed(RankLost(1, "failed: no memory"))
            if says != "stands still":
                other.close()
            own.limit(0.1)
            with pytest.raises(RankLost) as lost:
                own.descriptors(file)
            said = {
                "nothing": ENDED,
                "why": "failed: no memory",
                "stands still": "did not answer in 0.1 s: it stands still",
            }
            assert str(lost.value) == f"tensor_parallel: rank 1 {said[says]}"
    os.close(file)


def test_what_a_lost_peer_said_last_is_found_after_what_it_said_before() -> None:
    for says in ("nothing", "why", "stands still"):
        with closing_all(connected(2)) as group:
            own, other = group
            own.limit(0.1)
            other.limit(0.1)
            with pytest.raises(RankLost):
                other.meet()
            if says == "why":
                other.say_failed(RankLost(1, "failed: no memory"))
            if says != "stands still":
                other.close()
            said = {
                "nothing": ENDED,
                "why": "failed: no memory",
                "stands still": "did not answer in 0.1 s: it stands still",
            }
            assert own.lost(1).reason == said[says]
