from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.frontend.models import template_trial
from services.frontend.models.model import load_model
from services.frontend.models.template_trial import try_template
from shared.errors import ModelError
from tests.frontend.cards import HERMES, card_of, with_template

REAL = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content | trim }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SLOW = "takes more than 2 s or 512 MiB"


@pytest.fixture(autouse=True)
def unknown() -> None:
    template_trial._verdict.cache_clear()


@pytest.mark.parametrize(
    "source",
    [
        REAL,
        HERMES,
        "",
        "{{ raise_exception('roles must alternate') }}",
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}x",
        "{{ messages[7].content.x }}",
        "{% for a in range(2000) %}{% for b in range(5000) %}{% endfor %}{% endfor %}",
        "{% for i in range(99) %}{{ 'x' * 500000 }}{% endfor %}",
    ],
)
def test_a_template_whose_steps_are_small_is_used_and_may_refuse_a_conversation(source: str) -> None:
    try_template(source, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%1000000000d' % 7 }}",
        "{{ 'x'.center(3000000000) }}",
        "{% set x = 'x' * 1000000000 %}",
        "{% if messages | length > 1 %}{{ 'x' | indent(2000000000) }}{% endif %}",
        "{% if tools %}{% set x = [messages] * 1000000000 %}{% endif %}",
        pytest.param("{{ 7 ** 50000000 % 10 }}", id="power"),
        pytest.param("{{ 1 " + "+ 1" * 1_000_000 + " }}", id="long source"),
    ],
)
def test_a_template_with_a_step_that_takes_too_much_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match=SLOW):
        try_template(source, {})


def test_a_model_with_such_a_template_is_not_loaded_whichever_of_its_templates_it_is(copy: Path) -> None:
    slow = "{{ 'x' * 1000000000 }}"
    for templates in (
        slow,
        [{"name": "default", "template": slow}, {"name": "tool_use", "template": REAL}],
        [{"name": "default", "template": REAL}, {"name": "tool_use", "template": slow}],
    ):
        with pytest.raises(ModelError, match=SLOW):
            load_model(card_of(copy), with_template(copy, templates))
    load_model(card_of(copy), with_template(copy, REAL))


def test_a_template_that_does_not_compile_is_an_error_of_its_loading(copy: Path) -> None:
    try_template("{% for %}", {})
    with pytest.raises(ModelError, match="line 1"):
        load_model(card_of(copy), with_template(copy, "{% for %}"))


def test_a_verdict_is_kept_up_to_a_bound_and_no_failure_is(monkeypatch: pytest.MonkeyPatch) -> None:
    try_template(REAL, {})
    with monkeypatch.context() as without:
        without.setattr(sys, "executable", "/no/such/python")
        try_template(REAL, {})
        with pytest.raises(ModelError, match="no process to try the chat template in"):
            try_template(REAL, {"bos_token": "<s>"})
    try_template(REAL, {"bos_token": "<s>"})
    assert template_trial._verdict.cache_info().maxsize == template_trial.KNOWN


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first >&2\necho ModuleNotFoundError: jinja2 >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ModelError, match=r"ended with status 3: ModuleNotFoundError: jinja2$"):
        try_template(REAL, {})


def test_a_process_that_cannot_say_anything_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ModelError, match="ended with status 1"):
            try_template(REAL, {})
    with monkeypatch.context() as waiting:
        waiting.setattr(template_trial, "WALL_LIMIT_S", 0.0)
        with pytest.raises(ModelError, match="did not end within 0 s"):
            try_template(REAL, {})
    try_template(REAL, {})
