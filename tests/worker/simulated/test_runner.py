from __future__ import annotations

import time

import pytest

from services.worker.messages import Ready
from services.worker.simulated.runner import EchoRunner
from shared.errors import ConfigError
from shared.messages import KvLayout

FACTS = Ready(16, 10, (0,), 4, 4, KvLayout("float32", 1, 1, 1, 4), embedding_size=64)


def test_the_echo_engine_has_no_kv_to_exchange() -> None:
    with pytest.raises(ConfigError, match="echo engine has no KV to exchange"):
        EchoRunner(FACTS).mover(time.monotonic)


def test_the_echo_engine_has_no_hidden_states_to_embed() -> None:
    assert EchoRunner(FACTS).facts.embedding_size == 0
