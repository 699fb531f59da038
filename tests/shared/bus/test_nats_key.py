"""shared/bus/nats_key.py: seeds as `nk` writes them. test_nats_access.py shows the keys to a real nats-server."""

from __future__ import annotations

import base64

import pytest
from nacl.signing import SigningKey, VerifyKey

from shared.bus.nats_key import NatsKey
from tests.nats_users import ACCOUNT, USER, seed_of

DOCUMENTED = (
    "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY",
    "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4",
)
"""The example of https://docs.nats.io, of a user."""


def test_a_seed_of_the_documentation_has_the_public_key_that_it_says() -> None:
    assert NatsKey(DOCUMENTED[0]).public == DOCUMENTED[1]


def test_a_signature_is_one_of_the_key() -> None:
    secret = SigningKey.generate()
    key = NatsKey(seed_of(secret, USER))
    VerifyKey(bytes(secret.verify_key)).verify(b"nonce", base64.b64decode(key.sign("nonce")))


@pytest.mark.parametrize(
    ("seed", "why"),
    [
        ("", "cut short"),
        ("not base32!", "not base32"),
        (DOCUMENTED[0][:-2], "cut short"),
        (DOCUMENTED[0][:-1] + "A", "mistyped"),
        (DOCUMENTED[1], "not the seed|cut short"),
        (seed_of(SigningKey.generate(), ACCOUNT), "not the seed of a user"),
    ],
)
def test_what_is_no_seed_of_a_user_is_refused_and_not_shown(seed: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as wrong:
        NatsKey(seed)
    assert not seed or seed not in str(wrong.value)
