"""Why a request is refused that fits its schema: what openapi/operations.py says in words instead.

Each is the field, without places in lists, and how the message goes on; so a refusal that a schema could have said is
not taken for one of these.
"""

from __future__ import annotations

import re

UNSAID: tuple[tuple[str, str], ...] = (
    ("model", ""),  # which are served
    ("deadline_s|Headrace-Deadline-S", ".*: a deadline of"),
    ("priority", "priority: .* is lower than"),
    ("X-(Session-Id|Cache-Salt)", "X-(Session-Id|Cache-Salt): must be at most 256 printable"),
    # fields that need one another, or rule one another out
    ("top_logprobs", "top_logprobs needs logprobs: true"),
    ("max_tokens", "max_tokens and max_completion_tokens contradict"),
    ("ignore_eos", "ignore_eos: cannot be combined"),
    ("enable_thinking|documents", ".*: chat_template_kwargs.* contradicts it"),
    ("best_of", "best_of: (must not be less than n|this value is not supported)"),
    ("stop", "stop: more than .* characters together"),
    ("guided_(json|regex|choice|grammar)|guided", "guided.*: (set exactly one of|cannot be combined)"),
    ("response_format|structured_outputs", ".*: cannot be combined with tools"),
    ("structured_outputs", "structured_outputs: (set exactly one of|cannot be combined)"),
    ("prompt", "prompt: send either prompt or messages|prompt.*: a token id in a list of prompts"),
    (
        "add_generation_prompt|continue_final_message|tools|tool_choice|chat_template_kwargs|enable_thinking"
        "|reasoning_effort",
        ".*: only allowed with messages",
    ),
    ("min_tokens", "min_tokens: .* is more than|min_tokens: not every worker"),
    ("allowed_token_ids", "allowed_token_ids: not every worker"),
    ("truncate_prompt_tokens", "truncate_prompt_tokens: (0 would|.* is more than|cannot be combined)"),
    ("return_token_ids", "return_token_ids: the prompts of all answers"),
    ("continue_final_message", "continue_final_message: add_generation_prompt"),
    (r"messages\.(content|tool_calls|role)", ".*(continue_final_message|cannot be continued)"),
    (r"chat_template_kwargs\..*", ".*: not a variable of requests"),
    ("logprobs", "logprobs: not every worker"),
    ("max_(completion_|output_)?tokens", ".*: must be at least 1, (unless echo|or -1)"),
    ("suffix", "suffix: "),  # texts, and a model that has marks for it
    # messages, by their roles
    (r"messages\.(tool_calls|reasoning(_content)?|refusal|function_call|tool_call_id)", ".*: only role"),
    (r"messages\.tool_call_id", ".*: the message names no call"),
    (r"messages\.tool_calls\.function", ".*: the call names no function"),
    (r"messages\.content", ".*: the message has no content"),
    (r"(messages|input)\.content\.type", ".*: (images|files) are not served"),
    (
        r"((messages|input)\.content|images|mask|input_reference)\.(image_url|file_id)",
        ".*: (needed: a data URI|files are not kept here)",
    ),
    ("image", "image: needed: either"),
    ("n|response_format", ".*: a stream has"),
    ("partial_images", "partial_images: only allowed with stream"),
    ("size|steps|guidance|negative_prompt", ".*"),  # the model's
    ("", "videos need a place"),  # a setting of the frontends
    ("input", "input.* is empty|input.*: a token id in a list of inputs|input: .* more than"),
    ("dimensions|pooling", ".*"),  # the model's
    # items
    (r"input\.call_id", ".*: no call"),
    ("input", ".*: (the message has no content|the message names no call|none of its items is a message)"),
    ("include", "include: .* is not supported together with tools|include: .*thinks"),
    ("top_logprobs", "top_logprobs needs include"),
    ("previous_response_id", ""),
    # tools
    (r"tools(\.function|\.custom|\.tools)?\.name", ".*: there are two tools"),
    (r"tools(\.function|\.tools)?\.parameters", ".*: (nested deeper|longer) than"),
    (r"tools(\.function|\.tools)?\.parameters\..*", ".*"),
    ("tools", "tools: longer than"),
    (r"(tools|tool_choice|tool_choice\.allowed_tools\.tools)\.(function|custom)", ".*missing required field"),
    (r"tools(\.tools|\.custom|\.function)?\.format", ".*"),
    (r"tools(\.tools)?\.type", ".*(are not served|no other namespace)"),
    (
        r"tool_choice((\.allowed_tools)?\.tools)?",
        ".*: (there are no tools|there is no tool|allowed_tools needs|Object|Expected)",
    ),
    (r"tool_choice(\.tools)?\.type", ".*are not served"),
    # what an answer is held to
    (r"response_format\.(schema(\..*)?|json_schema)", ".*"),
    (r"response_format\.json_schema\.schema(\..*)?|text\.format(\..*)?", ".*"),
    (r"(structured_outputs\.|guided_)(json|regex|grammar|choice)(\..*)?|tools", ".*"),
    (r"reasoning_effort|reasoning\.effort|thinking_token_budget", ".*"),
    # the model, its template, its context and its workers
    ("messages|input|prompt|max_tokens|max_completion_tokens|max_output_tokens", ".*(context|tokens|empty).*"),
    ("prompt|input|stop_token_ids|tokens|logit_bias|allowed_token_ids", "token id .* is outside the vocabulary"),
    (r"tools|messages\.tool_calls|chat_template_kwargs\..*|messages", ".*(template|model).*"),
)
_PLACE = re.compile(r"\[[^\]]*\]")


def said_elsewhere(param: str | None, message: str) -> bool:
    """Whether a rule has it."""
    field = _PLACE.sub("", param or "")
    return any(re.fullmatch(one, field) and re.match(how, message, re.DOTALL) for one, how in UNSAID)
