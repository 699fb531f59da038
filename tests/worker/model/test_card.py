from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.worker.model.card import TEMPLATE_LIMIT_BYTES, CardAnnouncement, card_of
from services.worker.model.facts import facts_of
from shared import hashing, subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.chat_templates import template_file
from shared.discovery.intake import DEFAULT
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.errors import ModelError
from shared.messages.cards import ASLEEP, INSTANCE, MODEL_CARD, Instance, ModelCard, TurnTaker
from shared.messages.codec import JSON_HEADER
from tests.fake_runtime import fake_runtime
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


async def refusals_of(
    card: ModelCard, others: dict[str, tuple[int, float]], caplog: pytest.LogCaptureFixture, *, late: bool = False
) -> list[str]:
    """Return what a worker with this card logs as an error, next to workers that are there already: of these block
    sizes, started at these times. With `late` it publishes its other entries first."""
    store, broker = MemoryStore(), MemoryBroker()
    values = {subjects.model_key("test", "tiny", "c1"): b"{"}
    for name, (size, started) in others.items():
        one = replace(card, instance=name, block_size=size, hash_self_test=hashing.self_test(size))
        instance = Instance("test", "worker", name, 1, "here", 1, started, "0.1.0")
        values[subjects.model_key("test", "tiny", name)] = MODEL_CARD.encode(one, JSON_HEADER)
        values[subjects.instance_key("test", "worker", name)] = INSTANCE.encode(instance, JSON_HEADER)
    there = MemoryDiscovery(store)
    registered = await there.register(lambda _epoch: values)
    async with fake_runtime("test", "worker", "w1", MemoryBus(broker), broker, store) as runtime:
        announcement = CardAnnouncement(runtime, None, "aggregated")
        publishing = runtime.tasks.create_task(announcement.entries.run())
        reporting = runtime.tasks.create_task(announcement.report_refusal())
        if late:
            announcement.turn = TurnTaker("turns", card)
            announcement.show(None, ASLEEP)
            assert await announcement.published_within(60)
        announcement.show(card)
        await reporting
        publishing.cancel()
        await announcement.entries.close()
    await registered.close()
    await there.close()
    own = [record for record in caplog.records if record.name.endswith("worker.model.card")]
    return [record.message for record in own if record.levelno == logging.ERROR]


async def test_a_worker_that_sleeps_still_says_which_model_and_device_it_has(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    store, broker = MemoryStore(), MemoryBroker()
    async with fake_runtime("test", "worker", "w1", MemoryBus(broker), broker, store) as runtime:
        announcement = CardAnnouncement(runtime, None, "aggregated")
        publishing = runtime.tasks.create_task(announcement.entries.run())
        for card, state in ((replace(card_with(tmp_path, ""), device="cuda:1"), ""), (None, ASLEEP)):
            announcement.show(card, state)
            assert await announcement.published_within(60)
        values = await runtime.discovery.list(subjects.namespace_prefix("test"))
        publishing.cancel()
        await announcement.entries.close()
    (entry,) = (INSTANCE.decode(value, JSON_HEADER) for value in values.values())
    assert (entry.state, entry.model, entry.device) == (ASLEEP, card_with(tmp_path, "").model, "cuda:1")


REFUSAL = "this worker's card is refused, and it gets no requests: block_size: the card has 16, b1 came first with 32"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("block_size", "expected"), [(16, []), (32, [REFUSAL])])
async def test_a_worker_says_itself_that_others_refuse_its_card(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block_size: int, expected: list[str], late: bool
) -> None:
    write_tiny_model(tmp_path)
    assert await refusals_of(card_with(tmp_path, ""), {"b1": (block_size, 1.0)}, caplog, late=late) == expected


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"a1": (16, 1.0), "b1": (32, 2.0)}, []),
        ({"a1": (32, 2.0), "b1": (16, 1.0)}, []),
        ({"a1": (16, 2.0), "b1": (32, 1.0)}, [REFUSAL]),
        ({"b1": (32, 1e12)}, [REFUSAL]),
    ],
)
async def test_a_worker_refused_or_not_is_so_by_the_order_in_which_the_others_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, others: dict[str, tuple[int, float]], expected: list[str]
) -> None:
    write_tiny_model(tmp_path)
    assert await refusals_of(card_with(tmp_path, ""), others, caplog) == expected
