"""LoRA ids: what a LoRA is called inside the fleet. Pure.

An id is `name@digest`: the name that clients use, and a digest of the adapter's files. Cards, requests, blocks and
their keys carry the id. So a block computed with other files of the same name is another block, everywhere, and an
answer goes on only where the same files are loaded. An id without a digest is the name alone.

With the name alone, blocks of the old files would be found after an update, in every cache that missed a message to
forget them.
"""

from __future__ import annotations

import re

DIGEST_CHARACTERS = 16
"""Length of the digest in an id, in hexadecimal digits."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
NAME_RULE = "1 to 128 letters, digits and . _ : / -, the first a letter or digit"


def is_lora_name(name: str) -> bool:
    """Whether a LoRA can have this name; NAME_RULE says it for people."""
    return _NAME.fullmatch(name) is not None


def make_lora_id(name: str, digest: str) -> str:
    """Return the id of the LoRA with this name and these files; `digest` is cut to DIGEST_CHARACTERS."""
    assert is_lora_name(name)
    return f"{name}@{digest[:DIGEST_CHARACTERS]}"


def name_of_lora(lora_id: str) -> str:
    """Return the name that clients use for a LoRA."""
    return lora_id.partition("@")[0]
