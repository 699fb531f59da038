"""services/frontend/models/template_check.py: the program that `up` runs; its refusals are in the tests of `up`'s
check."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.frontend.models.template_check import main


def test_a_model_without_a_chat_template_is_no_fault_but_an_empty_file_given_for_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jinja"
    empty.write_text("")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    assert main([str(tmp_path), str(empty)]) == 2
    assert capsys.readouterr().err == f"{empty}: the chat template is empty\n"


def test_the_template_of_tokenizer_config_json_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 7}')
    assert main([str(tmp_path)]) == 2
    assert "chat_template is neither a text nor a list" in capsys.readouterr().err
