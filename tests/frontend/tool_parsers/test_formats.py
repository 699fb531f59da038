from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.frontend.tool_parsers.formats import FORMATS, FormatName, detect_format, detect_reasoning


@pytest.mark.parametrize(
    ("template", "name"),
    [
        # as in the templates of Qwen 2.5, Hermes 2 Pro, Llama 3.1, Mistral v0.3 and Small 3.2, Llama 4
        (r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>" }}""", "hermes"),
        ("""{{ '<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>' }}""", "hermes"),
        ("""{{- "<tool_call>\\n" }}\n    {{- '{"name": <function-name>, "arguments": <args-dict>}\\n' }}""", "hermes"),
        ("""{{- 'Respond in the format {"name": function name, "parameters": dictionary' }}""", "llama3_json"),
        ("""{{- "[TOOL_CALLS] [" }}""", "mistral"),
        ("""{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}""", "mistral"),
        ("""{{- "Example Format: [func_name1(params_name1=params_value1), func_name2(params)]" }}""", "pythonic"),
        # Qwen 3 Coder's and GLM 4.5's calls are in other formats between the same tags
        ("<tool_call>\n<function=example_function_name>\n<parameter=p>", None),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", None),
        ("{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}", "pythonic"),
        (r"{{ '<function_calls>\n<invoke name=' }}", None),
        ("[TOOL_CALLS] or [func_name1(a=1)]", None),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_the_format_that_its_model_writes(template: str, name: FormatName | None) -> None:
    assert detect_format(template) == name


def test_a_template_shows_whether_its_model_reasons() -> None:
    assert detect_reasoning("{% set content = content.split('</think>')[-1] %}") == "think"
    assert detect_reasoning("{{ messages }}") is None


def test_ids_are_as_the_formats_templates_take_them() -> None:
    assert (FORMATS["mistral"].id_prefix, FORMATS["mistral"].id_digits) == ("", 9)


def test_the_document_has_every_format_and_no_other() -> None:
    document = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    table = document.partition("## What models write")[2].partition("Thinking is")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == ["tool_parser", *FORMATS]
