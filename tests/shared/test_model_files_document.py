"""docs/model_files.md names the files, the texts that end a turn, and the splits of GGUF files that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from services.worker.native.gguf_tokenizer import splitter_of
from shared.model_file import FILES
from shared.model_files.special_tokens import END_OF_TURN

PAGE = (Path(__file__).parents[2] / "docs" / "model_files.md").read_text(encoding="utf-8")


def test_all_files_that_are_read_are_named() -> None:
    fetched = PAGE.split("From a repository come")[1].split("\n\n")[0]
    assert [name for name in FILES if f"`{name}`" not in fetched] == []


def test_all_texts_that_end_a_turn_are_named() -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith("| the end of a turn |")]
    named = re.findall(r"`(<.*?>)`", row.replace("\\|", "|"))
    assert tuple(named) == END_OF_TURN


def test_the_splits_that_are_named_are_known() -> None:
    table = PAGE.split("| split | names |")[1].split("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall("`([^`]+)`", row.split("; also")[0])]
    assert len(names) == 15
    assert [name for name in names if splitter_of(name) is None] == []
