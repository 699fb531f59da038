from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from services.frontend.preprocess import INLINE_CHARACTERS, Limits, encode_chat, encode_text, fit, limits_of, load_model
from shared.errors import InvalidRequest, ModelError
from shared.messages import MODEL_CARD, ModelCard
from tests.frontend.peers import card_entry

LIMITS = Limits(context_length=100, vocab_size=320)


def card_of(directory: Path) -> ModelCard:
    [value] = card_entry("w1", directory).values()
    return MODEL_CARD.decode(value, {"Content-Type": "application/json"})


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "model"))


def fitted(count: int, max_tokens: int | None = None, default: int | None = None) -> int:
    return fit([5] * count, LIMITS, max_tokens=max_tokens, default=default, param="prompt").max_tokens


def test_what_may_follow_is_asked_for_or_the_default_or_all_that_is_left() -> None:
    assert fitted(90) == 10
    assert fitted(90, max_tokens=3) == 3
    assert fitted(90, max_tokens=10) == 10
    assert fitted(50, default=16) == 16
    assert fitted(90, default=16) == 10


def test_a_prompt_without_room_for_one_token_is_too_long() -> None:
    assert fitted(99) == 1
    for count, limit in ((100, None), (101, None), (90, 11)):
        with pytest.raises(InvalidRequest) as refusal:
            fitted(count, max_tokens=limit)
        assert refusal.value.code == "context_length_exceeded"


def test_the_smallest_worker_sets_the_limits(directory: Path) -> None:
    card = card_of(directory)
    small = msgspec.structs.replace(card, context_length=64, vocab_size=512)
    assert limits_of([card, small]) == Limits(64, card.vocab_size)


async def test_a_text_is_encoded_alike_inline_and_in_the_pool(directory: Path) -> None:
    model = load_model(card_of(directory), directory)
    with ThreadPoolExecutor(1) as pool:
        word = "water "
        short = await encode_text(model, word * 10, pool)
        long = await encode_text(model, word * (INLINE_CHARACTERS // len(word) + 1), pool)
        assert model.tokenizer.decode(long).startswith(model.tokenizer.decode(short))
        chat = await encode_chat(model, [{"role": "user", "content": word * INLINE_CHARACTERS}], pool)
        assert chat[0] == 1


async def test_many_short_messages_are_a_long_chat_and_go_to_the_pool(directory: Path) -> None:
    model = load_model(card_of(directory), directory)
    used: list[bool] = []
    with ThreadPoolExecutor(1, initializer=used.append, initargs=(True,)) as pool:
        await encode_chat(model, [{"role": "user", "content": "water"}] * 3, pool)
        assert not used
        await encode_chat(model, [{"role": "user", "content": ""}] * INLINE_CHARACTERS, pool)
        assert used


async def test_a_long_name_is_a_long_chat_too(directory: Path) -> None:
    model = load_model(card_of(directory), directory)
    used: list[bool] = []
    with ThreadPoolExecutor(1, initializer=used.append, initargs=(True,)) as pool:
        await encode_chat(model, [{"role": "user", "content": "", "name": "x" * INLINE_CHARACTERS}], pool)
    assert used


async def test_a_tokenizer_that_fails_on_a_text_is_that_requests_error(copy: Path) -> None:
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    file["model"]["unk_token"] = "not in the vocabulary"
    file["pre_tokenizer"] = None
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    model = load_model(card_of(copy), copy)
    with ThreadPoolExecutor(1) as pool:
        assert await encode_text(model, "water", pool)
        with pytest.raises(InvalidRequest, match="tokenizer fails on the text") as refusal:
            await encode_text(model, "水", pool)
        assert refusal.value.param == "prompt"
        with pytest.raises(InvalidRequest) as refusal:
            await encode_chat(model, [{"role": "user", "content": "水"}], pool)
        assert refusal.value.param == "messages"


async def test_a_model_without_a_template_has_no_chat(copy: Path) -> None:
    (copy / "tokenizer_config.json").unlink()
    model = load_model(card_of(copy), copy)
    with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidRequest, match="no chat template"):
        await encode_chat(model, [{"role": "user", "content": "x"}], pool)


def test_a_template_file_wins_and_tokens_may_be_objects(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text('{"chat_template": "old", "bos_token": {"content": "<b>"}}')
    (copy / "chat_template.jinja").write_text("new{{ bos_token }}")
    model = load_model(card_of(copy), copy)
    assert model.template is not None
    assert model.template.render([]) == "new<b>"


def test_another_tokenizer_than_the_workers_is_refused(directory: Path, copy: Path) -> None:
    with (copy / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ModelError, match=r"tokenizer\.json: SHA-256"):
        load_model(card_of(directory), copy)


def test_a_missing_or_torn_file_is_named(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text('{"chat_template": ')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_model(card_of(copy), copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_model(card_of(copy), copy)
    card = card_of(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: No such file"):
        load_model(card, copy)


def test_a_path_that_is_none_is_the_cards_fault(directory: Path) -> None:
    with pytest.raises(ModelError, match="null byte"):
        load_model(card_of(directory), Path("no\0where"))


def test_a_config_nested_too_deeply_is_named(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_model(card_of(copy), copy)
