from __future__ import annotations

import time

import pytest

from services.worker.messages import Ready
from services.worker.simulated.echo import EchoRunner
from shared.errors import ConfigError
from shared.messages import KvLayout

FACTS = Ready(16, 10, (0,), 4, 4, KvLayout("float32", 1, 1, 1, 4), embedding_size=64)


def test_an_engine_without_keys_and_values_has_none_to_exchange() -> None:
    with pytest.raises(ConfigError, match="echo engine has no KV to exchange"):
        EchoRunner(FACTS).mover(time.monotonic)


def test_what_has_no_hidden_states_embeds_nothing() -> None:
    assert EchoRunner(FACTS).facts.embedding_size == 0
