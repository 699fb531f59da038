from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.frontend.models import trial
from services.frontend.models.model import load_model
from services.frontend.models.template_check import main
from services.frontend.models.tokenizer_trial import (
    KNOWN,
    RUN_CHARACTERS,
    TrialVerdict,
    _verdicts,
    texts,
    try_tokenizer,
)
from services.frontend.output.tokenizer_json import parse_tokenizer_json
from shared.errors import ModelError
from tests.frontend.cards import card_of

BACKTRACKING = "(a+)+b|."
PATIENT = "from services.frontend.models import tokenizer_trial as one; one.SLOW_S = one.CPU_LIMIT_S; one.main()"
"""A trial whose limit for a slow text is its limit for all: a tokenizer that is quick is quick on any machine."""


@pytest.fixture(autouse=True)
def unknown() -> None:
    _verdicts.clear()


def with_steps(copy: Path, *steps: Any, **more: Any) -> Path:
    """Put steps before the pre-tokenizer of a model's tokenizer."""
    path = copy / "tokenizer.json"
    file = msgspec.json.decode(path.read_bytes())
    pretokenizers = [*steps, file["pre_tokenizer"]]
    path.write_bytes(
        msgspec.json.encode({**file, "pre_tokenizer": {"type": "Sequence", "pretokenizers": pretokenizers}, **more})
    )
    return copy


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("steps", "more", "why"),
    [
        ([split(BACKTRACKING)], {}, "fails on a text: .*retry-limit"),
        (
            [],
            {"normalizer": {"type": "Replace", "pattern": {"String": "."}, "content": "b" * 10**6}},
            "takes more than",
        ),
    ],
)
def test_a_model_whose_tokenizer_takes_too_much_for_a_short_text_is_neither_loaded_nor_passes_the_check(
    copy: Path, capsys: pytest.CaptureFixture[str], steps: list[Any], more: dict[str, Any], why: str
) -> None:
    with_steps(copy, *steps, **more)
    with pytest.raises(ModelError, match=f"the tokenizer: .*{why}"):
        load_model(card_of(copy), copy)
    assert main([str(copy)]) == 2
    assert f"{copy}/tokenizer.json: the tokenizer: " in capsys.readouterr().err


def test_a_tokenizer_with_an_unknown_regex_is_tried_once_and_never_runs_on_the_event_loop(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(card_of(with_steps(copy, split(r"\p{L}+|\p{N}+"))), copy)
    assert not model.encodes_inline
    monkeypatch.setattr(trial, "WALL_LIMIT_S", 0.0)
    load_model(card_of(copy), copy)
    [verdict] = _verdicts.values()
    assert not verdict.objection  # it may count as slow on a busy machine


def test_texts_have_runs_of_what_the_regexes_name() -> None:
    found = set(texts([r"(q+)+z|(yx|y)+"]))
    assert {"q" * RUN_CHARACTERS, "yx" * (RUN_CHARACTERS // 2)} <= found
    assert max(map(len, found)) <= RUN_CHARACTERS
    assert len(set(texts([chr(number) for number in range(0x4E00, 0x5000)]))) < 100


def test_a_tokenizer_of_a_known_form_needs_no_trial(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (directory / "tokenizer.json").read_bytes()
    monkeypatch.setattr(trial, "WALL_LIMIT_S", 0.0)
    try_tokenizer(content, parse_tokenizer_json(content))
    assert not _verdicts


def test_a_tokenizer_that_takes_long_for_a_short_text_does_not_run_on_the_event_loop_either(copy: Path) -> None:
    dots = {"type": "Replace", "pattern": {"String": "."}, "content": "b"}
    content = (with_steps(copy, normalizer=dots) / "tokenizer.json").read_bytes()
    tried = subprocess.run((sys.executable, "-c", PATIENT), input=content, capture_output=True, check=True)
    _verdicts[sha256(content).hexdigest()] = msgspec.json.decode(tried.stdout, type=TrialVerdict)
    assert load_model(card_of(copy), copy).encodes_inline
    with_steps(copy, normalizer={**dots, "content": "b " * 40})
    assert not load_model(card_of(copy), copy).encodes_inline


def test_verdicts_are_kept_up_to_a_bound(copy: Path) -> None:
    content = (with_steps(copy, split("x")) / "tokenizer.json").read_bytes()
    _verdicts.update((str(number), TrialVerdict()) for number in range(KNOWN))
    try_tokenizer(content, parse_tokenizer_json(content))
    assert len(_verdicts) == KNOWN
    assert "0" not in _verdicts
