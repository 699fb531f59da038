"""Tests of LoRA ids."""

import pytest

from shared.lora import is_lora_name, make_lora_id, name_of_lora


@pytest.mark.parametrize("name", ["sql", "team/sql-v2", "a", "A.b_c:d", "x" * 128])
def test_an_id_holds_name_and_digest(name: str) -> None:
    assert is_lora_name(name)
    lora_id = make_lora_id(name, "0123456789abcdef" * 4)
    assert lora_id == f"{name}@0123456789abcdef"
    assert name_of_lora(lora_id) == name


@pytest.mark.parametrize("name", ["", "a@b", "-a", "a b", "é", "x" * 129, "a\n"])
def test_names_that_no_lora_has(name: str) -> None:
    assert not is_lora_name(name)


def test_an_id_without_a_digest_is_the_name() -> None:
    assert name_of_lora("sql") == "sql"
