"""The names of fields that a known API has, for the metric of ignored fields. Pure.

Each is in a Struct of a body, or in OTHERS.
"""

from __future__ import annotations

import re
from types import ModuleType

from msgspec import Struct

from services.frontend.anthropic import blocks as anthropic_blocks
from services.frontend.anthropic import request as anthropic
from services.frontend.anthropic import tools as anthropic_tools
from services.frontend.ollama import request as ollama
from services.frontend.protocol import (
    chat,
    completions,
    embeddings,
    messages,
    parts,
    pictures,
    responses_items,
    responses_request,
    responses_tools,
    structured,
    tokenize,
    tools,
    videos,
)

OTHERS = frozenset(
    (
        # OpenAI's
        *("async", "background_options", "custom", "format", "prompt_cache_breakpoint", "prompt_cache_options"),
        # Anthropic's
        *("anthropic_beta", "anthropic_version", "betas", "billing_policy", "block_binding"),
        *("encrypted_content", "signature", "tool_changes"),
        *("compaction", "fallback_credit_token", "fallbacks", "task_budget", "toolset_name", "user_profile_id"),
        "workspace_id",
        # Ollama's
        *("_debug_render_only", "height", "steps", "width"),
        # vLLM's and SGLang's
        *("custom_logit_processor", "ebnf", "ec_transfer_params", "guided_decoding_backend", "lora_path", "regex"),
        *("guided_decoding_disable_any_whitespace", "guided_whitespace_pattern", "include_reasoning", "normalize"),
        *("no_stop_trim", "repetition_detection", "request_id", "return_hidden_states", "return_prompt_text", "rid"),
        *("separate_reasoning", "session_id", "stream_interval", "stream_reasoning", "vllm_xargs", "watermarking"),
        # llama.cpp's, and front ends' for it
        *("cache_prompt", "chat_format", "dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n"),
        *("dry_sequence_breakers", "dynatemp_exponent", "dynatemp_range", "grammar", "id_slot", "json_schema"),
        *("max_length", "n_keep", "n_predict", "n_probs", "parse_tool_calls", "reasoning_format", "samplers"),
        *("slot_id", "smoothing_curve", "smoothing_factor", "t_max_predict_ms", "timings_per_token", "top_a"),
        *("top_n_sigma", "typical", "xtc_probability", "xtc_threshold"),
        # other providers' and proxies'
        *("api_base", "chat_id", "drop_params", "enable_search", "extra_body", "features", "files", "info"),
        *("litellm_metadata", "models", "prefix", "plugins", "provider", "random_seed", "route", "safe_prompt"),
        *("thinking", "timestamp", "thinking_blocks", "transforms", "usage", "variables", "weight"),
        # tools that a provider runs
        *("advisor", "apply_patch", "code_execution", "code_interpreter", "computer", "computer_use_preview"),
        *("file_search", "image_generation", "local_shell", "mcp", "mcp_toolset", "shell", "tool_search"),
        *("tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search", "web_search_preview"),
        "x-anthropic-billing-header",
        # the variables of chat templates
        *("builtin_tools", "controls", "custom_tools", "date_string", "preserve_thinking", "python_tools", "xml_tools"),
    )
)  # fmt: skip
"""Names of fields that are ignored, and so have no Struct."""

_MODULES = (
    *(
        chat,
        completions,
        embeddings,
        pictures,
        videos,
        responses_items,
        responses_request,
        responses_tools,
        structured,
        tokenize,
    ),
    *(messages, parts, tools, anthropic, anthropic_blocks, anthropic_tools, ollama),
)
_DATE = re.compile(r"_\d{8}$")
"""The date of a version, at the end of a name."""
_STEP = re.compile(r"[\[\].]+")


def _fields(module: ModuleType) -> set[str]:
    """Return the names of all fields of a module's Structs that bodies are decoded to."""
    structs = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Struct)]
    named = {name for struct in structs for name in struct.__struct_encode_fields__}
    tags = {tag for struct in structs if isinstance(tag := struct.__struct_config__.tag, str)}
    return named | tags | {field for struct in structs if (field := struct.__struct_config__.tag_field) is not None}


OTHER = "other"
"""What the metric has for all names that no known API has."""
KNOWN = OTHERS.union(ollama.OPTIONS, responses_items.IGNORED_ITEMS, *map(_fields, _MODULES))


def counted_name(name: str) -> str:
    """Return the name by which the metric counts an ignored field: its path without a date if a known API has each
    name in it, or OTHER."""
    name = _DATE.sub("", name)
    steps = set(filter(None, _STEP.split(name)))
    return name if steps and steps <= KNOWN else OTHER
