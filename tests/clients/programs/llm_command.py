"""Simon Willison's command `llm` against the frontend at the URL given; a traceback where something is not right.

llm_command.py URL FOLDER        FOLDER: an empty one, where llm finds its settings and writes its log

The models are listed in extra-openai-models.yaml, as llm's documents say: over chats, and over responses. Commands run
in this process, because each process of its own would take 3 s of CPU to begin.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

URL, FOLDER = sys.argv[1:]
os.environ |= {"LLM_USER_PATH": FOLDER, "OPENAI_API_KEY": "any"}  # read when llm is imported

from asked import ADA, CALL  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from llm.cli import cli  # noqa: E402

FUNCTION = """
def multiply(a: int, b: int) -> int:
    "Multiply two numbers."
    return a * b
"""


def llm(*arguments: str, text: str = "") -> str:
    """What the command writes to stdout."""
    ended = CliRunner().invoke(cli, arguments, input=text)
    assert ended.exit_code == 0, f"{arguments}: {ended.output}{ended.exception!r}"
    return ended.stdout.strip()


def describe_models() -> None:
    """Settings in JSON, which is YAML too."""
    listed: list[dict[str, Any]] = []
    for model in ("echo", "speaker"):
        both = {"model_name": model, "api_base": URL, "supports_schema": True, "supports_tools": True}
        listed += [both | {"model_id": model}, both | {"model_id": f"{model}-responses", "responses": True}]
    (Path(FOLDER) / "extra-openai-models.yaml").write_text(json.dumps(listed))


def a_prompt_is_answered_and_the_conversation_goes_on(way: str) -> None:
    assert llm("-m", f"echo{way}", "one, two", "-s", "Be kind.") == "one, two"
    assert llm("-c", "and three") == "and three"
    assert llm("-m", f"echo{way}", "--no-stream", text="from a pipe") == "from a pipe"


def an_answer_fits_a_schema(way: str) -> None:
    asked = ("--schema", "name, born int", "--no-stream")
    assert json.loads(llm("-m", f"echo{way}", *asked, json.dumps(ADA))) == ADA
    bound = ("-o", "max_tokens", "200", "-o", "temperature", "0")
    born = json.loads(llm("-m", f"speaker{way}", *asked, *bound, "Who was Ada Lovelace?"))
    assert (type(born["name"]), type(born["born"])) == (str, int), born


def a_tool_is_called(way: str) -> None:
    for streamed in ((), ("--no-stream",)):
        said = llm("-m", f"echo{way}", "--functions", FUNCTION, *streamed, CALL)
        assert said.endswith("42"), said
    version = '<tool_call>\n{"name": "llm_version", "arguments": {}}\n</tool_call>'
    said = llm("-m", f"echo{way}", "-T", "llm_version", "--no-stream", version)
    assert said.endswith(llm("--version").split()[-1]), said


describe_models()
for each in ("", "-responses"):
    a_prompt_is_answered_and_the_conversation_goes_on(each)
    an_answer_fits_a_schema(each)
    a_tool_is_called(each)
