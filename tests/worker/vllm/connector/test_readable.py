"""A file is waited for, whatever the number of its descriptor."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from services.worker.vllm.connector.readable import readable


class Descriptor:
    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number


@pytest.mark.parametrize("least", [0, 1500])
def test_a_pipe_is_readable_once_something_was_written(least: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= least + 16:
        pytest.skip("this process may not have so many files")
    read, write = os.pipe()
    number = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, least)
    try:
        assert number >= least
        assert not readable(Descriptor(number), 0.0)
        os.write(write, b"x")
        assert readable(Descriptor(number), 600.0)
    finally:
        for each in (read, write, number):
            os.close(each)
