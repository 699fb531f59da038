"""shared/bus/nats_access.py: passwords, keys and certificates at real servers, each fault in one line, and files that
change while a connection is there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from nacl.signing import SigningKey

from shared.bus.nats_access import check_settings, read_access
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig
from shared.errors import BusDown, ConfigError
from tests.authority import Authority, needs_openssl
from tests.clusters import ServerTls, nats_tls
from tests.logged import logged
from tests.nats_users import USER, credentials, operator_settings, public_of, seed_of
from tests.servers import NatsServer, free_port, nats_server

DEADLINE_S = 120.0
HOST = "127.0.0.1"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Run a coroutine in either event loop: they report faults of TLS differently, and services use uvloop."""

    def it(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, DEADLINE_S))

    return it


@asynccontextmanager
async def connected(config: NatsConfig) -> AsyncIterator[NatsBus]:
    bus = await connect(config, "test", stop)
    try:
        yield bus
    finally:
        await bus.drain()


def stop(why: str) -> None:
    if why:
        raise BusDown(why)


async def heard(config: NatsConfig) -> None:
    """Connect, and hear what is published."""
    async with connected(config) as bus:
        came = asyncio.Queue[int]()

        async def receive(message: Any) -> None:
            came.put_nowait(len(message.payload))

        await bus.subscribe("news", receive)
        for size in (1, 3 << 20):
            await bus.publish("news", bytes(size))
            assert await came.get() == size


async def refused(config: NatsConfig, *said: str) -> None:
    """It is refused, in one line that begins with the first text and has the others."""
    with pytest.raises(BusDown) as wrong:
        await connect(config, "test", stop)
    line = str(wrong.value)
    assert re.match(said[0], line), line
    assert [each for each in said if not re.search(each, line)] == [], line
    assert "\n" not in line


@contextmanager
def tls_server(
    folder: Path, authority: Authority, name: str = HOST, *, days: int = 2, clients: bool = False
) -> Iterator[NatsServer]:
    files = ServerTls(authority.pem, *authority.sign(name, "server", days=days), clients=clients)
    with nats_server(folder, nats_tls(files)) as server:
        yield server


@needs_openssl
def test_over_tls_what_is_published_is_heard_and_each_fault_is_one_line(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    at = r"^NATS at nats://127\.0\.0\.1:\d+: "
    with tls_server(tmp_path, ours) as server:
        run(heard(NatsConfig(url=server.url, tls_ca=str(ours.pem))))
        run(heard(NatsConfig(url=f"tls://{HOST}:{server.port}", tls_ca=str(ours.pem))))
        unknown = (rf"{at}its certificate is refused: ", r"nats\.tls_ca names an authority$")
        run(refused(NatsConfig(url=server.url, tls_ca=str(other.pem)), *unknown))
        run(refused(NatsConfig(url=server.url), *unknown))
    with tls_server(tmp_path, ours, "elsewhere.test") as server:
        run(
            refused(
                NatsConfig(url=server.url, tls_ca=str(ours.pem)),
                rf"{at}its certificate is refused: IP address mismatch",
            )
        )
    with tls_server(tmp_path, ours, days=-1) as server:
        run(
            refused(
                NatsConfig(url=server.url, tls_ca=str(ours.pem)),
                rf"{at}its certificate is refused: certificate has expired",
            )
        )


@needs_openssl
def test_a_server_that_asks_for_certificates_gets_ours_and_says_whose_it_wants(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    cert, key = map(str, ours.sign("client", "client"))
    strange, old = map(str, other.sign("client", "strange")), map(str, ours.sign("client", "old", days=-1))
    with tls_server(tmp_path, ours, clients=True) as server:
        config = NatsConfig(url=server.url, tls_ca=str(ours.pem))
        set_it = r"set nats\.tls_cert and nats\.tls_key$"
        run(heard(NatsConfig(url=server.url, tls_ca=str(ours.pem), tls_cert=cert, tls_key=key)))
        run(refused(config, r"^NATS at nats://127\.0\.0\.1:\d+: TLS: ", "certificate", set_it))
        for its_cert, its_key in (strange, old):
            wrong = NatsConfig(url=server.url, tls_ca=str(ours.pem), tls_cert=its_cert, tls_key=its_key)
            run(refused(wrong, r"^NATS at nats://127\.0\.0\.1:\d+: TLS: ", set_it))


@needs_openssl
async def test_a_server_without_tls_gets_no_password(tmp_path: Path) -> None:
    sent = bytearray()
    ended = asyncio.Event()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id": "x", "version": "2.11.0", "max_payload": 1048576, "auth_required": true}\r\n')
        sent.extend(await reader.read())
        writer.close()
        ended.set()

    listening = await asyncio.start_server(plain, HOST, 0)
    port = listening.sockets[0].getsockname()[1]
    authority = str(Authority(tmp_path).pem)
    for url, ca in ((f"nats://{HOST}:{port}", authority), (f"tls://{HOST}:{port}", "")):
        config = NatsConfig(url=url, user="services", password="secret", tls_ca=ca)
        await refused(config, rf"^NATS at {url} speaks no TLS: nats\.url or nats\.tls_ca asks for it$")
        await asyncio.wait_for(ended.wait(), DEADLINE_S)
        ended.clear()
    assert not sent
    listening.close()


@needs_openssl
async def test_of_two_servers_one_with_a_wrong_certificate_is_named_and_the_other_serves(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    pair = other.sign(HOST, "wrong")
    with (
        tls_server(tmp_path / "good", ours) as good,
        nats_server(tmp_path / "bad", nats_tls(ServerTls(other.pem, *pair))) as bad,
        logged(f"no connection to NATS at {bad.url}", "shared.rate_limited_log") as named,
    ):
        async with connected(NatsConfig(url=f"{good.url},{bad.url}", tls_ca=str(ours.pem))) as bus:
            before = bus.connections
            await asyncio.to_thread(good.restart)
            async with asyncio.timeout(DEADLINE_S):
                while bus.connections == before:  # noqa: ASYNC110 - the bus has no event for it
                    await asyncio.sleep(0.01)
            assert named.is_set()


def password_users(password: str) -> str:
    return f'authorization {{ users = [{{ user: "services", password: "{password}" }}] }}\n'


async def changed(server: NatsServer, settings: str, bus: NatsBus) -> None:
    """Until the server with new settings has closed the connection, and there is another one."""
    before = bus.connections
    server.reload(settings)
    async with asyncio.timeout(DEADLINE_S):
        while bus.connections == before or not bus.connected:  # noqa: ASYNC110 - the bus has no event for it
            await asyncio.sleep(0.01)


async def test_a_password_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    with nats_server(tmp_path, password_users("first")) as server:
        config = NatsConfig(url=server.url, user="services", password_file=str(file))
        async with connected(config) as bus:
            with logged("refuses user 'services'", "shared.rate_limited_log") as said:
                server.reload(password_users("second"))
                await asyncio.wait_for(said.wait(), DEADLINE_S)
            file.write_text("second\n")
            async with asyncio.timeout(DEADLINE_S):
                await bus.wait_connected()
            file.write_text("third\n")
            await changed(server, password_users("third"), bus)
        file.write_text("wrong")
        await refused(config, r"^NATS at .* refuses user 'services' ", rf"change nats\.password_file {file}$")


async def test_an_nkey_is_shown_and_one_that_changes_is_read_again(tmp_path: Path) -> None:
    def users(key: SigningKey) -> str:
        return f"authorization {{ users = [{{ nkey: {public_of(key, USER)} }}] }}\n"

    first, second = SigningKey.generate(), SigningKey.generate()
    file = tmp_path / "seed"
    file.write_text(seed_of(first, USER) + "\n")
    with nats_server(tmp_path, users(first)) as server:
        config = NatsConfig(url=server.url, nkey_file=str(file))
        await heard(config)
        async with connected(config) as bus:
            file.write_text(seed_of(second, USER))
            await changed(server, users(second), bus)
        file.write_text(seed_of(first, USER))
        await refused(
            config, "^NATS at .* refuses the user of our key ", rf"change nats\.nkey_file {file}, or that user"
        )


async def test_a_creds_file_is_shown_to_a_server_with_an_operator(tmp_path: Path) -> None:
    operator, account, user, other = (SigningKey.generate() for _ in range(4))
    file = tmp_path / "user.creds"
    file.write_text(credentials(account, user))
    with nats_server(tmp_path, operator_settings(operator, account)) as server:
        config = NatsConfig(url=server.url, creds_file=str(file))
        await heard(config)
        for wrong in (credentials(other, user), credentials(account, user, lives_s=-60.0)):
            file.write_text(wrong)
            await refused(
                config, "^NATS at .* refuses the user of our key ", rf"change nats\.creds_file {file}, or that user"
            )


def test_files_that_cannot_be_used_are_one_line_at_the_start_which_shows_no_secret(tmp_path: Path) -> None:
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.write_text("\n")
    text.write_text("a secret of another kind\n")
    for config, said in (
        (NatsConfig(user="u", password_file="/none"), r"^nats\.password_file /none: No such file or directory$"),
        (NatsConfig(user="u", password_file=str(empty)), rf"^nats\.password_file {empty}: empty$"),
        (NatsConfig(nkey_file=str(text)), rf"^nats\.nkey_file {text}: no NKey seed of a user: "),
        (
            NatsConfig(creds_file=str(text)),
            rf"^nats\.creds_file {text}: it has not both a user's JWT and an NKey seed$",
        ),
        (
            NatsConfig(nkey_file="/a", creds_file="/b"),
            r"^nats\.nkey_file and nats\.creds_file: a connection has one user",
        ),
        (NatsConfig(tls_ca="/none"), r"^nats\.tls_ca /none: No such file or directory$"),
        (NatsConfig(tls_ca=str(text)), rf"^nats\.tls_ca {text}: no certificates in PEM$"),
        (NatsConfig(tls_cert=str(text)), r"^nats\.tls_cert, nats\.tls_key: a certificate and its key need each other$"),
        (NatsConfig(url=f"nats://{HOST}:{free_port()},b:1"), r"^nats\.url: .* is not nats://host:port"),
    ):
        with pytest.raises(ConfigError, match=said) as wrong:
            check_settings(config)
        assert "secret" not in str(wrong.value)
    assert read_access(NatsConfig(user="u", password="p")).password == "p"
    text.write_text(" pass word\n")
    assert read_access(NatsConfig(user="u", password="p", password_file=str(text))).password == "pass word"
