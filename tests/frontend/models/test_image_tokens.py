"""Each image gets its tokens where the template placed it, and a text never becomes one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.models.image_tokens import check_texts, place_images
from services.frontend.models.model import Model, load_model
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.cards import ImageInput
from tests.frontend.cards import card_of
from tests.tiny_model import write_tiny_model

IMAGES = ImageInput(token_id=7, tokens=3, width=2, height=2, resize=2, filter="BICUBIC")


@given(st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=5))
def test_each_place_becomes_the_tokens_of_an_image(texts: list[list[int]]) -> None:
    given_tokens = texts[0] + [token for text in texts[1:] for token in (7, *text)]
    packed, starts = place_images(pack_tokens(given_tokens), len(texts) - 1, IMAGES, 1000)
    tokens = unpack_tokens(packed)
    assert len(tokens) == len(given_tokens) + 2 * (len(texts) - 1)
    assert [tokens[start : start + 3] for start in starts] == [[7] * 3] * (len(texts) - 1)
    assert tokens.count(7) == 3 * len(starts)
    assert [token for token in tokens if token != 7] == [token for text in texts for token in text]


@pytest.mark.parametrize(("placed", "shown"), [(0, 1), (2, 1), (1, 0)])
def test_a_template_that_places_fewer_or_more_is_at_fault(placed: int, shown: int) -> None:
    with pytest.raises(InvalidRequest, match=f"wrote {placed} places for the {shown} images of the messages"):
        place_images(pack_tokens([1] + [7] * placed), shown, IMAGES, 1000)


def test_images_that_are_too_many_tokens_are_refused_before_they_are_placed() -> None:
    tokens = pack_tokens([7] * 4)
    assert place_images(tokens, 4, IMAGES, 12)[1] == (0, 3, 6, 9)
    with pytest.raises(InvalidRequest, match="more than 11 tokens"):
        place_images(tokens, 4, IMAGES, 11)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = write_tiny_model(tmp_path_factory.mktemp("seeing"), marks=("<image>",))
    return load_model(card_of(directory), directory)


def test_a_text_that_is_that_of_the_images_token_is_refused_where_it_is(model: Model) -> None:
    of_model = ImageInput(model.tokenizer.token_to_id("<image>") or 0, 3, 2, 2, 2, "BICUBIC")
    fine = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "an <image or image>"}]}
    check_texts(model, of_model, [fine], {"tools": []})
    parts = [{"type": "image"}, {"type": "text", "text": "see <image>"}]
    call = {"function": {"name": "look", "arguments": '{"at": "<image>"}'}}
    wrong: list[dict[str, Any]] = [{"content": "<image>"}, {"content": parts}, {"content": "", "tool_calls": [call]}]
    for at, message in enumerate(wrong):
        with pytest.raises(InvalidRequest, match="'<image>' stands for an image") as refused:
            check_texts(model, of_model, [*[fine] * at, message], {})
        assert refused.value.param == f"messages[{at}].content"
    with pytest.raises(InvalidRequest, match="tools: "):
        check_texts(model, of_model, [fine], {"tools": [{"description": "an <image>"}]})
