"""`headrace-frontend`: one frontend process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from services.frontend.config import FrontendConfig
from services.frontend.freed_memory import keep_freed_memory
from shared.api_keys import FILE_LIMIT_BYTES, read_keys
from shared.errors import ConfigError, ModelError
from shared.model_file import read_model_file
from shared.runtime.lifecycle import Service, run
from shared.runtime.observe import check_host
from shared.runtime.runtime import Runtime

FORCED_END_S = 10.0
"""Seconds added to `drain_delay_s` and `drain_s` before the process is ended by force."""


def drain_limit_s(config: FrontendConfig) -> float:
    """Return the seconds from the first signal to the forced end."""
    return config.http.drain_delay_s + config.limits.drain_s + FORCED_END_S


def check_files(config: FrontendConfig) -> None:
    """Check the addresses of the ports, their certificates and the keys file. Raise ConfigError or ModelError."""
    from services.frontend.serving.text_servers import read_text_files  # here: a frontend loads it in a thread

    http, picker, keys_file = config.http, config.picker, config.access.keys_file
    check_host("http.host", http.host)
    check_host("picker.host", picker.host)
    _check_tls({f"http.{name}": getattr(http, name) for name in ("tls_cert", "tls_key") if getattr(http, name)})
    _check_tls(picker.tls_files)
    read_text_files(config.text)
    if keys_file:
        content = _read("access.keys_file", keys_file)
        try:
            read_keys(content)
        except ConfigError as wrong:
            raise ConfigError(f"access.keys_file {keys_file}: {wrong}") from None


def _check_tls(files: Mapping[str, str]) -> None:
    """Check a port's certificate, its key and, if there is one, the file of authorities, by their settings."""
    from services.frontend.server.tls import tls_context  # here: what it imports, a frontend loads in a thread

    for setting, file in files.items():
        _read(setting, file)
    try:
        if files:
            tls_context(*map(Path, files.values()))
    except ConfigError as wrong:
        raise ConfigError(f"{', '.join(map(' '.join, files.items()))}: {wrong}") from None


def _read(setting: str, file: str) -> bytes:
    """Return the file that a setting names. Raise ConfigError."""
    try:
        return read_model_file(Path(file), FILE_LIMIT_BYTES)
    except ModelError as wrong:
        raise ConfigError(f"{setting} {wrong}") from None


def _load() -> Callable[[Runtime, FrontendConfig], Awaitable[None]]:
    """Load the frontend's modules, and return what serves."""
    from services.frontend.app import serve

    return serve


async def _serve_loaded(runtime: Runtime, config: FrontendConfig) -> None:
    """Serve. The modules are loaded in a thread, so that other services of this process start meanwhile."""
    serve = await asyncio.to_thread(_load)
    await serve(runtime, config)


SERVICE = Service("frontend", FrontendConfig, _serve_loaded, drain_limit_s, client_bus=True, check=check_files)


def main() -> None:
    """Run the frontend until it is stopped."""
    quieten_panics()
    keep_freed_memory()
    _load()  # alone in its process, it has nothing else to do
    run(SERVICE)


def quieten_panics() -> None:
    """Have Rust write no backtraces: a text on which a tokenizer panics is an error of its request."""
    os.environ["RUST_BACKTRACE"] = "0"


if __name__ == "__main__":
    main()
