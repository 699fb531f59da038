"""TLS between kvbms: both sides show a certificate of the fleet's own authority."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import warnings
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.kvbm.config import PeersConfig
from services.kvbm.peers import stream
from services.kvbm.peers.messages import PeerFault
from services.kvbm.peers.stream import PeerStream, peer_tls
from shared import file_reads
from shared.errors import ConfigError
from shared.model_file import read_model_file
from tests.kvbm.chains import chain
from tests.kvbm.peer_rig import PEERS, address, faults, machines, read
from tests.servers import free_port

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no program openssl to make certificates")
CONTENTS = chain(*range(1, 21))


def openssl(*arguments: str | Path) -> None:
    subprocess.run([OPENSSL or "", *map(str, arguments)], check=True, capture_output=True)


def authority(folder: Path, name: str) -> Path:
    """Make an authority NAME.pem and NAME.key."""
    made = folder / f"{name}.pem"
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl(*new, "-subj", f"/CN={name}", "-keyout", made.with_suffix(".key"), "-out", made)
    return made


def secured(folder: Path, name: str, signer: Path, believed: Path) -> PeersConfig:
    """Return settings with a certificate that `signer` has signed, which believe those of `believed`."""
    cert = folder / f"{name}.pem"
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}")
    openssl(*new, "-keyout", cert.with_suffix(".key"), "-out", cert.with_suffix(".csr"))
    sign = ("x509", "-req", "-days", "2", "-CA", signer, "-CAkey", signer.with_suffix(".key"), "-CAcreateserial")
    openssl(*sign, "-in", cert.with_suffix(".csr"), "-out", cert)
    return replace(PEERS, tls_cert=str(cert), tls_key=str(cert.with_suffix(".key")), tls_ca=str(believed))


async def test_blocks_come_over_tls(tmp_path: Path) -> None:
    fleet = authority(tmp_path, "fleet")
    lender, reader = secured(tmp_path, "l", fleet, fleet), secured(tmp_path, "r", fleet, fleet)
    async with machines(tmp_path, lender=lender, reader=reader) as (one, a, two, b):
        await a.store(CONTENTS)
        for _ in range(2):
            done = await read(two, address(one), CONTENTS)
            assert done.fault is None
        assert await b.load(CONTENTS) == (20, 0)


async def test_a_kvbm_of_another_authority_is_not_believed_and_gets_nothing(tmp_path: Path) -> None:
    fleet, other = authority(tmp_path, "fleet"), authority(tmp_path, "other")
    lender = secured(tmp_path, "l", fleet, fleet)
    for name, signer, believed in (("untrusted", other, fleet), ("untrusting", fleet, other)):
        (folder := tmp_path / f"run-{name}").mkdir()
        reader = secured(tmp_path, name, signer, believed)
        async with machines(folder, lender=lender, reader=reader) as (one, a, two, _):
            await a.store(CONTENTS)
            assert (await read(two, address(one), CONTENTS)).fault is not None
            assert faults(two, "unreachable") + faults(two, "closed") == 1
            assert one.metric("headrace_kvbm_peer_sent_blocks_total") == 0


async def test_a_certificate_that_is_renewed_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    fleet, other = authority(tmp_path, "fleet"), authority(tmp_path, "other")
    lender, reader = secured(tmp_path, "l", fleet, fleet), secured(tmp_path, "r", other, fleet)
    (tmp_path / "run").mkdir()
    async with machines(tmp_path / "run", lender=lender, reader=reader) as (one, a, two, b):
        await a.store(CONTENTS)
        assert (await read(two, address(one), CONTENTS)).fault is not None
        (tmp_path / "r.pem").write_text("no certificate")
        fault = (await read(two, address(one), CONTENTS)).fault
        assert fault is not None
        assert fault.code == "unreachable"
        assert f"peers.tls_cert {reader.tls_cert}" in str(fault)
        assert secured(tmp_path, "r", fleet, fleet) == reader
        assert (await read(two, address(one), CONTENTS)).fault is None
        assert await b.load(CONTENTS) == (20, 0)


@pytest.mark.parametrize("side", ["lender", "reader"])
async def test_files_that_hang_are_no_blocks_and_come_back(
    tmp_path: Path, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = authority(tmp_path, "fleet")
    lender, reader = secured(tmp_path, "l", fleet, fleet), secured(tmp_path, "r", fleet, fleet)
    slow, goes_on, begun = (
        Path(lender.tls_cert if side == "lender" else reader.tls_cert),
        threading.Event(),
        list[int](),
    )

    def reads(path: Path, limit_bytes: int) -> bytes:
        if path == slow and not goes_on.is_set():
            begun.append(1)
            assert goes_on.wait(60)
        return read_model_file(path, limit_bytes)

    async with machines(tmp_path, lender=lender, reader=reader) as (one, a, two, b):
        await a.store(CONTENTS)
        monkeypatch.setattr(file_reads, "READ_LIMIT_S", 0.2)
        monkeypatch.setattr(stream, "read_model_file", reads)
        try:
            faulty = await asyncio.gather(*(read(two, address(one), CONTENTS) for _ in range(3)))
            assert all(done.fault is not None for done in faulty)
            assert begun == [1], "reads at the same time are one"
        finally:
            goes_on.set()
        monkeypatch.setattr(file_reads, "READ_LIMIT_S", 60.0)
        assert (await read(two, address(one), CONTENTS)).fault is None
        assert await b.load(CONTENTS) == (20, 0)


def test_a_connection_that_is_reset_before_the_handshake_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listening:
        reader, (accepted, _) = socket.create_connection(listening.getsockname()), listening.accept()
        lender = PeerStream(accepted)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reader.close()
        with warnings.catch_warnings(record=True) as left_open:
            warnings.simplefilter("always", ResourceWarning)
            with pytest.raises(PeerFault, match=r"^no TLS: "):
                lender.encrypt(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server=True)
            lender.close()
            gc.collect()
        assert not left_open


async def test_one_side_without_tls_gets_nothing(tmp_path: Path) -> None:
    fleet = authority(tmp_path, "fleet")
    with_tls = secured(tmp_path, "l", fleet, fleet)
    for number, (lender, reader) in enumerate(((with_tls, PEERS), (PEERS, with_tls))):
        (folder := tmp_path / str(number)).mkdir()
        async with machines(folder, lender=lender, reader=reader) as (one, a, two, _):
            await a.store(CONTENTS)
            assert (await read(two, address(one), CONTENTS, 1.0)).fault is not None
            assert one.metric("headrace_kvbm_peer_sent_blocks_total") == 0


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    fleet = authority(tmp_path, "fleet")
    good = secured(tmp_path, "l", fleet, fleet)
    assert peer_tls(PEERS) is None
    assert peer_tls(good) is not None
    for wrong in ({"tls_ca": str(tmp_path / "l.key")}, {"tls_key": str(fleet)}):
        with pytest.raises(ConfigError, match="tls_ca"):
            peer_tls(replace(good, **wrong))
    os.mkfifo(tmp_path / "pipe")
    for name in ("tls_cert", "tls_key", "tls_ca"):
        for file, said in (("missing", "No such file or directory"), ("pipe", "not a regular file")):
            with pytest.raises(ConfigError, match=rf"^peers\.{name}: {tmp_path / file}: {said}$"):
                peer_tls(replace(good, **{name: str(tmp_path / file)}))


@pytest.mark.parametrize("names", [["tls_cert"], ["tls_cert", "tls_key"], ["tls_ca"]])
def test_the_three_files_need_each_other(names: list[str]) -> None:
    with pytest.raises(ValueError, match="need each other"):
        PeersConfig(**dict.fromkeys(names, "file"))  # type: ignore[arg-type]
