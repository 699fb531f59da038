from __future__ import annotations

from datetime import datetime

import pytest

from services.frontend.models import chat_template
from services.frontend.models.chat_template import ChatTemplate, StepLimitReached
from shared.errors import InvalidRequest, ModelError

HELLO = [{"role": "user", "content": "<hello> & 'you'"}]


def test_blocks_of_a_template_leave_no_empty_lines_as_in_transformers() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source, {}).render(HELLO) == "<hello> & 'you'\n"


def test_special_tokens_the_date_and_json_are_there() -> None:
    source = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ messages | tojson }}{{ add_generation_prompt }}"
    rendered = ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 1, 31)).render(HELLO)
    assert rendered == '<s>31 Jan 2026[{"role": "user", "content": "<hello> & \'you\'"}]True'


def test_a_template_that_refuses_is_the_requests_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refusal:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(HELLO)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ (messages[0].content * 10000000) | length }}",
        "{{ (1000000000 * messages) | length }}",
        "{{ (7 ** 9000000) % 10 }}",
        "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100) %}{% endfor %}",
        "{% for i in range(20) %}{% for j in range(20) %}{% set x = i * j %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(30) }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in range(40) %}{% call m() %}x{% endcall %}{% endfor %}",
    ],
)
def test_a_templates_steps_are_counted(source: str) -> None:
    with pytest.raises(StepLimitReached):
        ChatTemplate(source, {}).render(HELLO, 99)


LOOPS = "{% for i in range(40) %}{% for j in range(40) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("name", ["_step", chat_template._STEP, "step"])
@pytest.mark.parametrize(
    "written",
    [
        "{%% set %s = dict %%}" + LOOPS,
        "{%% macro m(%s) %%}" + LOOPS + "{%% endmacro %%}{{ m(dict) }}",
        "{%% macro m() %%}" + LOOPS + "{%% endmacro %%}{{ m(**{'%s': dict}) }}",
        "{%% for %s in [dict] %%}" + LOOPS + "{%% endfor %%}",
        "{%% with %s = dict %%}" + LOOPS + "{%% endwith %%}",
        "{%% block %s scoped %%}" + LOOPS + "{%% endblock %%}",
    ],
)
def test_no_name_in_a_template_switches_the_counting_off(name: str, written: str) -> None:
    try:
        one = ChatTemplate(written.replace("%%", "%").replace("%s", name), {})
    except ModelError:
        return  # the name cannot be written there
    with pytest.raises((StepLimitReached, InvalidRequest)) as ended:
        one.render(HELLO, 99)
    assert ended.type is StepLimitReached or "takes no keyword argument" in str(ended.value)


def test_steps_are_counted_for_each_rendering_and_leave_no_trace_in_the_text() -> None:
    counting = ChatTemplate("{% for i in range(50) %}{{ loop.index }}{% endfor %}", {})
    for _ in range(3):
        assert counting.render(HELLO, 50) == "".join(map(str, range(1, 51)))


def test_the_rendered_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDERED_LIMIT_CHARACTERS", 1000)
    with pytest.raises(InvalidRequest, match="longer than"):
        ChatTemplate("{% for i in range(2000) %}x{% endfor %}", {}).render(HELLO)


def test_a_template_that_does_not_parse_names_its_line() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})


@pytest.mark.parametrize(
    "source", ["{% for a in b %}" * 25 + "{% endfor %}" * 25, "{{ " + "(" * 5000 + "1" + ")" * 5000]
)
def test_a_template_that_does_not_compile_is_the_models_error(source: str) -> None:
    with pytest.raises(ModelError, match="the chat template"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "reads", "reads_calls"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].tool_calls }}", {"tools"}, True),
        ("{%- if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", {"tools"}, False),
        ("{% set tools = [] %}{{ tools }} tools", set(), False),
        ("{% for message in messages if message['tool_calls'] %}{{ loop.index }}{% endfor %}", set(), True),
        ("{% macro m(x) %}{{ x }}{{ enable_thinking }}{% endmacro %}{{ m(bos_token) }}", {"enable_thinking"}, False),
        ("{% set ns = namespace(a=1) %}{% for i in range(ns.a) %}{% set ns.a = i %}{% endfor %}", set(), False),
        ("{{ raise_exception(strftime_now('%d')) if add_generation_prompt }}", set(), False),
    ],
)
def test_a_template_tells_what_it_reads(source: str, reads: set[str], reads_calls: bool) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert (template.reads, template.reads_calls) == (reads, reads_calls)


def test_names_of_its_own_are_given_to_a_template() -> None:
    template = ChatTemplate("{{ 'off' if enable_thinking is false else 'on' }}", {})
    assert template.render(HELLO) == "on"
    assert template.render(HELLO, more={"enable_thinking": False}) == "off"


def test_tools_are_none_where_there_are_none() -> None:
    template = ChatTemplate("{{ tools is none }} {{ tools | tojson }}", {})
    assert template.render(HELLO) == "True null"
    assert template.render(HELLO, tools=[{"type": "function"}]) == 'False [{"type": "function"}]'


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("A{% generation %}B{{ messages[0].role }}{% endgeneration %}C", "ABuserC"),
        ("a \n{%- generation -%} b {%- endgeneration -%}\n c", "abc"),
        ("  {% generation %}\nx\n  {% endgeneration %}\ny", "x\ny"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}", "2"),
        ("{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}", "1user"),
        ("{% macro m(x) %}{% generation %}[{{ x }}]{% endgeneration %}{% endmacro %}{{ m('a') | upper }}", "[A]"),
        ("{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x * 2 }}", "aa"),
        ("{% generation %}{% endgeneration %}{{ generation is defined }}", "False"),
    ],
)
def test_the_tag_around_an_assistants_text_renders_what_is_inside_as_in_transformers(
    source: str, rendered: str
) -> None:
    assert ChatTemplate(source, {}).render(HELLO) == rendered


def test_a_generation_tag_without_its_end_names_its_line() -> None:
    with pytest.raises(ModelError, match="line 2: Unexpected end of template"):
        ChatTemplate("\n{% generation %}text", {})


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ documents is none }}", "True"),
        ("{{ {'b': [1], 'a': '<ü>'} | tojson }}", '{"b": [1], "a": "<ü>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'ü' | tojson(ensure_ascii=true) }}{{ [1] | tojson(indent=1) }}", '"\\u00fc"[\n 1\n]'),
        ("{% for i in [0, 1] %}{% if i == 0 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in [0, 1] %}{{ i }}{% break %}{% endfor %}", "0"),
        ("{{ dict(a=1).a }}{{ dict([('b', 2)])['b'] }}{{ dict.fromkeys(['c'], 3).c }}", "123"),
    ],
)
def test_what_transformers_gives_to_templates_is_there(source: str, rendered: str) -> None:
    assert ChatTemplate(source, {}).render(HELLO) == rendered


def test_products_and_powers_of_usual_size_are_those_of_python() -> None:
    source = (
        "{{ '-' * 3 }} {{ 2 * '=' }} {{ [1] * 2 }} {{ 6 * 7 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1.5 * 2 }}{{ 'x' * -1 }}"
    )
    assert ChatTemplate(source, {}).render(HELLO) == "--- == [1, 1] 42 1024 0.5 3.0"
