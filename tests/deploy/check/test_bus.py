"""deploy/local/check/bus.py: against real servers with various settings, and against what is no NATS server."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import nats
import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg

from deploy.local.check import bus
from deploy.local.check.measurements import BusMeasured, Unmeasured
from deploy.local.check.verdicts import Verdict, verdicts
from shared.config import NatsConfig
from tests.deploy.check.measured import WELL
from tests.servers import NatsServer, free_port, nats_server

USERS = """
authorization { users: [
  { user: services, password: right
    permissions: { publish: ["headrace.>"], subscribe: ["headrace.>", "_INBOX_services.>"] } }
  { user: client, password: right
    permissions: { publish: { allow: ["headrace.*.frontend.>"] }, subscribe: ["_INBOX.>"] } }
] }
"""


def config(url: str, user: str = "", password: str = "", inbox: str = "_INBOX") -> NatsConfig:
    return NatsConfig(url=url, user=user, password=password, inbox=inbox)


def measured(url: str, **settings: str) -> BusMeasured:
    """Measure, however slow this machine is. A user without a right gets no answer, and waits for its limit."""
    limits = ("LIMIT_S", "ECHO_LIMIT_S", *(() if settings else ("ANSWER_LIMIT_S",)))
    with pytest.MonkeyPatch.context() as patient:
        for name in limits:
            patient.setattr(bus, name, 60.0)
        found = bus.measure(config(url, **settings), "default")
    assert isinstance(found, BusMeasured), found
    return found


def unmeasured(url: str, **settings: str) -> Unmeasured:
    found = bus.measure(config(url, **settings), "default")
    assert isinstance(found, Unmeasured), found
    assert found.wanted
    return found


def judged(found: BusMeasured) -> dict[str, Verdict]:
    return {each.name: each for each in verdicts(replace(WELL, bus=found))}


def test_a_server_of_this_machine_is_measured(nats_url: str) -> None:
    found = measured(nats_url)
    assert 0 < found.round_trip_s <= found.slow_trip_s
    assert (found.max_payload_bytes, found.echoed_bytes, found.jetstream) == (8 << 20, 4 << 20, False)
    assert found.version.startswith("2.")
    assert not found.refused
    assert found.clock is not None
    assert found.clock.least_s <= 0 <= found.clock.most_s
    assert judged(found)["NATS payload"].state == "ok"


def test_a_small_limit_is_found_and_nothing_larger_is_sent(tmp_path: Path) -> None:
    with nats_server(tmp_path, "max_payload: 1MB\n") as server:
        found = measured(server.url)
    assert found.max_payload_bytes == 1 << 20
    assert 0 < found.echoed_bytes < 1 << 20
    assert judged(found)["NATS payload"].state == "warn"


def test_a_limit_of_almost_nothing_is_bad(tmp_path: Path) -> None:
    with nats_server(tmp_path, "max_payload: 300\n") as server:
        assert judged(measured(server.url))["NATS payload"].state == "bad"


def test_jetstream_is_seen(tmp_path: Path) -> None:
    with nats_server(tmp_path, f'jetstream {{ store_dir: "{tmp_path}/js" }}\n') as server:
        assert measured(server.url).jetstream


def test_a_user_with_the_rights_of_the_services_is_measured(tmp_path: Path) -> None:
    with nats_server(tmp_path, USERS) as server:
        found = measured(server.url, user="services", password="right", inbox="_INBOX_services")
        assert not found.refused
        assert found.echoed_bytes == 4 << 20
        assert found.clock is None, "this user may not ask the server for the time"
        other = measured(server.url, user="services", password="right")
        assert "_inbox" in other.refused, "of the inbox that these users do not have"


def test_a_user_without_rights_is_named(tmp_path: Path) -> None:
    with nats_server(tmp_path, USERS) as server:
        found = measured(server.url, user="client", password="right")
    assert "permissions violation" in found.refused.lower()
    assert judged(found)["NATS rights"].state == "bad"


def test_a_wrong_password_is_said_and_not_shown(tmp_path: Path) -> None:
    with nats_server(tmp_path, USERS) as server:
        found = unmeasured(server.url, user="services", password="very-wrong")
        without = unmeasured(server.url)
    assert "refuses user 'services'" in found.reason
    assert "nats.password" in found.reason
    assert "very-wrong" not in found.reason
    assert "without a user" in without.reason


def test_a_server_that_is_not_there_or_frozen_is_said(own_nats: NatsServer) -> None:
    own_nats.freeze()
    assert "answers at nats://127.0.0.1" in unmeasured(own_nats.url).reason
    own_nats.thaw()
    own_nats.kill()
    assert "--nats" in unmeasured(own_nats.url).advice


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {}\r\n", b"INFO not JSON\r\n", b"\x00" * 4096, b""]
)
def test_what_is_no_nats_server_is_given_up(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        host, port = listening.getsockname()
        assert "no NATS server answers" in unmeasured(f"nats://{host}:{port}").reason
        thread.join()


async def test_nothing_of_it_reaches_the_subjects_of_the_services(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    await client.subscribe("headrace.quiet.>", cb=hear)
    await client.flush()
    await asyncio.to_thread(bus.measure, NatsConfig(url=nats_url), "quiet")
    await client.drain()
    assert heard
    assert all(subject.startswith("headrace.quiet.check.") for subject in heard)


def test_of_two_servers_the_one_that_is_away_is_named_and_the_other_measured(nats_url: str) -> None:
    away = f"nats://127.0.0.1:{free_port()}"
    for url in (f"{away},{nats_url}", f"{nats_url},{away}"):
        found = measured(url)
        assert found.address == nats_url
        [down] = found.down
        assert down.startswith(f"no NATS server answers at {away}: ")
        assert judged(found)["NATS servers"].state == "warn"
    nowhere = unmeasured(f"{away},nats://127.0.0.1:{free_port()}")
    assert nowhere.reason.count("no NATS server answers at") == 2
