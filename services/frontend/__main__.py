"""`headrace-frontend`: one frontend process."""

from __future__ import annotations

from services.frontend.app import serve
from services.frontend.config import FrontendConfig
from shared.runtime.lifecycle import ProcessSettings, run

FORCED_END_S = 10.0
"""Seconds added to `drain_delay_s` and `drain_s` before the process is ended by force."""


def process(config: FrontendConfig) -> ProcessSettings:
    """Return what the lifecycle needs of the settings."""
    limit_s = config.http.drain_delay_s + config.limits.drain_s + FORCED_END_S
    return ProcessSettings.of(config, limit_s, client_bus=True)


def main() -> None:
    """Run the frontend until it is stopped."""
    run("frontend", FrontendConfig, process, serve)


if __name__ == "__main__":
    main()
