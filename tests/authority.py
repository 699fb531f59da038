"""An authority of a test's own, made with the program `openssl`: certificates of any name, also expired ones."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="no program openssl to make certificates")
_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """One authority; its own certificate is at `pem`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.pem = folder / f"{name}.pem"
        key = self.pem.with_suffix(".key")
        _openssl("req", "-x509", *_NEW, "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", self.pem)

    def sign(self, name: str, file: str = "server", *, days: int = 2) -> tuple[Path, Path]:
        """Return a certificate of a host's name or address, and its key. With -1 `days` it expired yesterday."""
        cert = self._folder / f"{file}.pem"
        key, request = cert.with_suffix(".key"), cert.with_suffix(".csr")
        kind = "IP" if name.replace(".", "").isdecimal() else "DNS"
        names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={kind}:{name}")
        _openssl("req", *_NEW, *names, "-keyout", key, "-out", request)
        signer = ("-CA", self.pem, "-CAkey", self.pem.with_suffix(".key"), "-CAcreateserial")
        _openssl("x509", "-req", "-days", str(days), *signer, "-copy_extensions", "copy", "-in", request, "-out", cert)
        return cert, key


def serving(cert: Path, key: Path, clients: Path | None = None) -> ssl.SSLContext:
    """Return the TLS of a server; it asks for certificates that an authority of `clients` has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    return context


def _openssl(*arguments: str | Path) -> None:
    subprocess.run([OPENSSL or "", *map(str, arguments)], check=True, capture_output=True)
