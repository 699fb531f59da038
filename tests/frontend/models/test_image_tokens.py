"""Each image gets its tokens where the template placed it, and a text never becomes one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.models.image_tokens import MARK, MOST_MARKS, encode_marked, mark_texts, place_images
from services.frontend.models.model import Model, load_model
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens, unpack_tokens
from tests.frontend.cards import card_of
from tests.frontend.pools import encode_pool
from tests.tiny_model import write_tiny_model

IMAGE = 7


@given(st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=5))
def test_each_place_becomes_the_tokens_of_an_image(texts: list[list[int]]) -> None:
    given_tokens = texts[0] + [token for text in texts[1:] for token in (7, *text)]
    packed, starts = place_images(pack_tokens(given_tokens), [3] * (len(texts) - 1), IMAGE, 1000)
    tokens = unpack_tokens(packed)
    assert len(tokens) == len(given_tokens) + 2 * (len(texts) - 1)
    assert [tokens[start : start + 3] for start in starts] == [[7] * 3] * (len(texts) - 1)
    assert tokens.count(7) == 3 * len(starts)
    assert [token for token in tokens if token != 7] == [token for text in texts for token in text]


@pytest.mark.parametrize(("placed", "shown"), [(0, 1), (2, 1), (1, 0)])
def test_a_template_that_places_fewer_or_more_is_at_fault(placed: int, shown: int) -> None:
    with pytest.raises(InvalidRequest, match=f"wrote {placed} places for the {shown} images of the messages"):
        place_images(pack_tokens([1] + [7] * placed), [3] * shown, IMAGE, 1000)


def test_images_that_are_too_many_tokens_are_refused_before_they_are_placed() -> None:
    tokens = pack_tokens([7] * 4)
    assert place_images(tokens, [3] * 4, IMAGE, 12)[1] == (0, 3, 6, 9)
    with pytest.raises(InvalidRequest, match="more than 11 tokens"):
        place_images(tokens, [3] * 4, IMAGE, 11)


def test_each_image_has_tokens_of_its_own_number() -> None:
    packed, starts = place_images(pack_tokens([1, 7, 7, 2, 7]), (4, 1, 2), IMAGE, 9)
    assert (unpack_tokens(packed), starts) == ([1, 7, 7, 7, 7, 7, 2, 7, 7], (1, 5, 7))
    with pytest.raises(InvalidRequest, match="more than 8 tokens"):
        place_images(pack_tokens([1, 7, 7, 2, 7]), (4, 1, 2), IMAGE, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = write_tiny_model(tmp_path_factory.mktemp("seeing"), marks=("<image>",))
    return load_model(card_of(directory), directory)


WORD = "<image>"


def test_texts_that_contain_the_images_token_are_marked_and_others_stay_as_they_are() -> None:
    fine = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "an <image or image>"}]}
    assert mark_texts(WORD, fine) is fine
    assert mark_texts("", fine) is fine
    call = {"function": {"name": "look", "arguments": '{"at": "<image>"}'}}
    marked: list[Any] = mark_texts(
        WORD, [fine, {"role": "assistant", "content": "<image><image>!", "tool_calls": [call]}]
    )
    assert marked[0] == fine
    assert marked[1]["content"] == f"{MARK}{MARK}!"
    assert marked[1]["tool_calls"][0]["function"]["arguments"] == f'{{"at": "{MARK}"}}'


async def encoded(model: Model, text: str, *, special: bool = False, most: int = 1000) -> list[int]:
    with encode_pool() as pool:
        packed = await encode_marked(model, text, WORD, pool, special=special, param="messages", most=most)
    return unpack_tokens(packed)


@pytest.mark.parametrize("text", ["a <image> b", "<image>", "<image><image>", "<image <image>>", "plain"])
async def test_a_marked_text_becomes_tokens_that_say_the_same_and_stand_for_no_image(model: Model, text: str) -> None:
    image = model.tokenizer.token_to_id(WORD) or 0
    tokens = await encoded(model, mark_texts(WORD, text))
    assert image not in tokens
    assert model.tokenizer.decode(tokens, skip_special_tokens=False) == text
    template = await encoded(model, f"{WORD}: {mark_texts(WORD, text)}", special=True)
    assert template.count(image) == 1, "the one that the template wrote"


async def test_a_text_with_too_many_marks_or_tokens_is_refused(model: Model) -> None:
    await encoded(model, MARK * MOST_MARKS, most=5000)
    with pytest.raises(InvalidRequest, match="'<image>', which stands for an image, more than 256 times"):
        await encoded(model, MARK * (MOST_MARKS + 1), most=5000)
    with pytest.raises(InvalidRequest, match="more than 50 tokens"):
        await encoded(model, MARK * MOST_MARKS, most=50)
