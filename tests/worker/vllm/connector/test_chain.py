"""services/worker/vllm/connector/chain.py: keys are those of all of Headrace, however a request grows."""

from __future__ import annotations

import pytest

from services.worker.vllm.connector.chain import TokenChain
from shared.hashing import content_keys, image_extras, pack_tokens, root_key


def test_keys_are_the_content_keys_of_the_tokens() -> None:
    tokens = list(range(10))
    chain = TokenChain(tokens, 3, "m", "lora", "salt")
    right = content_keys(root_key("m", "lora", "salt"), pack_tokens(range(12)), 3)
    assert chain.key(1) == right[1]
    assert chain.keys(3) == right[:3]
    tokens += [10, 11]
    assert chain.keys(4) == right
    content = chain.content(3)
    assert (content.key, content.parent, content.tokens) == (right[3], right[2], pack_tokens([9, 10, 11]))
    assert (content.lora, content.salt) == ("lora", "salt")
    assert chain.content(0).parent is None


def test_a_block_that_is_not_full_has_no_key() -> None:
    with pytest.raises(AssertionError, match="block 1 is not full"):
        TokenChain([1, 2, 3], 2, "m").key(1)


def test_two_pictures_of_the_same_size_in_the_same_place_share_the_blocks_before_them_alone() -> None:
    """The tokens are the same: the images' own are."""
    tokens = [1, 2, 3, 9, 9, 9, 9, 4, 5, 6, 7, 8]
    one, other, text = (
        TokenChain(tokens, 3, "m", images=images) for images in ([(b"a" * 32, 3, 4)], [(b"b" * 32, 3, 4)], [])
    )
    assert one.key(0) == other.key(0) == text.key(0)
    assert not set(one.keys(4)[1:]) & set(other.keys(4)[1:])
    assert not set(one.keys(4)[1:]) & set(text.keys(4)[1:])
    moved = TokenChain(tokens, 3, "m", images=[(b"a" * 32, 4, 3)])
    assert moved.key(1) != one.key(1), "the same picture, one token later"


def test_keys_with_images_are_those_of_all_of_headrace_however_a_request_grows() -> None:
    tokens, images = [1, 2, 3, 9, 9, 9, 9, 4], [(b"a" * 32, 1, 1), (b"b" * 32, 3, 4)]
    chain = TokenChain(tokens, 3, "m", "lora", "salt", images)
    assert chain.keys(1) == chain.keys(2)[:1]
    tokens += [5, 6, 7, 8]
    extras = image_extras(images, 3)
    right = content_keys(root_key("m", "lora", "salt"), pack_tokens(tokens), 3, extras)
    assert chain.keys(4) == right
    assert [chain.content(number).extra for number in range(4)] == [extras[0], extras[1], extras[2], b""]
