"""The edge of an engine's program: `… CONFIG_JSON SOCKET_FD`, as the shell starts it. It ends on Shutdown and when the
shell dies."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress

import msgspec

from services.worker.config import EngineConfig
from services.worker.contracts.messages import Failed
from services.worker.engine.channel import ChannelClosed, EngineEnd
from shared.parent_death import die_with_parent
from shared.runtime import logs


def run_program(arguments: list[str], run: Callable[[EngineConfig, EngineEnd], Failed | None]) -> int:
    """Run an engine, which returns why it failed, or None after Shutdown. Return the exit status: 0 after Shutdown or
    when the shell has gone, 1 after Failed."""
    config = msgspec.json.decode(arguments[0], type=EngineConfig)
    die_with_parent(config.parent_pid)  # elsewhere the end of the channel is seen at the next report
    start_logs(config)
    # The shell answers a signal to the whole process group (Ctrl-C): it drains, then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments[1]))
    with closing(EngineEnd(connection)) as channel, suppress(ChannelClosed):
        failed = run(config, channel)
        if failed is not None:
            channel.send(failed)
            return 1
    return 0


def start_logs(config: EngineConfig) -> None:
    """Log as the worker does."""
    observe = config.worker.observe
    logs.start("worker", config.instance, observe.log_level, observe.log_format, model=config.model_name)
