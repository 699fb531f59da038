"""deploy/local/stack/up.py: the shell around the supervisor, with small real programs as children."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.local.stack import servers
from deploy.local.stack.stack import AccessFiles, Launch, Stack
from deploy.local.stack.supervise import Program
from deploy.local.stack.up import Shell, check_port, exclusive
from deploy.local.state import StateDirectory
from deploy.local.terminal import Terminal
from shared.errors import ConfigError
from shared.runtime.logs import LogLine
from tests.deploy.stack.programs import LIMIT_S, STAYS, launch, until

ROOT = Path(__file__).resolve().parents[3]


def written(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_stages_drain_in_order(state_dir: StateDirectory) -> None:
    order = state_dir.home / "order"
    began = state_dir.home / "began"

    def script(name: str) -> str:
        return f"trap 'echo {name} >>{order}; exit 0' TERM; echo {name} >>{began}; {STAYS}"

    stages = {"nats": 3, "worker": 1, "router": 2, "frontend": 0}
    launches = tuple(launch(name, script(name), stage=stage) for name, stage in stages.items())
    shell = Shell(Stack(launches, {}, "", "", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(lambda: len(written(began)) == 4)
    shell.stop()
    assert await running == 0
    assert written(order) == ["frontend", "worker", "router", "nats"]


async def test_no_program_gets_the_hubs_token(state_dir: StateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_secret")
    monkeypatch.setenv("OTHER", "passed on")
    script = f"env >{state_dir.home}/env.new; mv {state_dir.home}/env.new {state_dir.home}/env; {STAYS}"
    shell = Shell(Stack((launch("router", script),), {}, "", "", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(lambda: (state_dir.home / "env").exists())
    shell.stop()
    assert await running == 0
    given = (state_dir.home / "env").read_text()
    assert "OTHER=passed on\n" in given
    assert "hf_secret" not in given


async def test_a_crashed_program_is_started_again_and_the_notice_shows_why(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    began = state_dir.home / "began"
    script = f"echo x >>{began}; [ $(wc -l <{began}) -gt 1 ] || {{ echo 'no luck' >&2; exit 1; }}; {STAYS}"
    shell = Shell(Stack((launch("router", script),), {}, "", "", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(lambda: len(written(began)) == 2)
    shell.stop()
    assert await running == 0
    assert "router ended (status 1); it starts again in 0.5 s: no luck" in capsys.readouterr().err


async def test_a_wrong_configuration_ends_it_all_with_the_programs_own_words(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "echo 'info: loading' >&2; echo 'model.safetensors: torn' >&2; exit 2"
    launches = (launch("worker-0", script), launch("router", STAYS, stage=2))
    assert await Shell(Stack(launches, {}, "", "", "", ""), state_dir, Terminal()).run() == 1
    said = capsys.readouterr().err
    assert "error: worker-0 cannot work as configured:\n  info: loading\n  model.safetensors: torn\n" in said
    assert said.endswith("\n  router: draining\nerror: worker-0: model.safetensors: torn\n")


async def test_programs_are_added_and_removed_while_it_runs(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    file = state_dir.run / "added.toml"
    program = Program("added", 1, 10.0, needed=False)
    stays = Launch(program, ("/bin/sh", "-c", STAYS), added=True)
    wrong = Launch(program, ("/bin/sh", "-c", "echo 'another model' >&2; exit 2"), added=True)

    async def beside(shell: Shell) -> None:
        shell.add(stays, {file: "text"})
        assert shell.find("added") is stays
        await until(lambda: state_dir.record.exists() and "added" in state_dir.record.read_text())
        assert file.read_text() == "text"
        shell.remove("added")
        await until(lambda: shell.find("added") is None)
        shell.add(wrong, {})
        await until(lambda: bool(shell.given_up("added")))
        assert shell.given_up("added") == "another model"
        shell.remove("added")
        await until(lambda: shell.find("added") is None)
        assert shell.given_up("added") == ""
        shell.stop()
        await until(lambda: shell.stopping)

    assert await Shell(Stack((launch("router", STAYS),), {}, "", "", "", ""), state_dir, Terminal()).run(beside) == 0
    assert "another model" not in capsys.readouterr().err, "who added it says why"


def test_threads_that_ask_for_ports_at_once_get_different_ones() -> None:
    with ThreadPoolExecutor(8) as threads:
        found = [port for ports in threads.map(servers.free_ports, [20] * 12) for port in ports]
    assert len({*found}) == len(found) == 240


async def test_what_is_not_needed_may_have_a_wrong_configuration(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    url = f"http://127.0.0.1:{port}"
    serve = f"exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"
    no_room = "echo 'a pool of 1.0 GiB has no room' >&2; exit 2"
    kvbm = Launch(Program("kvbm", 2, 10.0, needed=False), ("/bin/sh", "-c", no_room), "http://127.0.0.1:1")
    (state_dir.run / "health").write_text("well")
    launches = (kvbm, launch("frontend", serve, observe=url))
    shell = Shell(Stack(launches, {}, url, "tiny", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    said = ["", ""]

    def is_told() -> bool:
        for stream, text in enumerate(capsys.readouterr()):
            said[stream] += text
        return bool(said[0]) and "no room" in said[1]

    await until(is_told)
    shell.stop()
    assert await running == 0
    assert said[0].startswith("ready ")
    assert "\nwithout kvbm: a pool of 1.0 GiB has no room\n" in f"\n{said[1]}"


SLOW_TO_DRAIN = """
import signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"reasons": ["1 request runs, up to 20 s"]}')
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


async def test_what_a_program_that_drains_waits_for_is_said_once(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    arguments = (sys.executable, "-c", SLOW_TO_DRAIN, str(port))
    slow = Launch(Program("frontend", 0, 1000.0), arguments, f"http://127.0.0.1:{port}")
    shell = Shell(Stack((slow,), {}, "", "", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(lambda: not servers.is_free(port))
    shell.stop()
    said = ""

    def is_told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "draining\n" in said and "up to 20 s" in said.partition("draining\n")[2]

    await until(is_told)
    shell.stop()
    assert await running == 0
    assert said.partition("draining\n")[2].count("up to 20 s") == 1


async def test_a_second_stop_kills_what_does_not_drain(state_dir: StateDirectory) -> None:
    began = state_dir.home / "began"
    stubborn = launch("worker-0", f"trap '' TERM; echo $$ >{began}; {STAYS}", limit_s=1000.0)
    shell = Shell(Stack((stubborn,), {}, "", "", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(lambda: bool(written(began)))
    shell.stop()
    shell.stop()
    assert await running == 0
    assert not alive(int(written(began)[0]))


async def test_a_program_that_does_not_drain_in_time_is_killed(state_dir: StateDirectory) -> None:
    began = state_dir.home / "began"
    stubborn = launch("worker-0", f"trap '' TERM; echo $$ >{began}; {STAYS}", limit_s=0.1)
    shell = Shell(Stack((stubborn,), {}, "", "", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(lambda: bool(written(began)))
    shell.stop()
    assert await running == 0


async def test_ready_is_said_once_the_frontend_is_healthy(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    url = f"http://127.0.0.1:{port}"
    serve = f"exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"  # in state_dir.run: /health is a file there
    shell = Shell(Stack((launch("frontend", serve, observe=url),), {}, url, "tiny", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(state_dir.record.exists)
    (state_dir.run / "health").write_text("well")
    said = ""

    def is_ready() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return bool(said)

    await until(is_ready)
    shell.stop()
    await running
    assert said == f"ready {url}/v1\n"


async def test_what_a_ready_service_notes_of_its_settings_is_shown_once(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    url = f"http://127.0.0.1:{port}"
    (state_dir.run / "health").write_text('{"ready": true, "reasons": [], "notes": ["little KV", "events are off"]}')
    serve = f"exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"
    shell = Shell(Stack((launch("worker-0", serve, observe=url),), {}, url, "tiny", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    said = ""

    def is_noted() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "worker-0: little KV; events are off\n" in said

    await until(is_noted)
    shell.stop()
    await running
    assert (said + capsys.readouterr().err).count("little KV") == 1


async def test_a_service_that_ended_by_itself_is_said_to_be_ready_once_it_is(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    began, url = state_dir.home / "began", f"http://127.0.0.1:{port}"
    (state_dir.run / "health").write_text("well")
    serve = f"exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"
    worker = launch("worker-0", f"echo $$ >>{began}; {serve}", observe=url)
    shell = Shell(Stack((worker,), {}, url, "tiny", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    await until(lambda: bool(written(began)) and not servers.is_free(port))
    os.kill(int(written(began)[0]), signal.SIGKILL)
    said = ""

    def is_back() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "worker-0 has started again and is ready" in said

    await until(is_back)
    shell.stop()
    await running
    ended, _, after = said.partition("worker-0 ended (SIGKILL); it starts again in 0.5 s")
    assert "is ready" not in ended
    assert after.count("worker-0 has started again and is ready") == 1
    assert len(written(began)) == 2


async def test_an_engine_that_a_worker_has_lost_is_shown_and_when_it_is_back(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    url = f"http://127.0.0.1:{port}"
    (state_dir.run / "health").write_text("well")
    lost = "the engine is lost (RankLost: rank 1); the standby, process 7, takes over"
    logged = logging.LogRecord("services.worker.engine.supervisor", logging.ERROR, "", 1, lost, None, None)
    (state_dir.home / "line").write_text(LogLine("worker", "w1").format(logged) + "\n")
    serve = f"cat {state_dir.home / 'line'}; exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"
    shell = Shell(Stack((launch("worker-0", serve, observe=url),), {}, url, "tiny", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    said = ""

    def is_back() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "worker-0 is ready again\n" in said

    await until(is_back)
    shell.stop()
    await running
    assert f"worker-0: {lost}\n" in said
    assert (said + capsys.readouterr().err).count(lost) == 1


async def test_a_standby_that_is_lost_does_not_make_its_worker_ready_again(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    url = f"http://127.0.0.1:{port}"
    (state_dir.run / "health").write_text("well")
    lost = "the standby is lost (no room); starting another in 10 s", "the engine is lost (7); starting another in 0 s"
    for number, text in enumerate(lost):
        logged = logging.LogRecord("services.worker.engine.standby", logging.ERROR, "", 1, text, None, None)
        (state_dir.home / f"line-{number}").write_text(LogLine("worker", "w1").format(logged) + "\n")
    first = f"cat {state_dir.home / 'line-0'}; touch {state_dir.home / 'first'}; {STAYS}"
    then = f"until [ -e {state_dir.home / 'first'} ]; do sleep 0.05; done; cat {state_dir.home / 'line-1'}"
    then += f"; exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"  # both are as healthy as it is
    launches = launch("worker-0", first, observe=url), launch("worker-1", then, observe=url)
    shell = Shell(Stack(launches, {}, url, "tiny", "", ""), state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    said = ""

    def is_back() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "worker-1 is ready again\n" in said

    await until(is_back)
    shell.stop()
    await running
    assert f"worker-0: {lost[0]}\n" in said
    assert "worker-0 is ready again" not in said


async def test_the_last_words_of_the_start_trust_the_certificate_that_was_given(
    state_dir: StateDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = servers.free_ports(1)
    url = f"http://127.0.0.1:{port}"
    serve = f"exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"
    access = AccessFiles(tls_cert="/its own/tls.pem", tls_key="/its own/tls.key")
    stack = Stack((launch("frontend", serve, observe=url),), {}, "https://127.0.0.1:8000", "tiny", "", "", access)
    shell = Shell(stack, state_dir, Terminal())
    running = asyncio.create_task(shell.run())
    (state_dir.run / "health").write_text("well")
    said = ""

    def is_complete() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "stop:    " in said

    await until(is_complete)
    shell.stop()
    await running
    assert "ask:     SSL_CERT_FILE='/its own/tls.pem' ./headrace chat" in said
    assert "   or:   curl --cacert '/its own/tls.pem' https://127.0.0.1:8000/v1/chat/completions" in said


KILLED = """
import asyncio, sys
from pathlib import Path
from deploy.local.stack.stack import Launch, Stack
from deploy.local.state import StateDirectory
from deploy.local.stack.supervise import Program
from deploy.local.terminal import Terminal
from deploy.local.stack.up import Shell
script = "trap '' TERM HUP INT; echo $$ >>began; while :; do sleep 0.02; done"
launches = tuple(Launch(Program(name, 0, 9.0), ("/bin/sh", "-c", script)) for name in "ab")
asyncio.run(Shell(Stack(launches, {}, "", "", "", ""), StateDirectory(Path(sys.argv[1])), Terminal()).run())
"""


def test_no_child_outlives_an_up_that_was_killed(state_dir: StateDirectory) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(state_dir.home)], cwd=ROOT)
    deadline = time.monotonic() + LIMIT_S
    while len(written(state_dir.run / "began")) < 2:
        assert time.monotonic() < deadline
    children = [int(pid) for pid in written(state_dir.run / "began")]
    assert all(alive(pid) for pid in children)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", servers.free_ports(1)[0]))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"port {port} is taken; choose another with --port"),
            exclusive(StateDirectory(tmp_path), port),
        ):
            pass


FIRST_OF_ALL = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())


@pytest.mark.skipif(FIRST_OF_ALL <= 81, reason="here every user may listen on every port")
def test_a_port_that_is_not_for_this_user_is_said_to_be_so() -> None:
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(ConfigError, match="port 81 is not for this user; choose one above 1023 with --port"):
            check_port(81)
    finally:
        os.seteuid(user)


def test_a_second_up_with_the_same_state_names_the_first(tmp_path: Path) -> None:
    state_dir = StateDirectory(tmp_path)
    holds = "import fcntl, sys\nlock = open(sys.argv[1], 'a+')\nfcntl.flock(lock, fcntl.LOCK_EX)\n"
    holds += (
        "lock.write('pid 42, http://127.0.0.1:8000/v1')\nlock.flush()\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holds, str(state_dir.home / "up.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with (
            pytest.raises(ConfigError, match=r"another `up` runs here: pid 42, http://127.0.0.1:8000/v1"),
            exclusive(state_dir, servers.free_ports(1)[0]),
        ):
            pass
        assert first.stdin is not None
        first.stdin.close()


def test_a_state_directory_that_cannot_be_made_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"state directory .*file/state: Not a directory"),
        exclusive(StateDirectory(tmp_path / "file" / "state"), servers.free_ports(1)[0]),
    ):
        pass


def test_free_ports_are_distinct_and_out_of_the_kernels_way() -> None:
    ports = servers.free_ports(8)
    assert len(set(ports)) == 8
    assert all(servers.FIRST_PORT <= port <= servers.LAST_PORT for port in ports)
    assert all(servers.is_free(port) for port in ports)


AS_FROM_THE_FIRST = "import secrets; from deploy.local.stack import servers; secrets.randbelow = lambda _: 0"


def test_a_port_is_given_once_until_a_program_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    ours, ours_again = servers.free_ports(8), servers.free_ports(8)
    asked = f"{AS_FROM_THE_FIRST}; print(*servers.free_ports(8))"
    theirs = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert len({*ours, *ours_again, *map(int, theirs.split())}) == 3 * 8
    with socket.create_server(("127.0.0.1", ours[0])):
        servers.free_ports(1)
    assert ours[0] not in servers._claims


def test_ports_that_no_program_ever_used_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "CLAIMS_LIMIT", 4)
    first = servers.free_ports(1)
    for _ in range(8):
        servers.free_ports(1)
    assert len(servers._claims) <= 4 + 1
    assert first[0] not in servers._claims


def test_the_servers_of_the_wheels_are_programs() -> None:
    assert os.access(servers.nats_server(), os.X_OK)
    assert os.access(servers.etcd(), os.X_OK)
