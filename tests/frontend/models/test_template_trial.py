from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import pytest

from services.frontend.models import template_trial, trial
from services.frontend.models.chat_template import ChatTemplate
from services.frontend.models.message_list import TemplateRules
from services.frontend.models.model import load_model
from services.frontend.models.template_trial import try_template
from shared.errors import ModelError
from tests.frontend.cards import HERMES, card_of, with_template
from tests.frontend.strict_templates import QWEN_3_5

REAL = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content | trim }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SLOW = "takes more than 2 s or 512 MiB"


@pytest.fixture(autouse=True)
def unknown() -> None:
    template_trial._tried.cache_clear()


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
        "{% if messages | length > 1 %}{{ 'x' | indent(2000000000) }}{% endif %}",
        "{% if tools %}{{ 'x' | center(2000000000) }}{% endif %}",
        "{% if messages[1].role == 'system' %}{{ 'x' | center(2000000000) }}{% endif %}",
        pytest.param("{{ 1 " + "+ 1" * 1_000_000 + " }}", id="long source"),
    ],
)
def test_a_template_with_a_step_that_takes_too_much_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match=SLOW):
        try_template(source, {})


@pytest.mark.parametrize("constant", ["'x' * 700000000", "'' | center(700000000)", "'x' ~ 'y' * 700000000"])
def test_what_was_not_computed_in_the_trial_is_not_computed_where_there_is_more_memory(constant: str) -> None:
    source = "{% if false %}{{ " + constant + " }}{% endif %}fine"
    compiled = try_template(source, {})
    assert len(compiled.code) < 10_000
    tracemalloc.start()
    try:
        assert ChatTemplate(compiled, {}).render([]) == "fine"
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_constant_that_fits_the_trial_but_is_large_is_no_template() -> None:
    with pytest.raises(ModelError, match="compiled, it has more than"):
        try_template("{{ '' | center(1000000) }}", {})


def test_the_trial_finds_the_rules_of_a_template_for_the_frontend() -> None:
    compiled = try_template(QWEN_3_5, {})
    assert compiled.rules == ChatTemplate(QWEN_3_5, {}).rules == ChatTemplate(compiled, {}).rules != TemplateRules()


def test_a_model_with_such_a_template_is_not_loaded_whichever_of_its_templates_it_is(copy: Path) -> None:
    slow = "{{ 'x' | center(1000000000) }}"
    for templates in (
        slow,
        [{"name": "default", "template": slow}, {"name": "tool_use", "template": REAL}],
        [{"name": "default", "template": REAL}, {"name": "tool_use", "template": slow}],
    ):
        with pytest.raises(ModelError, match=SLOW):
            load_model(card_of(copy), with_template(copy, templates))
    load_model(card_of(copy), with_template(copy, REAL))


def test_a_template_that_does_not_compile_is_an_error_of_its_trial(copy: Path) -> None:
    with pytest.raises(ModelError, match="line 1"):
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
    assert template_trial._tried.cache_info().maxsize == template_trial.KNOWN


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
        waiting.setattr(trial, "WALL_LIMIT_S", 0.0)
        with pytest.raises(ModelError, match="did not end within 0 s"):
            try_template(REAL, {})
    try_template(REAL, {})
