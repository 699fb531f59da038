"""shared/deadline.py"""

from __future__ import annotations

import socket
import threading

from shared.deadline import Deadline, cut_connection

LIMIT_S = 60.0


def test_a_read_that_never_ends_is_cut() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Deadline(0.05, lambda: cut_connection(ours)) as deadline:
        assert ours.recv(1) == b""
    assert deadline.late


def test_what_ends_in_time_is_not_cut() -> None:
    cut = threading.Event()
    with Deadline(LIMIT_S, cut.set) as deadline:
        pass
    assert not deadline.late
    assert not cut.is_set()


def test_an_extended_deadline_begins_again() -> None:
    cut = threading.Event()
    with Deadline(1.0, cut.set) as deadline:
        deadline.limit_s = LIMIT_S
        deadline.extend()
        assert not cut.wait(1.5)
    assert not deadline.late


def test_a_socket_that_is_closed_already_is_no_fault() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    ours.close()
    cut_connection(ours)
