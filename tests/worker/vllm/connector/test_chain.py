"""services/worker/vllm/connector/chain.py: keys are those of all of Headrace, however a request grows."""

from __future__ import annotations

import pytest

from services.worker.vllm.connector.chain import TokenChain
from shared.hashing import content_keys, pack_tokens, root_key


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
