from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.worker.model.card import TEMPLATE_LIMIT_BYTES, card_of
from services.worker.model.facts import facts_of
from shared.chat_templates import template_file
from shared.discovery.intake import DEFAULT
from shared.errors import ModelError
from shared.messages.cards import MODEL_CARD, ModelCard
from shared.messages.codec import JSON_HEADER
from tests.tiny_model import write_tiny_model


def card_with(directory: Path, template: str) -> ModelCard:
    facts = facts_of(directory, block_size=16, capacity_blocks=8)
    return card_of(facts, model=str(directory), model_name="tiny", instance="w1", chat_template=template)


def test_the_card_of_an_attached_engine_has_its_servers_address_and_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    facts = facts_of(tmp_path, block_size=16, capacity_blocks=8)
    attached = replace(facts, address="10.0.0.5:8001", alias="org/tiny")
    cards = [card_of(each, model=str(tmp_path), model_name="tiny", instance="w1") for each in (facts, attached)]
    assert [(card.address, card.alias) for card in cards] == [("", ""), ("10.0.0.5:8001", "org/tiny")]


def test_the_card_says_how_many_requests_are_computed_at_once_if_that_is_known(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    facts = facts_of(tmp_path, block_size=16, capacity_blocks=8)
    cards = [
        card_of(facts, model=str(tmp_path), model_name="tiny", instance="w1", max_running=places) for places in (0, 7)
    ]
    assert [card.max_running for card in cards] == [0, 7]


def test_a_template_that_replaces_the_models_own_is_in_the_card(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    named = card_with(tmp_path, "hermes")
    assert (named.chat_template, named.template_text) == ("hermes", template_file("hermes").read_text())
    file = tmp_path / "other.jinja"
    file.write_bytes(b"Z\xc3\xbcrich\r\n{{ messages }}")
    given = card_with(tmp_path, str(file))
    assert (given.chat_template, given.template_text.encode()) == (str(file), file.read_bytes())
    assert given.template_digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert card_with(tmp_path, "").template_text == ""


def test_a_template_that_is_too_long_stays_in_its_file_and_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "other.jinja"
    longest = "\0" * ((TEMPLATE_LIMIT_BYTES - 2) // 6)  # each is six bytes as JSON
    file.write_text(longest)
    card = card_with(tmp_path, str(file))
    assert card.template_text == longest
    assert len(MODEL_CARD.encode(card, JSON_HEADER)) < DEFAULT.value_bytes * 3 // 4
    file.write_text(longest + "\0")
    card = card_with(tmp_path, str(file))
    assert (card.template_text, card.chat_template) == ("", str(file))
    assert card.template_digest == hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"other\.jinja: 'utf-8' codec"):
        card_with(tmp_path, str(file))


def test_a_relative_path_of_a_template_is_absolute_in_the_card(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "other.jinja").write_text("x")
    relative = Path(tmp_path / "other.jinja").relative_to("/")
    up = "/".join([".."] * (len(Path.cwd().parts) - 1))
    assert card_with(tmp_path, f"{up}/{relative}").chat_template == str((tmp_path / "other.jinja").resolve())
