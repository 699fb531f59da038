"""shared/outbound.py: the files of TLS towards servers, and servers over real TLS, each fault as one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from shared.errors import ConfigError
from shared.outbound import KEEP_ALIVE, TlsFiles, TlsNames, describe_fault, open_connector, read_tls
from tests.authority import Authority, needs_openssl, serving
from tests.servers import free_port

NAMES = TlsNames("--ca-file", "--client-cert", "--client-key")
pytestmark = needs_openssl


async def asked(tls: TlsFiles, *, server: tuple[Path, Path] | None, clients: Path | None = None) -> str:
    """Return what `vllm.test` answers at an address of loopback, or why it does not."""

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text=request.host)

    app, port = web.Application(), free_port()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    context = None if server is None else serving(*server, clients)
    await web.TCPSite(runner, "127.0.0.2", port, ssl_context=context).start()
    connector = open_connector("127.0.0.2", read_tls(tls, NAMES))
    try:
        async with aiohttp.ClientSession(connector=connector) as http, http.get(f"https://vllm.test:{port}/") as answer:
            return await answer.text()
    except (aiohttp.ClientError, OSError) as wrong:
        return describe_fault(wrong, "--ca-file")
    finally:
        await runner.cleanup()


async def test_a_server_is_checked_against_its_name_whatever_its_address_is(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours = TlsFiles(ca_file=str(authority.pem))
    assert (await asked(ours, server=authority.sign("vllm.test"))).startswith("vllm.test:")
    for name in ("other.test", "127.0.0.2"):
        said = await asked(ours, server=authority.sign(name))
        assert said == ("its certificate is refused: Hostname mismatch, certificate is not valid for 'vllm.test'")


async def test_a_certificate_that_expired_or_of_an_unknown_authority_is_refused(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    ours, pair = TlsFiles(ca_file=str(authority.pem)), authority.sign("vllm.test")
    expired = authority.sign("vllm.test", "expired", days=-1)
    assert await asked(ours, server=expired) == "its certificate is refused: certificate has expired"
    unknown = "its certificate is refused: unable to get local issuer certificate; --ca-file names an authority"
    assert await asked(ours, server=other.sign("vllm.test", "others")) == unknown
    assert await asked(TlsFiles(), server=pair) == unknown, "the system does not believe it"


async def test_a_server_that_asks_for_a_certificate_gets_ours(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, (cert, key) = authority.sign("vllm.test"), authority.sign("client", "client")
    ours = TlsFiles(str(authority.pem), str(cert), str(key))
    assert (await asked(ours, server=pair, clients=authority.pem)).startswith("vllm.test:")
    without = await asked(TlsFiles(ca_file=ours.ca_file), server=pair, clients=authority.pem)
    reset = ("Connection reset", "Server disconnected", "Cannot write")  # the alert may be lost with the connection
    assert without.startswith(("TLS: tlsv13 alert certificate required", *reset))


async def test_a_server_without_tls_is_named(tmp_path: Path) -> None:
    said = await asked(TlsFiles(ca_file=str(Authority(tmp_path).pem)), server=None)
    assert said.startswith("TLS: ")


def test_files_that_cannot_be_read_or_do_not_fit_are_one_line(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = map(str, authority.sign("client"))
    text = tmp_path / "text"
    for content in ("", "hello\n", "# Tanúsítvány\n"):
        text.write_text(content)
        with pytest.raises(ConfigError, match=rf"^--ca-file {text}: no certificates in PEM$"):
            read_tls(TlsFiles(ca_file=str(text)), NAMES)
    text.write_text("# Tanúsítvány\n" + authority.pem.read_text())
    assert read_tls(TlsFiles(ca_file=str(text)), NAMES) is not None
    for files, said in (
        (TlsFiles(ca_file="/none"), r"^--ca-file /none: No such file or directory$"),
        (TlsFiles(ca_file=str(tmp_path)), rf"^--ca-file {tmp_path}: not a regular file$"),
        (TlsFiles(ca_file="/dev/zero"), r"^--ca-file /dev/zero: not a regular file$"),
        (TlsFiles(client_cert=cert), r"^--client-cert, --client-key: a certificate and its key need each other$"),
        (TlsFiles(client_cert=cert, client_key="/none"), r"^--client-key /none: No such file or directory$"),
        (
            TlsFiles(client_cert=str(authority.pem), client_key=key),
            rf"^--client-cert {authority.pem}, --client-key {key}: key values mismatch$",
        ),
        (
            TlsFiles(client_cert=cert, client_key=cert),
            rf"^--client-cert {cert}, --client-key {cert}: no certificate and key in PEM, without a passphrase$",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            read_tls(files, NAMES)
    assert read_tls(TlsFiles(), NAMES) is None


async def test_a_connection_asks_whether_the_other_machine_is_still_there() -> None:
    async def waits(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await asyncio.Event().wait()
        return answer

    app, port = web.Application(), free_port()
    app.router.add_get("/", waits)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.2", port).start()
    try:
        connector = open_connector("127.0.0.2", None)
        async with aiohttp.ClientSession(connector=connector) as http, http.get(f"http://x.test:{port}/") as answer:
            assert answer.connection is not None
            assert answer.connection.transport is not None
            opened = answer.connection.transport.get_extra_info("socket")
            assert [opened.getsockopt(level, option) for level, option, _ in KEEP_ALIVE] == [1, 10, 5, 3]
    finally:
        await runner.cleanup()
