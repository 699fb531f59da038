"""deploy/local/check/run.py: the command as people start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.local.check import bus, discovery, peer
from deploy.local.check.child import GRACE_S, LIMITS_S
from deploy.local.check.run import MOST_COLUMNS, CheckReport, counted, plain, render
from deploy.local.check.verdicts import Verdict, verdicts
from tests.deploy.check.measured import BUS, WELL
from tests.deploy.up_state import up_state
from tests.servers import free_port, nats_server
from tests.terminal_screen import terminal_screen

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "deploy.local.cli", "check", *words]


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**inherited, "COLUMNS": "80", **more}


def run(state: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--state", str(state), *words),
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return each verdict by its name, after a look at the status."""
    assert done.stderr == ""
    read = msgspec.json.decode(done.stdout, type=CheckReport)
    assert done.returncode == int(any(each.state == "bad" for each in read.verdicts))
    return {each.name: each for each in read.verdicts}


def test_all_limits_together_are_below_a_minute() -> None:
    network_s = bus.LIMIT_S + bus.ANSWER_LIMIT_S + discovery.LIMIT_S + peer.LIMIT_S
    assert network_s + sum(LIMITS_S.values()) + len(LIMITS_S) * GRACE_S < 60


def test_without_servers_the_machine_alone_is_measured_in_80_columns(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "skipped  NATS: not measured" in lines
    assert "skipped  etcd: not measured" in lines
    assert "skipped  peer: not measured" in lines
    assert any(line.split(" ", 1)[1].lstrip().startswith("pool room: ") for line in lines if line[:1].strip())
    counts = {
        state: sum(line.startswith(f"{state:<9}") for line in lines) for state in ("ok", "warn", "bad", "skipped")
    }
    assert lines[-1] == ", ".join(f"{number} {state}" for state, number in counts.items())
    assert done.returncode == int(counts["bad"] > 0)
    assert list(tmp_path.iterdir()) == []


def test_servers_that_are_named_are_measured(tmp_path: Path, nats_url: str, etcd_endpoint: str) -> None:
    found = report(run(tmp_path, "--nats", nats_url, "--etcd", etcd_endpoint, "--json"))
    assert found["NATS payload"].state == "ok"
    assert (found["NATS payload"].value, found["NATS payload"].unit) == (8 << 20, "bytes")
    assert found["etcd value"].state == "ok"
    assert found["NATS server"].shown.startswith(f"{nats_url}, version 2.")


def test_servers_that_are_named_and_not_there_are_bad_and_spoil_nothing_else(tmp_path: Path) -> None:
    nats, etcd, other = free_port(), free_port(), free_port()
    done = run(
        tmp_path,
        *("--nats", f"nats://127.0.0.1:{nats}", "--etcd", f"127.0.0.1:{etcd}", "--peer", f"127.0.0.1:{other}"),
        "--json",
    )
    found = report(done)
    assert {name: found[name].state for name in ("NATS", "etcd", "peer")} == dict.fromkeys(
        ("NATS", "etcd", "peer"), "bad"
    )
    assert {"pool room", "huge pages"} <= found.keys()
    assert done.returncode == 1


def test_users_and_passwords_come_from_the_environment(tmp_path: Path) -> None:
    with nats_server(tmp_path, "authorization { user: services, password: right }") as server:
        for password, state in (("right", "ok"), ("very-wrong", "bad")):
            variables = {"HEADRACE_NATS_URL": server.url, "HEADRACE_NATS_USER": "services"}
            done = run(tmp_path / "none", "--json", **variables, HEADRACE_NATS_PASSWORD=password)
            found = report(done)
            assert found["NATS server" if state == "ok" else "NATS"].state == state
            assert "very-wrong" not in done.stdout


def test_the_servers_of_an_up_that_runs_here_are_measured(tmp_path: Path) -> None:
    with up_state(tmp_path) as state:
        found = report(run(state, "--json"))
    assert found["NATS payload"].state == "ok"
    assert found["etcd"].state == "skipped"
    assert "files in " in found["etcd"].meaning


def test_a_store_that_is_too_large_is_bad_only_if_it_was_asked_for(tmp_path: Path) -> None:
    found = report(run(tmp_path, "--kvbm-bytes", "900T", "--json"))
    assert found["pool room"].state == "bad"


def test_two_machines_measure_each_other(tmp_path: Path) -> None:
    with served() as address:
        done = run(tmp_path, "--peer", address, "--json")
        found = report(done)
        measured = json.loads(done.stdout)["measurements"]["peer"]
    assert found["road sockets"].state == "ok"
    assert found["road NIXL"].state == "skipped"
    assert [(each["outward"], each["streams"]) for each in measured["rates"]] == [
        (True, 1),
        (True, peer.STREAMS),
        (False, 1),
        (False, peer.STREAMS),
    ]


@contextmanager
def served() -> Iterator[str]:
    """Yield the address of a process that serves; Ctrl-C ends it well."""
    words = command("--serve", f"127.0.0.1:{free_port()}")
    with subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
            server.send_signal(signal.SIGINT)
            assert server.wait(LIMIT_S) == 0
        finally:
            server.kill()


def test_ctrl_c_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    words = command("--state", str(tmp_path / "none"), "--kvbm-disk", str(tmp_path))
    with subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not any(str(tmp_path) in each for each in files_of(child.pid)):
                if child.poll() is not None:
                    pytest.skip("the disk was measured before it was seen, or there is no room")
                assert time.monotonic() < deadline
                time.sleep(0.005)
            os.killpg(child.pid, signal.SIGINT)
            assert child.wait(LIMIT_S) == 130
            while processes_of(child.pid):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            child.kill()
    assert list(tmp_path.iterdir()) == []


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that are alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(entry.parent.name))
    return found


def files_of(session: int) -> list[str]:
    """Return the paths of all open files of a session's processes."""
    found = []
    for process in processes_of(session):
        for link in Path(f"/proc/{process}/fd").glob("*"):
            try:
                found.append(str(link.readlink()))
            except OSError:
                continue
    return found


def test_on_a_terminal_the_progress_is_gone_at_the_end_and_states_have_colours(tmp_path: Path) -> None:
    words = command("--state", str(tmp_path))
    with terminal_screen(words, {"NO_PROXY": "*"}, cwd=ROOT, rows=200) as terminal:
        assert terminal.ended() in (0, 1)
        assert b"measures memory" in terminal.raw
        assert b"\x1b[32mok\x1b[0m       pool file system: " in terminal.raw
        assert "measures" not in terminal.text
        assert any(line == "skipped  NATS: not measured" for line in terminal.lines)


def test_the_result_goes_through_a_pipe_that_closes_early(tmp_path: Path) -> None:
    shell = f"{' '.join(command('--state', str(tmp_path)))} | head -1"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    shown = render(verdicts(WELL), columns)
    assert max(map(len, shown.splitlines())) <= columns


def test_a_line_of_the_result_is_as_the_documents_show_it() -> None:
    found = replace(WELL, bus=replace(BUS, max_payload_bytes=1 << 20, echoed_bytes=0))
    shown = render(verdicts(found), 80)
    assert (
        "warn     NATS payload: max_payload 1 MiB, nats.payload_limit_bytes 4 MiB\n"
        "         Prompts of more than some 262,144 tokens, and larger bodies of NATS\n"
        "         clients, are refused. The server counts headers too: a message that is\n"
    ) in shown
    assert "\n         set: max_payload: 5MB in the file of nats-server; or, to refuse\n" in shown
    assert shown.endswith("\n\n26 ok, 1 warn, 0 bad, 2 skipped")


def test_a_very_wide_terminal_has_lines_that_can_be_read() -> None:
    assert max(map(len, render(verdicts(WELL), 400).splitlines())) <= MOST_COLUMNS


def test_what_a_peer_chose_cannot_move_the_cursor_and_is_cut_off() -> None:
    shown = render([Verdict("peer", "bad", "\x1b[2J" + "x" * 10_000, "y\r\n.\x07", "")], 80)
    assert shown.replace("\n", "").isprintable()
    assert len(shown) < 1000


@given(st.text())
def test_plain_text_is_printable(text: str) -> None:
    assert plain(text).isprintable()


def test_each_state_is_counted() -> None:
    assert counted([]) == "0 ok, 0 warn, 0 bad, 0 skipped"
