"""The connector's lines in vLLM's log.

A plain `vllm serve` gives handlers to the logger `vllm` alone. Without this, lines of Headrace's modules would have no
time and no process, and those of the level INFO, such as the one that names the kvbm, would be lost.
"""

from __future__ import annotations

import logging

PACKAGES = ("services", "shared")
"""Loggers above all of Headrace's."""


def log_with(name: str) -> None:
    """Give Headrace's loggers the handlers and the level of the logger `name`, unless they or the root have handlers:
    then the program has set up its log itself, as a worker of Headrace does."""
    theirs = logging.getLogger(name)
    if logging.getLogger().handlers or not theirs.handlers:
        return
    for package in PACKAGES:
        ours = logging.getLogger(package)
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False
