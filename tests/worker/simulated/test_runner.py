from __future__ import annotations

import time

import pytest

from services.worker.messages import Ready
from services.worker.runner import Work
from services.worker.simulated.runner import EchoRunner
from shared.errors import ConfigError
from shared.messages import KvLayout, Sampling

FACTS = Ready(16, 10, (0,), 4, 4, KvLayout("float32", 1, 1, 1, 4), embedding_size=64)


def test_the_echo_engine_has_no_kv_to_exchange() -> None:
    with pytest.raises(ConfigError, match="echo engine has no KV to exchange"):
        EchoRunner(FACTS).mover(time.monotonic)


def test_the_echo_engine_has_no_hidden_states_to_embed() -> None:
    assert EchoRunner(FACTS).facts.embedding_size == 0


def test_the_echo_engine_begins_again_until_it_has_the_least_tokens_and_says_no_barred_one() -> None:
    echo, history = EchoRunner(FACTS), [5, 6, 7]
    sampling = Sampling(max_tokens=9, min_tokens=5, stop_token_ids=(6,))
    work = Work(0, history, 0, 3, [0], sampling, 3, (0, 6))
    while len(history) < 9:
        (drawn,) = echo.step([work])
        assert drawn is not None
        history.append(drawn.token)
        work.start, work.end = len(history) - 1, len(history)
    assert history[3:] == [5, 1, 7, 5, 1, 0]
