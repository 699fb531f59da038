"""What several programs ask: texts with calls, which the model `echo` says back, a tool, a schema and its object."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
COUNTED = f"I count. {CALL}"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
MULTIPLY = {"type": "function", "function": {"name": "multiply", "parameters": NUMBERS}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
ADA = {"name": "Ada", "born": 1815}


class Person(BaseModel):
    """A person, who may be ADA."""

    name: str
    born: int


def says(text: str) -> list[Any]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]
