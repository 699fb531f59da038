"""deploy/local/top/app.py as a program in a real terminal, over a real NATS and a real discovery."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from deploy.local import cli
from deploy.local.top.app import HUNG_UP, _single_keys
from shared.discovery.file import FileLease
from tests.deploy.top.views import worker
from tests.deploy.up_state import up_state
from tests.servers import etcd_server, nats_server
from tests.terminal_screen import LIMIT_S, TerminalScreen, terminal_screen

ROOT = Path(__file__).resolve().parents[3]
OTHER_SCREEN, FIRST_SCREEN, CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """What an `up` has written that runs with discovery in files, with two workers that never report."""
    with up_state(tmp_path) as state:
        lease = FileLease(state / "run" / "discovery")
        lease.write(worker("w1") | worker("w2", model="[red]\x1b]0;x\x07" + "long" * 40))
        yield state
        lease.close()


def started(
    *flags: str, variables: Mapping[str, str] = {}, columns: int = 80, rows: int = 24
) -> AbstractContextManager[TerminalScreen]:
    words = [sys.executable, "-P", "-m", "deploy.local.cli", "top", "--every", "0.2", *flags]
    return terminal_screen(words, variables, cwd=ROOT, columns=columns, rows=rows)


def test_workers_are_shown_and_q_leaves_the_terminal_as_it_was(state: Path) -> None:
    with started("--state", str(state)) as terminal:
        before = terminal.modes()
        terminal.until(lambda text: "w1" in text and "w2" in text, "both workers")
        assert "silent" in terminal.text
        assert "[red]" in terminal.text, "no markup"
        assert b"\x1b]0;" not in terminal.raw
        assert terminal.modes() != before
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.modes() == before
        assert terminal.raw.count(OTHER_SCREEN) == terminal.raw.count(FIRST_SCREEN) == 1
        assert terminal.raw.rindex(CURSOR) > terminal.raw.rindex(OTHER_SCREEN)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, HUNG_UP), (signal.SIGINT, 0)], ids=str
)
def test_a_signal_leaves_the_terminal_as_it_was(state: Path, number: signal.Signals, status: int) -> None:
    with started("--state", str(state)) as terminal:
        before = terminal.modes()
        terminal.until(lambda text: "w1" in text, "a worker")
        terminal.process.send_signal(number)
        assert terminal.ended() == status
        assert terminal.modes() == before
        assert FIRST_SCREEN in terminal.raw


def test_ctrl_c_is_a_key(state: Path) -> None:
    with started("--state", str(state)) as terminal:
        terminal.until(lambda text: "w1" in text, "a worker")
        terminal.press("/\x03")
        assert terminal.ended() == 0


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)

    def fail() -> None:
        with _single_keys(slave):
            assert termios.tcgetattr(slave) != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_a_terminal_that_goes_away_ends_it(state: Path) -> None:
    with started("--state", str(state)) as terminal:
        terminal.until(lambda text: "w1" in text, "a worker")
        terminal.hang_up()
        assert terminal.process.wait(LIMIT_S) == HUNG_UP


def test_another_size_is_drawn_at_once_and_without_colours_there_are_none(state: Path) -> None:
    with started("--state", str(state), "--every", "3600", variables={"NO_COLOR": "1"}) as terminal:
        terminal.until(lambda text: "w1" in text, "a worker")
        terminal.resize(40, 10)
        terminal.until(lambda text: terminal.lines[9].startswith("workers 1-2 of 2"), "the foot in the last of 10 rows")
        terminal.resize(100, 30)
        terminal.until(lambda text: terminal.lines[29].startswith("workers 1-2 of 2"), "the foot in the last of 30")
        assert b"\x1b[3" not in terminal.raw
        terminal.press("?")
        terminal.until(lambda text: "PgUp" in text, "the help")
        terminal.press("\x1b")
        terminal.until(lambda text: "PgUp" not in text, "no help")


def test_nats_and_discovery_may_go_away_and_come_back(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as etcd, nats_server(tmp_path) as nats:
        with started("--etcd", etcd.endpoint, "--nats", nats.url, "--state", str(tmp_path)) as terminal:
            terminal.until(lambda text: "running 0" in text, "a view")
            nats.stop()
            terminal.until(lambda text: "so no load is known" in text and " old" in text, "the note of NATS")
            nats.start()
            terminal.until(lambda text: "so no load is known" not in text, "NATS again")
            etcd.stop()
            terminal.until(lambda text: "etcd" in text.partition("! ")[2], "the note of discovery")
            etcd.start()
            terminal.until(lambda text: "! " not in text, "discovery again")
            terminal.press("q")
            assert terminal.ended() == 0
        etcd.stop()
        with started("--etcd", etcd.endpoint, "--nats", nats.url, "--state", str(tmp_path)) as terminal:
            assert terminal.ended() == 1
            assert "error: " in terminal.text
            assert "does `./headrace up` run?" in "".join(terminal.lines)
            assert OTHER_SCREEN not in terminal.raw


def test_without_a_terminal_one_line_says_what_to_use(state: Path) -> None:
    words = [sys.executable, "-P", "-m", "deploy.local.cli", "top", "--state", str(state)]
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "not a terminal; use `headrace status --watch`" in done.stderr


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_terminal_that_cannot_place_text_is_refused(kind: str, state: Path) -> None:
    with started("--state", str(state), variables={"TERM": kind}) as terminal:
        assert terminal.ended() == 2
        assert f"TERM is '{kind}'; use `headrace status --watch`" in "".join(terminal.lines)


@pytest.mark.parametrize("every", ["0", "nan", "3601", "-1"])
def test_the_time_between_views_has_limits(every: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", f"--every={every}"]) == 2
    assert capsys.readouterr().err.startswith("error: --every is 0.2 to 3600 seconds")
