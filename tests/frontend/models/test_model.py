from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import msgspec
import pytest

from services.frontend.models.model import ModelLimits, ParserNames, load_model, model_limits
from shared.errors import ModelError
from tests.frontend.cards import HERMES, card_of, with_template


def test_the_smallest_worker_sets_the_limits(directory: Path) -> None:
    card = card_of(directory)
    small = msgspec.structs.replace(card, context_length=64, vocab_size=512)
    assert model_limits([card, small]) == ModelLimits(64, card.vocab_size, grammars=False, biases=False)


def test_a_tokenizer_that_makes_the_package_panic_is_a_model_that_cannot_be_read(copy: Path) -> None:
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    file["model"]["continuing_subword_prefix"] = "##"
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    with pytest.raises(ModelError, match="slice index"):
        load_model(card_of(copy), copy)


@pytest.mark.parametrize(
    ("parsers", "tool_format", "thinks"),
    [
        (ParserNames(), "hermes", True),
        (ParserNames("none", "none"), None, False),
        (ParserNames("mistral", "think"), "mistral", True),
    ],
)
def test_how_a_model_writes_shows_in_its_template_unless_it_is_set(
    copy: Path, parsers: ParserNames, tool_format: str | None, thinks: bool
) -> None:
    model = load_model(card_of(copy), with_template(copy, HERMES), parsers)
    assert (model.tool_format, model.thinks) == (tool_format, thinks)
    assert model.tool_template is model.template
    plain = load_model(card_of(copy), with_template(copy, "{{ messages }}"))
    assert (plain.tool_format, plain.thinks, plain.tool_template) == (None, False, None)
    assert plain.marked_token_bytes is plain.token_bytes


@pytest.mark.parametrize(
    ("mark", "template", "tool_format"),
    [("[TOOL_CALLS]", "{{ tools }}[TOOL_CALLS]", "mistral"), ("</think>", "{{ messages }}</think>", None)],
)
def test_special_tokens_that_mark_calls_and_thinking_are_part_of_what_is_taken_apart(
    copy: Path, mark: str, template: str, tool_format: str | None
) -> None:
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    file["added_tokens"][0]["content"] = mark
    file["model"]["vocab"][mark] = file["model"]["vocab"].pop("<|endoftext|>")
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    model = load_model(card_of(copy), with_template(copy, template))
    assert model.tool_format == tool_format
    assert (model.token_bytes.bytes_of(0), model.marked_token_bytes.bytes_of(0)) == (b"", mark.encode())


def test_a_template_file_wins_and_tokens_may_be_objects(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text('{"chat_template": "old", "bos_token": {"content": "<b>"}}')
    (copy / "chat_template.jinja").write_text("new{{ bos_token }}")
    model = load_model(card_of(copy), copy)
    assert model.template is not None
    assert model.template.render([]) == "new<b>"


def test_named_and_added_tokens_of_other_files_are_the_tokenizers_and_the_templates(copy: Path) -> None:
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    mark = file["added_tokens"].pop()["content"]
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    (copy / "tokenizer_config.json").write_text('{"chat_template": "{{ eos_token }}"}')
    (copy / "special_tokens_map.json").write_text(json.dumps({"eos_token": mark}))
    model = load_model(card_of(copy), copy)
    assert model.template is not None
    assert model.template.render([]) == mark
    [token] = model.tokenizer.encode(mark, add_special_tokens=False).ids
    assert model.tokenizer.id_to_token(token) == mark
    assert model.token_bytes.bytes_of(token) == b""


def test_another_tokenizer_than_the_workers_is_refused(directory: Path, copy: Path) -> None:
    with (copy / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ModelError, match=r"tokenizer\.json: SHA-256"):
        load_model(card_of(directory), copy)


def test_a_missing_or_torn_file_is_named(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text('{"chat_template": ')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_model(card_of(copy), copy)
    (copy / "tokenizer_config.json").unlink()
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


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_in_the_place_of_a_file_is_named_at_once(copy: Path, file: str) -> None:
    card = card_of(copy)
    (copy / file).unlink(missing_ok=True)
    os.mkfifo(copy / file)
    with pytest.raises(ModelError, match=f"{file}: not a regular file"):
        load_model(card, copy)


def test_a_config_nested_too_deeply_is_named(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_model(card_of(copy), copy)


def test_a_cards_path_of_a_template_must_be_absolute(directory: Path) -> None:
    card = msgspec.structs.replace(card_of(directory), chat_template="pyproject.toml")
    with pytest.raises(ModelError, match=r"'pyproject\.toml': not a name, and the card's path is not absolute"):
        load_model(card, directory)


def test_a_template_in_the_card_must_have_the_cards_digest(directory: Path) -> None:
    digest = hashlib.sha256(b"of the card").hexdigest()
    card = msgspec.structs.replace(card_of(directory), chat_template="hermes", template_digest=digest)
    model = load_model(msgspec.structs.replace(card, template_text="of the card"), directory)
    assert model.template is not None
    assert model.template.render([]) == "of the card"
    with pytest.raises(ModelError, match=f"template_text: its SHA-256 is not template_digest, '{digest[:16]}'"):
        load_model(msgspec.structs.replace(card, template_text="of another"), directory)
