"""The program of a diffusers engine: `PYTHON -m services.worker.diffusers.main CONFIG_JSON SOCKET_FD`.

PYTHON is that of the environment that `headrace install-diffusers` makes.

It ends on Shutdown, when a step takes too long, and when the shell dies.

docs/decisions/0056 says why an engine is a program with an environment of its own.
"""

from __future__ import annotations

import logging
import os
import sys

from services.worker.config import EngineConfig
from services.worker.contracts.messages import FIRST_TOKENS, FIRST_TOKENS_LIMIT_S, Failed, Loading
from services.worker.engine.channel import ChannelClosed, EngineEnd
from services.worker.engine.one_line import one_line
from services.worker.engine.program import run_program
from shared.errors import ConfigError, ModelError
from shared.installation import COMMAND

_log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Return the exit status, as `run_program` does."""
    return run_program(arguments, _guarded)


def _guarded(config: EngineConfig, channel: EngineEnd) -> Failed | None:
    """Run the engine until it ends, and return whatever it raises as a Failed. Raise ChannelClosed."""
    try:
        return _run(config, channel)
    except (ModelError, ConfigError) as wrong:
        return Failed(reason=str(wrong), model=True)
    except ChannelClosed:
        raise
    except Exception as wrong:  # noqa: BLE001 - the program's edge: the shell learns of every failure
        _log.exception("the engine failed")
        return Failed(reason=one_line(wrong))


def _run(config: EngineConfig, channel: EngineEnd) -> Failed | None:
    """Run the engine until it ends. Return why it failed, or None after Shutdown. Raise ModelError, ChannelClosed."""
    channel.send(Loading("loading diffusers", 0.0))
    try:
        from services.worker.diffusers.engine import DiffusersEngine
        from services.worker.diffusers.pipeline import load
        from services.worker.diffusers.trial import try_ways
    except Exception as wrong:  # noqa: BLE001 - packages that do not fit raise anything while they are imported
        _log.exception("diffusers cannot be loaded")
        text = f"diffusers cannot be loaded ({one_line(wrong)}); {COMMAND} install-diffusers makes its environment"
        return Failed(reason=text, model=True)
    channel.send(Loading("loading the pipeline", 0.1))
    pipeline = load(config.worker.model, config.worker.diffusers)
    try_ways(pipeline, FIRST_TOKENS_LIMIT_S, lambda: channel.send(Loading(FIRST_TOKENS, 0.9)))
    engine = DiffusersEngine(config, pipeline, channel)
    channel.send(engine.facts)
    return engine.run()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # threads of runs that stand still are in the middle of a pipeline
