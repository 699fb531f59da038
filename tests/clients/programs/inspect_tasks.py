"""Tasks of inspect_ai, whose answers the model `echo` gives: it says the sample's text, or what a tool returned."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
TEXTS = {"The river is the Rhine.": "Rhine", "It is late.": "late", "No.": "yes", "One, two, three.": "two"}


@tool
def multiply() -> Tool:
    """Return a tool that multiplies."""

    async def execute(a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a * b

    return execute


@task
def texts() -> Task:
    """Three of four samples have their target in their text."""
    samples = [Sample(input=text, target=target) for text, target in TEXTS.items()]
    return Task(dataset=samples, solver=generate(), scorer=includes())


@task
def calls() -> Task:
    """The model calls the tool, and its next answer is what the tool returned."""
    samples = [Sample(input=CALL, target="42")]
    return Task(dataset=samples, solver=[use_tools(multiply()), generate()], scorer=includes())
