"""The engines without arithmetic, as a worker's engine process runs them."""

from __future__ import annotations

import time
from pathlib import Path
from struct import unpack
from zlib import crc32

import msgspec
import pytest
from tokenizers import Tokenizer

from services.worker.config import SimulatedConfig
from services.worker.contracts.messages import Ready
from services.worker.contracts.runner import Drawn, Work
from services.worker.model.facts import facts_of
from services.worker.simulated.runner import EchoRunner, SimulatedModel, embedding_of
from services.worker.simulated.timing import Timing
from shared.errors import ConfigError
from shared.hashing import pack_tokens
from shared.messages.cards import KvLayout, Pooling
from shared.messages.frames import UNFOLLOWABLE, TokenLogprob
from shared.messages.generate import Sampling
from tests.tiny_model import write_tiny_model

FACTS = Ready(16, 10, (0,), 4, 4, KvLayout("float32", 1, 1, 1, 4), embedding_size=64)
EOS = 2
MODEL_FACTS = Ready(
    context_length=4096,
    vocab_size=320,
    eos_token_ids=(EOS, 0),
    block_size=16,
    capacity_blocks=64,
    kv_layout=KvLayout(dtype="float32", layers=0, kv_heads=0, head_dim=0, block_size=16),
)
PROMPT = [5, EOS, 7, 8]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


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


def model(output_tokens: int = 0) -> SimulatedModel:
    return SimulatedModel(MODEL_FACTS, Timing(SimulatedConfig()), output_tokens=output_tokens)


def answer(
    prompt: list[int], count: int, *, output_tokens: int = 0, produced: tuple[int, ...] = (), ignore_eos: bool = False
) -> list[int]:
    """Up to `count` tokens as the scheduler would ask for them, one a step; ends after an EOS, as it does."""
    simulated, history = model(output_tokens), [*prompt, *produced]
    sampling = Sampling(max_tokens=count, ignore_eos=ignore_eos)
    while len(history) < len(prompt) + count and (ignore_eos or history[-1] != EOS):
        work = Work(
            sequence=0,
            history=history,
            start=len(history) - 1,
            end=len(history),
            blocks=[],
            sampling=sampling,
            prompt_tokens=len(prompt),
        )
        (drawn,) = simulated.draw([work])
        assert drawn is not None
        history.append(drawn.token)
    return history[len(prompt) :]


def test_it_says_the_prompt_again_and_again_without_ends_of_sequence() -> None:
    assert answer(PROMPT, 10) == [5, 1, 7, 8, 5, 1, 7, 8, 5, 1]


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_a_continuation_draws_what_the_first_attempt_would_have_drawn(cut: int) -> None:
    whole = answer(PROMPT, 80, output_tokens=50)
    assert whole[-1] == EOS
    assert answer(PROMPT, 80, output_tokens=50, produced=tuple(whole[:cut])) == whole


def test_answers_end_by_themselves_half_to_one_and_a_half_times_the_mean_by_prompt() -> None:
    lengths = {len(answer([5, 6, 100 + number], 500, output_tokens=100)) - 1 for number in range(50)}
    assert len(lengths) > 20
    assert 50 <= min(lengths) < 75
    assert 125 < max(lengths) <= 150


def test_where_ends_of_sequence_are_to_be_ignored_there_is_none() -> None:
    assert EOS not in answer(PROMPT, 300, output_tokens=100, ignore_eos=True)


def test_nothing_is_drawn_in_the_middle_of_a_prompt_and_logprobs_come_where_they_are_asked_for() -> None:
    def work(draws: bool, logprobs: int) -> Work:
        sampling = Sampling(max_tokens=1, logprobs=logprobs)
        return Work(0, PROMPT, 0, 4 if draws else 3, [0], sampling, prompt_tokens=4)

    drawn = model().draw([work(False, -1), work(True, 0), work(True, -1)])
    assert drawn == [None, Drawn(5, TokenLogprob(0.0)), Drawn(5)]


def test_an_embedding_follows_from_all_tokens_however_they_are_cut() -> None:
    simulated = SimulatedModel(
        msgspec.structs.replace(MODEL_FACTS, embedding_size=40), Timing(SimulatedConfig()), output_tokens=0
    )
    for pooling in POOLINGS:
        work = Work(0, PROMPT, 0, 3, [0], Sampling(max_tokens=1, pooling=pooling), prompt_tokens=4)
        assert simulated.draw([work]) == [None]
        work.start, work.end = 3, 4
        (drawn,) = simulated.draw([work])
        assert drawn is not None
        assert drawn.embedding == embedding_of(crc32(pack_tokens(PROMPT)), 40)
        numbers = unpack("<40f", drawn.embedding)
        assert sum(number * number for number in numbers) == pytest.approx(1.0)
        assert embedding_of(crc32(pack_tokens(PROMPT[:3])), 40) != drawn.embedding


def test_no_answer_ends_before_its_least_tokens_and_no_barred_token_is_said() -> None:
    simulated = model(output_tokens=10)
    history = list(PROMPT)
    sampling = Sampling(max_tokens=100, min_tokens=60, stop_token_ids=(7,))
    while len(history) < 100:
        work = Work(0, history, len(history) - 1, len(history), [], sampling, len(PROMPT), (EOS, 7))
        (drawn,) = simulated.draw([work])
        assert drawn is not None
        history.append(drawn.token)
    output = history[len(PROMPT) :]
    assert not {EOS, 7} & set(output[:60])
    assert output[60] == EOS
