"""Which names of ignored fields the metric has."""

from __future__ import annotations

import pytest

from services.frontend.serving.known_fields import counted_name


@pytest.mark.parametrize(
    "name",
    [
        *("store", "vllm_xargs", "options.num_ctx", "messages[].content[].cache_control"),
        "chat_template_kwargs.xml_tools",
        *("include[].reasoning.encrypted_content", "response_format.json_schema.schema.format"),
    ],
)
def test_a_name_that_an_api_has_is_counted_by_itself(name: str) -> None:
    assert counted_name(name) == name


def test_versions_of_a_tool_are_counted_together() -> None:
    assert counted_name("tools[].web_search_20250305") == counted_name("tools[].web_search") == "tools[].web_search"


@pytest.mark.parametrize("name", ["sk-1234", "messages[].mine", "chat_template_kwargs.mine", "?", "..."])
def test_a_clients_own_name_is_another(name: str) -> None:
    assert counted_name(name) == "other"
