from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tokenizers import Encoding, Tokenizer

from services.frontend.models import preprocess
from services.frontend.models.chat_template import ChatTemplate
from services.frontend.models.message_list import TemplateRules
from services.frontend.models.model import Model, ModelLimits, load_model
from services.frontend.models.preprocess import (
    CHARACTERS_PER_TURN,
    INLINE_BYTES,
    INLINE_CHARACTERS,
    INLINE_STEPS,
    PIECE_CHARACTERS,
    check_encoded,
    check_vocabulary,
    encode,
    fit_context,
    render_chat,
    truncate,
)
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens, unpack_tokens
from tests.frontend.cards import HERMES, card_of, with_template
from tests.frontend.pools import encode_pool
from tests.frontend.strict_templates import LLAMA_3_1
from tests.tiny_model import CHAT_TEMPLATE

LIMITS = ModelLimits(context_length=100, vocab_size=320, grammars=False, biases=False)


def fitted(count: int, max_tokens: int | None = None, default: int | None = None) -> int:
    return fit_context(
        pack_tokens([5] * count), LIMITS, max_tokens=max_tokens, default=default, param="prompt"
    ).max_tokens


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


def by_tokenizer(model: Model, text: str, *, special: bool) -> bytes:
    return pack_tokens(model.tokenizer.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("with_words", [True, False])
async def test_texts_of_any_length_and_script_are_encoded_as_the_tokenizer_does(
    directory: Path, with_words: bool
) -> None:
    model = load_model(card_of(directory), directory)
    assert model.words is not None
    if not with_words:
        model = msgspec.structs.replace(model, words=None)
    texts = ["", "water ", "water is wet. ", "水", "<|im_end|>water", "water 水 " * 2, "eau \u0301 "]
    with encode_pool() as pool:
        for text in [*texts, *(text * INLINE_CHARACTERS for text in texts)]:
            assert await encode(model, text, pool, special=True, param="prompt") == by_tokenizer(
                model, text, special=True
            )
            rendered = await render_chat(model, [{"role": "user", "content": text}], pool)
            assert await encode(model, rendered, pool, special=False, param="messages") == by_tokenizer(
                model, rendered, special=False
            )


async def test_special_tokens_that_the_tokenizer_puts_around_a_text_are_there(copy: Path) -> None:
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for number, token in ((0, "<|endoftext|>"), (2, "<|im_end|>"))
        },
    }
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    model = load_model(card_of(copy), copy)
    assert model.around == (pack_tokens([0]), pack_tokens([2]))
    with encode_pool() as pool:
        assert await encode(model, "water", pool, special=True, param="prompt") == by_tokenizer(
            model, "water", special=True
        )


@pytest.mark.parametrize("single", [["A", "A"], ["A", None, "A"], [None]])
async def test_a_tokenizer_that_does_more_than_to_put_tokens_around_a_text_is_asked_for_each(
    copy: Path, single: list[str | None]
) -> None:
    token = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": name, "type_id": 0}} if name else token for name in single],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}},
    }
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    model = load_model(card_of(copy), copy)
    assert model.words is None
    with encode_pool() as pool:
        assert await encode(model, "water", pool, special=True, param="prompt") == by_tokenizer(
            model, "water", special=True
        )


async def test_only_long_texts_that_are_left_to_the_tokenizer_go_to_the_pool(directory: Path) -> None:
    model = load_model(card_of(directory), directory)
    used: list[bool] = []
    with encode_pool(used) as pool:
        await encode(model, "water " * INLINE_CHARACTERS, pool, special=True, param="prompt")
        await encode(model, "水", pool, special=True, param="prompt")
        assert not used
        await encode(model, "水" * (INLINE_CHARACTERS + 1), pool, special=True, param="prompt")
        assert used


async def test_a_long_text_lets_others_have_their_turns(directory: Path) -> None:
    model = load_model(card_of(directory), directory)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    text = "water " * CHARACTERS_PER_TURN
    with encode_pool() as pool:
        await encode(model, text, pool, special=True, param="prompt")
    beside.cancel()
    assert turns >= len(text) // (2 * CHARACTERS_PER_TURN)


async def test_a_template_that_takes_many_steps_goes_to_the_pool_and_ends_there(directory: Path) -> None:
    model = load_model(card_of(directory), directory)
    messages = [{"role": "user", "content": "water"}]
    used: list[bool] = []
    with encode_pool(used) as pool:
        await render_chat(model, messages * INLINE_STEPS, pool)
        assert not used
        await render_chat(model, messages * (INLINE_STEPS + 1), pool)
        assert used
        for_ever = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
        looping = msgspec.structs.replace(model, template=ChatTemplate(for_ever, {}))
        with pytest.raises(InvalidRequest, match="needs more than") as refusal:
            await render_chat(looping, messages, pool)
        assert refusal.value.param == "messages"


async def test_a_template_with_many_bytes_of_tools_or_variables_runs_in_the_pool(directory: Path) -> None:
    """One step may write all of them; four megabytes held the event loop for two seconds."""
    shows = ChatTemplate("{{ tools | tojson(indent=4) }}{{ documents | tojson(indent=4) }}{{ tool_calls }}", {})
    model = msgspec.structs.replace(
        load_model(card_of(directory), directory), template=shows, tool_template=shows, tool_format="hermes"
    )
    messages, few, many = [{"role": "user", "content": "water"}], [{"a": 1}], [{"a": "x" * INLINE_BYTES}]
    for tools, more, in_pool in ((few, few, False), (few, many, True), (many, few, True)):
        used: list[bool] = []
        with encode_pool(used) as pool:
            await render_chat(model, messages, pool, tools, {"documents": more})
            assert bool(used) == in_pool


def test_token_ids_outside_the_vocabulary_are_named(directory: Path) -> None:
    check_vocabulary([0, 319], LIMITS, param="prompt")
    check_vocabulary([], LIMITS, param="prompt")
    for token in (320, -1):
        with pytest.raises(InvalidRequest, match=f"token id {token} at index 1") as refusal:
            check_vocabulary([5, token, token], LIMITS, param="prompt")
        assert refusal.value.param == "prompt[1]"
    model = load_model(card_of(directory), directory)
    check_encoded(model, pack_tokens([5, 319]), LIMITS, param="messages")
    with pytest.raises(InvalidRequest, match="token id 319 at index 1"):
        check_encoded(
            model, pack_tokens([5, 319]), ModelLimits(100, 319, grammars=False, biases=False), param="messages"
        )


async def test_a_tokenizer_that_fails_on_a_text_is_that_requests_error(copy: Path) -> None:
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    file["model"]["unk_token"] = "not in the vocabulary"
    file["pre_tokenizer"] = None
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    model = load_model(card_of(copy), copy)
    with encode_pool() as pool:
        assert await encode(model, "water", pool, special=True, param="prompt")
        with pytest.raises(InvalidRequest, match="tokenizer fails on the text") as refusal:
            await encode(model, "水", pool, special=True, param="prompt")
        assert refusal.value.param == "prompt"
        with pytest.raises(InvalidRequest) as refusal:
            await encode(model, "水", pool, special=False, param="messages")
        assert refusal.value.param == "messages"


async def test_a_model_without_a_template_has_no_chat(copy: Path) -> None:
    (copy / "tokenizer_config.json").unlink()
    model = load_model(card_of(copy), copy)
    with encode_pool() as pool, pytest.raises(InvalidRequest, match="no chat template"):
        await render_chat(model, [{"role": "user", "content": "x"}], pool)


async def test_a_template_of_its_own_for_tools_is_used_for_them(copy: Path) -> None:
    named = [{"name": "default", "template": "chat"}, {"name": "tool_use", "template": HERMES}]
    model = load_model(card_of(copy), with_template(copy, named))
    assert model.tool_format == "hermes"
    with encode_pool() as pool:
        assert await render_chat(model, [{"role": "user", "content": "x"}], pool) == "chat"
        assert "<tool_call>" in await render_chat(
            model, [{"role": "user", "content": "x"}], pool, [{"type": "function"}]
        )


async def test_calls_in_a_history_are_rendered_by_the_template_for_tools_also_without_tools(copy: Path) -> None:
    named = [{"name": "default", "template": "chat"}, {"name": "tool_use", "template": HERMES}]
    model = load_model(card_of(copy), with_template(copy, named))
    function = {"name": "look", "arguments": "{}"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    with encode_pool() as pool:
        assert "look" in await render_chat(model, [called], pool)


async def test_a_list_that_a_template_refuses_against_its_rules_is_tried_as_the_strictest_takes_it(
    directory: Path,
) -> None:
    model = load_model(card_of(directory), directory)
    templates = [ChatTemplate(source, {}) for source in (LLAMA_3_1, "{{ raise_exception('for ' ~ messages|length) }}")]
    tool = {"type": "function", "function": {"name": "look"}}
    with encode_pool() as pool:
        for template in templates:
            assert template.rules == TemplateRules(one_call=template is templates[0])
            model = msgspec.structs.replace(model, template=template, tool_template=template, tool_format="hermes")
            asked = render_chat(model, [{"role": "system", "content": "be"}], pool, [tool])
            if template is templates[0]:
                assert "look" in await asked
                continue
            with pytest.raises(InvalidRequest, match="for 1"):  # as the client wrote it, not as it was tried then
                await asked


async def test_only_names_that_the_template_reads_are_taken(copy: Path) -> None:
    model = load_model(card_of(copy), with_template(copy, "{{ enable_thinking }} {{ tools }}"))
    hello = [{"role": "user", "content": "x"}]
    with encode_pool() as pool:
        assert await render_chat(model, hello, pool, more={"enable_thinking": False}) == "False None"
        for name in ("enable_thoughts", "tools", "messages", "add_generation_prompt", "raise_exception", "_step"):
            with pytest.raises(InvalidRequest) as refusal:
                await render_chat(model, hello, pool, more={name: 1})
            assert refusal.value.param == f"chat_template_kwargs.{name}"


async def test_what_the_template_has_no_place_for_is_refused_by_name(copy: Path) -> None:
    hello: dict[str, Any] = {"role": "user", "content": "x"}
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    silent = load_model(card_of(copy), with_template(copy, "{{ messages[0].content }}"))
    unclear = load_model(card_of(copy), with_template(copy, "{{ tools }}"))
    with encode_pool() as pool:
        for model, messages, tools, param in (
            (silent, [hello], 1, "tools"),
            (unclear, [hello], 1, "tools"),
            (silent, [hello, called], 0, "messages[1].tool_calls"),
        ):
            with pytest.raises(InvalidRequest) as refusal:
                await render_chat(model, messages, pool, [{"type": "function"}] * tools)
            assert (refusal.value.param, refusal.value.code) == (param, "unsupported_parameter")


def test_the_last_tokens_are_kept_and_as_many_as_fit_where_that_is_asked_for() -> None:
    tokens = pack_tokens(range(200))

    def kept(count: int | None, max_tokens: int | None = None) -> list[int]:
        return list(unpack_tokens(truncate(tokens, count, LIMITS, max_tokens)))

    assert kept(None) == [*range(200)]
    assert kept(3) == [197, 198, 199]
    assert kept(-1) == [*range(101, 200)]
    assert kept(-1, max_tokens=40) == [*range(140, 200)]
    assert kept(-1, max_tokens=1000) == [199]
    assert truncate(pack_tokens([7]), 99, LIMITS, None) == pack_tokens([7])
    with pytest.raises(InvalidRequest) as refusal:
        kept(100)
    assert refusal.value.param == "truncate_prompt_tokens"


STRIPPING = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
TURNS: Any = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "So it "}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHAT_TEMPLATE, "<|im_start|>user\nSay<|im_end|>\n<|im_start|>assistant\nSo it "),
        (STRIPPING, "<Say><So it"),
    ],
)
async def test_a_prompt_may_end_within_its_last_message(copy: Path, template: str, text: str) -> None:
    model = load_model(card_of(copy), with_template(copy, template))
    with encode_pool() as pool:
        assert await render_chat(model, TURNS, pool, continues=True) == text
        assert TURNS[-1]["content"] == "So it ", "the messages stay as they were"


async def test_a_last_message_that_the_template_does_not_show_cannot_be_continued(copy: Path) -> None:
    model = load_model(card_of(copy), with_template(copy, "{{ messages[0].content }}"))
    with encode_pool() as pool:
        with pytest.raises(InvalidRequest) as refusal:
            await render_chat(model, TURNS, pool, continues=True)
        assert refusal.value.param == "messages[1].content"


class Counting:
    """A tokenizer that notes how many tokens it made of each text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.counts: list[int] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        self.counts += map(len, found)
        return found


def counting(directory: Path, *, words: bool) -> tuple[Model, Counting]:
    model = load_model(card_of(directory), directory)
    tokenizer = Counting(model.tokenizer)
    fields = {} if words else {"words": None}
    return msgspec.structs.replace(model, tokenizer=cast(Tokenizer, tokenizer), **fields), tokenizer


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("part", ["7", "x", "\n", "水", "<|im_end|>", "!"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    directory: Path, part: str, words: bool
) -> None:
    model, tokenizer = counting(directory, words=words)
    made: list[int] = []
    text, too_long = part * 10**5, pytest.raises(InvalidRequest, match="more than 100 tokens")
    with encode_pool(made=made.append) as pool, too_long as refusal:
        await encode(model, text, pool, special=True, param="messages", most=100)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "messages")
    assert tokenizer.counts == []
    assert made == [100]


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("character", ["7", "x", "\n", "水", "!", "e\u0301"])
async def test_a_text_that_might_fit_is_tokenised_until_it_does_not(
    directory: Path, character: str, words: bool
) -> None:
    model, tokenizer = counting(directory, words=words)
    most = 20_000
    assert model.characters_of_a_token is not None
    text = character * (most * model.characters_of_a_token // len(character))
    made: list[int] = []
    with encode_pool(made=made.append) as pool, pytest.raises(InvalidRequest, match=f"more than {most} tokens"):
        await encode(model, text, pool, special=True, param="prompt", most=most)
    paid = sum(made)
    assert most < paid < most + 4 * PIECE_CHARACTERS
    assert max(tokenizer.counts, default=0) <= 3 * PIECE_CHARACTERS  # of a piece, not of the whole
    assert sum(tokenizer.counts) <= most + 4 * PIECE_CHARACTERS


@pytest.mark.parametrize("words", [True, False])
async def test_a_text_whose_client_goes_meanwhile_costs_what_was_made_of_it(directory: Path, words: bool) -> None:
    model, _ = counting(directory, words=words)
    text = "water, " * (4 * PIECE_CHARACTERS)
    known = asyncio.Event()
    made: list[int] = []

    def note(tokens: int) -> None:
        made.append(tokens)
        known.set()

    with encode_pool(made=note) as pool:
        encoding = asyncio.create_task(encode(model, text, pool, special=True, param="prompt"))
        await known.wait()
        encoding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await encoding
        assert sum(made) > 0
    made.clear()
    with encode_pool(made=note) as pool:
        tokens = await encode(model, text, pool, special=True, param="prompt")
    assert sum(made) == len(tokens) // 4, "each once"


async def test_a_large_text_that_fits_is_one_text_to_the_tokenizer(directory: Path) -> None:
    model, tokenizer = counting(directory, words=False)
    text = "water, " * PIECE_CHARACTERS
    with encode_pool() as pool:
        tokens = await encode(model, text, pool, special=True, param="prompt")
    assert tokens == by_tokenizer(load_model(card_of(directory), directory), text, special=True)
    assert tokenizer.counts[-1] == len(tokens) // 4


async def test_no_text_has_more_tokens_than_a_bound_however_long_a_context_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "TEXT_TOKENS_LIMIT", 10)
    model = load_model(card_of(directory), directory)
    why = "prompt has more than 10 tokens, the most that one text may have"
    with encode_pool() as pool, pytest.raises(InvalidRequest, match=why):
        await encode(model, "7" * 1000, pool, special=True, param="prompt", most=1 << 40)


async def test_a_tokenizer_that_may_take_long_for_a_short_text_runs_in_the_pool(directory: Path) -> None:
    model = msgspec.structs.replace(load_model(card_of(directory), directory), words=None, encodes_inline=False)
    used: list[bool] = []
    with encode_pool(used) as pool:
        await encode(model, "x", pool, special=True, param="prompt")
    assert used
