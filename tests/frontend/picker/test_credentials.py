"""TLS on the picker's port, with a gateway of the tests' own."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.frontend.auth import file_reload
from services.frontend.config import FrontendConfig, HttpConfig, PickerConfig
from shared.errors import ConfigError
from tests.authority import Authority, needs_openssl
from tests.frontend.peers import DEADLINE_S, world
from tests.frontend.picker.test_server import ONE, chosen, frontend
from tests.picker.gateway import connected, destination
from tests.servers import free_port

CERTIFICATES = Path(__file__).parents[1] / "certificates"


def trusting(name: str) -> grpc.ChannelCredentials:
    """The TLS of a gateway that believes one of the tests' certificates."""
    return grpc.ssl_channel_credentials((CERTIFICATES / f"{name}.pem").read_bytes())


def install(folder: Path, name: str) -> dict[str, Any]:
    """Put a certificate and its key into a folder that a test may change, and return the settings that name them."""
    named = {"tls_cert": folder / "tls.pem", "tls_key": folder / "tls.key"}
    for file in named.values():
        shutil.copy(CERTIFICATES / f"{name}{file.suffix}", file)
    return {setting: str(file) for setting, file in named.items()}


async def answers(address: str, tls: grpc.ChannelCredentials | None) -> bool:
    """Return whether a gateway with this TLS gets an answer on a new connection."""
    async with connected(address, tls) as gateway:
        with suppress(grpc.aio.AioRpcError):
            return await gateway.health("liveness") == 1
    return False


async def test_a_gateway_chooses_over_tls_and_a_plain_one_and_one_that_does_not_believe_get_nothing(
    directory: Path, tmp_path: Path
) -> None:
    async with frontend(directory, **install(tmp_path, "one")) as w:
        async with connected(w.picker, trusting("one")) as gateway:
            assert destination(await chosen(gateway.ask())) == (ONE, ONE)
        assert not await answers(w.picker, None)
        assert not await answers(w.picker, trusting("two"))


async def test_a_certificate_that_is_replaced_is_that_of_new_connections_and_a_wrong_one_changes_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reload, "POLL_S", 0.01)
    async with frontend(directory, **install(tmp_path, "one")) as w, asyncio.timeout(DEADLINE_S):
        async with connected(w.picker, trusting("one")) as before:
            assert await before.health("liveness") == 1
            install(tmp_path, "two")
            while not await answers(w.picker, trusting("two")):
                pass
            assert not await answers(w.picker, trusting("one"))
            assert await before.health("liveness") == 1
        shutil.copy(CERTIFICATES / "one.key", tmp_path / "tls.key")
        while w.metric("headrace_stale_files", file="picker_tls") != 1:
            assert await answers(w.picker, trusting("two"))
        assert await answers(w.picker, trusting("two"))


@needs_openssl
async def test_with_authorities_a_gateway_needs_a_certificate_that_one_of_them_has_signed(
    directory: Path, tmp_path: Path
) -> None:
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    cert, key = ours.sign("localhost")
    shown = {authority: authority.sign("gateway", f"of-{authority.pem.stem}") for authority in (ours, others)}

    def gateway(authority: Authority | None) -> grpc.ChannelCredentials:
        root = ours.pem.read_bytes()
        if authority is None:
            return grpc.ssl_channel_credentials(root)
        cert, key = shown[authority]
        return grpc.ssl_channel_credentials(root, key.read_bytes(), cert.read_bytes())

    files: dict[str, Any] = {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(ours.pem)}
    async with frontend(directory, **files) as w:
        assert await answers(w.picker, gateway(ours))
        assert not await answers(w.picker, gateway(others))
        assert not await answers(w.picker, gateway(None))


async def test_a_key_of_another_certificate_is_refused_at_the_start_by_the_settings(
    directory: Path, tmp_path: Path
) -> None:
    files = install(tmp_path, "one")
    shutil.copy(CERTIFICATES / "two.key", tmp_path / "tls.key")
    config = FrontendConfig(picker=PickerConfig(port=free_port(), **files), http=HttpConfig())
    with pytest.raises(ConfigError, match=r"^picker\.tls_cert .*/tls\.pem, picker\.tls_key .*/tls\.key: not a certifi"):
        async with world(directory, settings=config):
            pass
