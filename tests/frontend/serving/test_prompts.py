from __future__ import annotations

import pytest

from services.frontend.models.chat_template import ChatTemplate
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.serving.prompts import read_kwargs
from shared.errors import InvalidRequest

TEMPLATE = ChatTemplate(
    "{{ bos_token }}{{ messages }}{{ tools }}{{ word }}{{ add_generation_prompt }}", {"bos_token": "^"}
)


def test_variables_that_the_template_reads_are_passed_on_and_others_are_ignored_by_name() -> None:
    ignored = IgnoredFields()
    assert read_kwargs(TEMPLATE, {"word": 1, "other": 2}, ignored) == {"word": 1}
    assert ignored.names == ("chat_template_kwargs.other",)


def test_strictly_they_are_left_to_be_refused() -> None:
    assert read_kwargs(TEMPLATE, {"word": 1, "other": 2}, REFUSE) == {"word": 1, "other": 2}
    assert read_kwargs(None, {"word": 1}, IgnoredFields()) == {"word": 1}, "there is no chat without a template"


@pytest.mark.parametrize("ignored", [IgnoredFields(), REFUSE], ids=["lenient", "strict"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("messages", "the field messages"),
        ("tools", "the field tools"),
        ("add_generation_prompt", "the field add_generation_prompt"),
        ("continue_final_message", "the field continue_final_message"),
        ("bos_token", "the server"),
        ("tokenize", "the server"),
    ],
)
def test_a_variable_that_has_its_value_from_elsewhere_is_refused(name: str, why: str, ignored: IgnoredFields) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_kwargs(TEMPLATE, {"word": 1, name: None}, ignored)
    assert refusal.value.param == f"chat_template_kwargs.{name}"
    assert why in str(refusal.value)
