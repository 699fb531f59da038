"""deploy/local/check/child.py: processes that answer, fail and hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.local.check import child
from deploy.local.check.measurements import MemoryMeasured, Unmeasured


def test_a_process_of_its_own_measures(tmp_path: Path) -> None:
    found = child.ask("memory", tmp_path, 60)
    assert isinstance(found, MemoryMeasured)
    assert found.directory == str(tmp_path)


def test_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    found = child.ask("memory", tmp_path, 0.001)
    assert isinstance(found, Unmeasured)
    assert "no answer within 0.001 s" in found.reason
    assert found.wanted


def test_one_that_fails_says_why_in_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Traceback (most recent call last):' >&2\necho 'CUDAError: lost' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert child.ask("gpus", tmp_path, 60) == Unmeasured("CUDAError: lost", wanted=True)
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    assert child.ask("gpus", tmp_path, 60) == Unmeasured("the probe ended with status -11", wanted=True)
    program.write_text('#!/bin/sh\necho \'{"type": "disk"}\'\n')
    assert child.ask("gpus", tmp_path, 60) == Unmeasured("the probe ended with status 0", wanted=True)
