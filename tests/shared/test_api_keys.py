from __future__ import annotations

import hashlib
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.api_keys import FILE_LIMIT_BYTES, KEYS_LIMIT, KeyEntry, key_digest, read_keys
from shared.errors import ConfigError

HASH = hashlib.sha256(b"some key").hexdigest()
OTHER = hashlib.sha256(b"another").hexdigest()


def test_the_file_is_toml_or_json_and_says_the_same_in_both() -> None:
    toml = f"""
    # who may ask
    alice = {{ sha256 = "{HASH}", requests_per_minute = 600, tokens_per_minute = 200_000, concurrency = 16 }}
    [bob]
    sha256 = "{OTHER}"
    """
    entries = {"alice": KeyEntry(HASH, 600, 200_000, 16), "bob": KeyEntry(OTHER)}
    assert read_keys(toml.encode()) == entries
    said = {"alice": {"sha256": HASH, "requests_per_minute": 600, "tokens_per_minute": 200_000, "concurrency": 16}}
    assert read_keys(json.dumps(said | {"bob": {"sha256": OTHER}}).encode()) == entries


def test_an_empty_file_has_no_keys() -> None:
    assert read_keys(b"") == read_keys(b"{}") == {}


def test_what_the_file_holds_of_a_key_is_its_digest() -> None:
    assert key_digest("some key").hex() == HASH


SECRET = "hr-Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"alice", "not TOML: "),
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON: line 1, column 2: "),
        (b'{"a": {}, "a": {}}', "has a name twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"a = " + b"9" * 5000, "too many digits"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b"a = 1", "a: Expected `object`, got `int`"),
        (b"[a]", "a: Object missing required field `sha256`"),
        (b'[a]\nsha256 = "' + SECRET.encode() + b'"', "a: Expected 64 digits of 0-9 and a-f - at `$.sha256`"),
        (f'[{SECRET}]\nsha256 = "{HASH}"'.encode(), "entry 1: a name has "),
        (f"[a]\n{SECRET} = 1".encode(), "a: Object contains unknown field `…`"),
        (f"[{SECRET}]\n[{SECRET}]".encode(), "not TOML: Cannot declare ('…',) twice"),
        (f'[""]\nsha256 = "{HASH}"'.encode(), "entry 1: a name has "),
        (f'[a]\nsha256 = "{HASH}"\nlimit = 3'.encode(), "a: Object contains unknown field `limit`"),
        (f'[a]\nsha256 = "{HASH}"\nconcurrency = 0'.encode(), "a: Expected `int` >= 1"),
        (f'[a]\nsha256 = "{HASH}"\nsalt = ""'.encode(), "a: Expected `own`, or 1 to 64 of the characters a-z"),
        (f'[a]\nsha256 = "{HASH}"\nconcurrency = 1.5'.encode(), "a: Expected `int | null`, got `float`"),
        (f'[a]\nsha256 = "{HASH}"\ntokens_per_minute = {10**13}'.encode(), "a: Expected `int` <= "),
        (f'[a]\nsha256 = "{HASH}"\n[b]\nsha256 = "{HASH}"'.encode(), "b: this is the same key as that of a"),
        (b"#" * (FILE_LIMIT_BYTES + 1), f"larger than {FILE_LIMIT_BYTES} bytes"),
        (b"".join(b"k%d = 1\n" % number for number in range(KEYS_LIMIT + 1)), f"at most {KEYS_LIMIT} are allowed"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_what_stands_in_it_is_not_repeated(file: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_keys(file)
    assert said in str(refusal.value)
    assert SECRET not in str(refusal.value)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_raise_anything_but_a_config_error(file: bytes) -> None:
    with suppress(ConfigError):
        read_keys(file)
