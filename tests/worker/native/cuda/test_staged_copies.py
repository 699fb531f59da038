"""Copies through rooms keep all bytes, with host memory in place of a device's and copies that end late."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.native.cuda.staged_copies import Bytes, StagedCopies

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=8)


class Link:
    """Copies that happen only when they are waited for, as a device's may."""

    def __init__(self) -> None:
        self.begun = self.under_way = 0

    def begin(self, to: int, source: int, size_bytes: int) -> Callable[[], None]:
        self.begun += 1
        self.under_way += 1
        ended: list[bool] = []

        def end() -> None:
            if not ended:
                ended.append(True)
                ctypes.memmove(to, source, size_bytes)
                self.under_way -= 1

        return end


def rooms(count: int) -> list[Bytes]:
    return [np.full(64, 0xEE, np.uint8) for _ in range(count)]


@given(SIZES, st.integers(1, 5), st.integers(1, 3))
def test_arrays_arrive_whole_whatever_their_sizes(sizes: list[int], count: int, threads: int) -> None:
    draw, link = np.random.default_rng(1), Link()
    arrays = [draw.integers(0, 256, size, np.uint8) for size in sizes]
    devices = [np.zeros(size, np.uint8) for size in sizes]
    with StagedCopies(partial(rooms, count), link.begin, threads) as copies:
        for array, device in zip(arrays, devices, strict=True):
            copies.to_device(device.ctypes.data, array)
    for array, device in zip(arrays, devices, strict=True):
        np.testing.assert_array_equal(device, array)
    back = [np.zeros(size, np.uint8) for size in sizes]
    with StagedCopies(partial(rooms, count), link.begin, threads) as copies:
        for host, device in zip(back, devices, strict=True):
            copies.to_host(host, device.ctypes.data)
    for array, host in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(host, array)
    assert link.under_way == 0


def test_an_error_in_the_block_waits_for_what_has_begun_and_ends_the_threads() -> None:
    """What is under way reads rooms, whose memory is then given back."""
    link = Link()
    copies = StagedCopies(partial(rooms, 4), link.begin)
    device = np.zeros(300, np.uint8)

    def fail() -> None:
        with copies:
            copies.to_device(device.ctypes.data, np.ones(300, np.uint8))
            assert link.under_way > 0
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        fail()
    assert link.under_way == 0
    with pytest.raises(RuntimeError):
        copies.to_device(0, np.zeros(20, np.uint8))


def test_a_copy_that_fails_is_raised_after_the_others_have_ended() -> None:
    link = Link()

    def begin(to: int, source: int, size_bytes: int) -> Callable[[], None]:
        end = link.begin(to, source, size_bytes)
        if link.begun != 2:
            return end

        def fail() -> None:
            end()
            raise OSError("the link")

        return fail

    host, device = np.zeros(300, np.uint8), np.ones(300, np.uint8)
    copies = StagedCopies(partial(rooms, 8), begin)
    with pytest.raises(OSError, match="the link"), copies:
        copies.to_host(host, device.ctypes.data)
    assert link.under_way == 0


def test_each_thread_is_prepared_before_it_waits_for_a_copy() -> None:
    """A thread of CUDA begins with the first GPU, whichever is used."""
    prepared: list[int] = []
    waited: list[int] = []

    def begin(_to: int, _source: int, _size_bytes: int) -> Callable[[], None]:
        return lambda: waited.append(threading.get_ident())

    with StagedCopies(partial(rooms, 4), begin, 2, lambda: prepared.append(threading.get_ident())) as copies:
        copies.to_host(np.zeros(900, np.uint8), 0)
    assert set(waited) <= set(prepared)
    assert threading.get_ident() not in waited
