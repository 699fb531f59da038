"""Asks a frontend what its OpenAPI document allows, and what it does not: schemathesis, with rules of our own.

    fuzz.py URL SEED EXAMPLES UNSAID        UNSAID: JSON, pairs of patterns as in tests/frontend/unsaid.py

A body that fits the document is answered, or refused for what a schema does not say; one that does not fit is refused;
nothing is a 5xx; every answer is one that the document has, events too, and has no field that it has not. Exits with
schemathesis' status, and shows its report.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema_rs
import schemathesis
from schemathesis.cli import schemathesis as run
from schemathesis.core.failures import Failure
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

URL, SEED, EXAMPLES, UNSAID = sys.argv[1:]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "refused_for_a_rule",
    "answered_as_described",
)
TOKENS = 4
SELDOM = ("tools", "response_format", "structured_outputs", "chat_template_kwargs", "logit_bias", "stop_token_ids")
VOCABULARY = 320
LEAST_DEADLINE_S = 60
NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
DEADLINE = "Headrace-Deadline-S"
FOREIGN = ("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/embed", "/api/show")
DRAW = random.Random(SEED)
RULES = [(re.compile(field), re.compile(how, re.DOTALL)) for field, how in json.loads(UNSAID)]
PLACE = re.compile(r"\[[^\]]*\]")
with urllib.request.urlopen(f"{URL}/openapi.json") as answer:
    DOCUMENT: dict[str, Any] = json.load(answer)

for wrong in OPENAPI_31_VALIDATOR.iter_errors(DOCUMENT):
    sys.exit(f"no OpenAPI 3.1: {wrong.instance_path}: {wrong.message}")


def closed(schemas: dict[str, Any]) -> dict[str, Any]:
    """No object has a field that is not named."""
    return {
        name: schema | {"additionalProperties": False} if "properties" in schema else schema
        for name, schema in schemas.items()
    }


CLOSED = {"components": {"schemas": closed(DOCUMENT["components"]["schemas"])}}


def check_fits(ref: dict[str, Any], text: str) -> None:
    wrong = next(jsonschema_rs.validator_for(CLOSED | ref).iter_errors(json.loads(text)), None)
    if wrong is not None:
        raise Failure(operation="", title="Not as described", message=f"{wrong.message}\n{text[:2000]}")


@schemathesis.hook
def map_case(_context: Any, case: Any) -> Any:
    """Ask the one model there is, and give it time enough: else most answers would be 404, or 504. Every other body
    that fits breaks no rule between fields either, or few would come as far as a model."""
    if NUMBER.fullmatch(str(case.headers.get(DEADLINE, ""))):
        case.headers[DEADLINE] = str(LEAST_DEADLINE_S)
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = "tiny"
        if isinstance(body.get("deadline_s"), float) and 0 < body["deadline_s"] < LEAST_DEADLINE_S:
            body["deadline_s"] = LEAST_DEADLINE_S
        if not {"max_tokens", "max_completion_tokens"} & body.keys() and "completions" in case.path:
            body["max_tokens"] = TOKENS
        if "responses" in case.path:
            body.setdefault("max_output_tokens", TOKENS)
        if case.meta.generation.mode.is_positive and DRAW.randrange(2):
            mend(body)
    return case


def mend(body: dict[str, Any]) -> None:
    """So that the rules that openapi/operations.py has in words hold, as a rule."""
    for message in body.get("messages") or ():
        if message["role"] == "tool" and not message.get("tool_call_id"):
            message["role"] = "user"
        for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if message["role"] != role:
                message.pop(field, None)
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = "{}"
        message["content"] = message.get("content") or "x"
    if isinstance(body.get("priority"), int | float):
        body["priority"] = abs(body["priority"])
    if body.get("stream_options") is not None:
        body["stream"] = True
    if body.get("top_logprobs") is not None and "messages" in body:
        body["logprobs"] = True
    if body.get("max_tokens") is not None:
        body.pop("max_completion_tokens", None)
    for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(field) is not None:
            body[field] = TOKENS
    for field in SELDOM:
        if DRAW.randrange(4):
            body.pop(field, None)
    if not body.get("tools"):
        body.pop("tool_choice", None)
    if "tokens" in body:
        body["tokens"] = known(body["tokens"])
    elif "input" in body:
        body.pop("previous_response_id", None)
        body.pop("include" if body.get("tools") else "text", None)
        body["input"] = known(body["input"]) if "dimensions" in body else "x"
    elif body.get("messages"):
        body.pop("prompt", None)
    else:
        body["prompt"] = known(body.get("prompt")) or "x"
        for field in (
            *("add_generation_prompt", "continue_final_message", "tools", "tool_choice", "chat_template_kwargs"),
            *("enable_thinking", "reasoning_effort"),
        ):
            body.pop(field, None)


def known(prompt: Any) -> Any:
    """Keep the tokens that the model has."""
    if isinstance(prompt, list):
        ids = [one for one in prompt if isinstance(one, int | float)]
        return [int(one) % VOCABULARY for one in ids] or [known(one) or "x" for one in prompt]
    return prompt


@schemathesis.check
def refused_for_a_rule(_context: Any, response: Any, case: Any) -> None:
    """What fits the document is answered, or breaks a rule that a schema does not say."""
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    if case.path in FOREIGN:  # their errors name no field but in words
        return
    error = response.json()["error"]
    field = PLACE.sub("", error["param"] or "")
    if not any(one.fullmatch(field) and how.match(error["message"]) for one, how in RULES):
        raise Failure(operation=case.operation.label, title="Refused for no rule", message=json.dumps(error))


@schemathesis.check
def answered_as_described(_context: Any, response: Any, case: Any) -> None:
    """Nothing is in an answer that is not described, in an event neither."""
    media = response.headers.get("content-type", [""])[0].partition(";")[0]
    described = DOCUMENT["paths"].get(case.path, {}).get(case.method.lower(), {}).get("responses", {})
    told = described.get(str(response.status_code), {})
    if "$ref" in told:
        told = DOCUMENT["components"]["responses"][told["$ref"].rpartition("/")[2]]
    schema = told.get("content", {}).get(media, {}).get("schema", {})
    if media == "text/event-stream" and case.path not in FOREIGN:
        *events, end = re.split(r"(?m)^(?:event: .*\n)?data: |\n\n", response.text)
        data = schema["properties"]["data"]
        held = data.get("anyOf", [data])[-1]["contentSchema"]
        for event in filter(None, events):
            if event != "[DONE]":
                check_fits(held, event)
        assert end == "", "a stream ends with an event"
    elif "$ref" in schema:
        check_fits(schema, response.text)


SETTINGS = """
[checks]
negative_data_rejection.expected-statuses = [400, 404, 405, 413]
"""
"""413 is a refusal too, which schemathesis does not know by itself."""
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)  # where schemathesis leaves what it notes
    Path("schemathesis.toml").write_text(SETTINGS)
    run(
        [
            "run",
            f"{URL}/openapi.json",
            *("--exclude-path-regex", "count_tokens|^/api/(generate|embed|show)"),  # two of each kind are enough
            *("--checks", ",".join(CHECKS)),
            *("--seed", SEED, "--max-examples", EXAMPLES),
            *("--phases", "examples,coverage,fuzzing", "--request-timeout", "120"),
            *("--no-shrink", "--continue-on-failure"),
            *(
                "--suppress-health-check",
                "all",
                "--warnings",
                "off",
                "--output-truncate",
                "false",
                "--output-sanitize",
                "false",
            ),
        ]
    )
