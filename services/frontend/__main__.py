"""`headrace-frontend`: one frontend process."""

from __future__ import annotations

import os

from services.frontend.app import serve
from services.frontend.config import FrontendConfig
from shared.runtime.lifecycle import run

FORCED_END_S = 10.0
"""Seconds added to `drain_delay_s` and `drain_s` before the process is ended by force."""


def drain_limit_s(config: FrontendConfig) -> float:
    """Return the seconds from the first signal to the forced end."""
    return config.http.drain_delay_s + config.limits.drain_s + FORCED_END_S


def main() -> None:
    """Run the frontend until it is stopped."""
    os.environ["RUST_BACKTRACE"] = "0"  # a text on which a tokenizer panics is an error of its request
    run("frontend", FrontendConfig, serve, drain_limit_s, client_bus=True)


if __name__ == "__main__":
    main()
