"""The engines without arithmetic, as a worker's engine process runs them."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from services.worker.contracts.messages import Ready
from services.worker.contracts.runner import Work
from services.worker.model.facts import facts_of
from services.worker.simulated.runner import EchoRunner
from shared.errors import ConfigError
from shared.messages.cards import KvLayout
from shared.messages.frames import UNFOLLOWABLE
from shared.messages.generate import Sampling
from tests.tiny_model import write_tiny_model

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


def echoed(
    directory: Path, prompt: str, grammar: str, *, min_tokens: int = 0, barred_text: str = ""
) -> tuple[str, str]:
    """The text that the echo engine makes of a prompt until its end of sequence, and its error. `barred_text` are stop
    tokens."""
    write_tiny_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    facts = facts_of(directory, block_size=4, capacity_blocks=64)
    runner = EchoRunner(facts)
    history = tokenizer.encode(prompt).ids
    sampling = Sampling(max_tokens=64, min_tokens=min_tokens, grammar=grammar)
    barred = sorted({*facts.eos_token_ids, *tokenizer.encode(barred_text).ids})
    work = Work(1, history, 0, len(history), (), sampling, len(history), barred)
    try:
        while True:
            [drawn] = runner.step([work])
            assert drawn is not None
            if drawn.error or drawn.token in facts.eos_token_ids:
                return tokenizer.decode(history[work.prompt_tokens :]), drawn.error
            history.append(drawn.token)
            work = msgspec.structs.replace(work, start=work.end, end=len(history))
    finally:
        runner.close()


DIGITS = "%llguidance {}\nstart: /[0-9]{2,4}/"


@pytest.mark.parametrize(
    ("prompt", "text"), [("1815", "1815"), ("181", "181"), ("18 and more", "18"), ("18159", "1815")]
)
def test_the_echo_engine_ends_where_the_grammar_lets_it(tmp_path: Path, prompt: str, text: str) -> None:
    assert echoed(tmp_path / "tiny", prompt, DIGITS) == (text, "")


@pytest.mark.parametrize(
    ("prompt", "barred", "text"),
    [
        ("18 and more", "", "1800"),
        ("18", "", "1818"),
        ("18", "8", "1010"),
        ("x", "", "0000"),
        ("x", "012", "3333"),
        ("18", "0123456789", "1818"),  # digits come although all are barred: the grammar allows nothing else
    ],
)
def test_the_echo_engine_does_not_end_before_the_least_tokens_while_the_grammar_allows_others(
    tmp_path: Path, prompt: str, barred: str, text: str
) -> None:
    assert echoed(tmp_path / "tiny", prompt, DIGITS, min_tokens=4, barred_text=barred) == (text, "")


@pytest.mark.parametrize(("prompt", "text"), [("x", ""), ("1x", "1"), ("1", "1")])
def test_a_prompt_that_breaks_the_grammar_is_the_echo_engines_error(tmp_path: Path, prompt: str, text: str) -> None:
    said, error = echoed(tmp_path / "tiny", prompt, DIGITS)
    assert said == text
    assert error.startswith(UNFOLLOWABLE)


def test_the_echo_engine_supports_grammars_where_it_can_read_the_tokenizer(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    for readable in (True, False):
        runner = EchoRunner(facts_of(model, block_size=4, capacity_blocks=64))
        assert runner.facts.grammars is readable
        runner.close()
        (model / "tokenizer.json").write_text("{}")
