"""Coding agents at a terminal: how each is set up in a home of its own, and asked without a terminal.

They are programs of npm (agents/package-lock.json). Each gets its question from stdin. What it would say to its makers
is switched off, and its proxy for all other addresses is the recorder, which refuses and notes them. In agents/ another
small package stands for Qwen Code's clipboard, since a registry may not have it for all machines in the lock file.

SCRIPTED   a chat template for the echo engine: the model's answers stand in the question, one after the other
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from tests.clients import environment

MODEL = "scripted"
KEY = "any"
CONTEXT = 262_144
BEGIN, BETWEEN, END = "<<<", "|||", ">>>"
SCRIPTED = (
    '{# <tool_call>{"name" #}{% set ns = namespace(script="", turn=0) %}{% for message in messages %}'
    f"{{% if message.role == 'user' and '{BEGIN}' in message.content %}}"
    f"{{% set ns.script = message.content.split('{BEGIN}')[-1].split('{END}')[0] %}}{{% set ns.turn = 0 %}}"
    "{% elif message.role == 'assistant' %}{% set ns.turn = ns.turn + 1 %}{% if message.tool_calls %}{% endif %}"
    "{% endif %}{% endfor %}"
    f"{{% set answers = ns.script.split('{BETWEEN}') %}}"
    "{% if tools %}{{ answers[ns.turn] if ns.turn < answers | length else 'The script has ended.' }}"
    "{% else %}A title{% endif %}"
)


def script(*answers: str) -> str:
    """Return the part of a question that says what the model answers, turn by turn."""
    return BEGIN + BETWEEN.join(answers) + END


class Agent(Struct, frozen=True):
    """One agent."""

    name: str
    files: Callable[[str], Mapping[str, str]]
    """The files of its home, by path, for the address of a frontend."""
    variables: Callable[[str, Path], Mapping[str, str]]
    """Its environment, for an address and a home."""
    command: Callable[[Path, Sequence[str], Sequence[str]], list[str]]
    """The command, for node_modules, the command of Node.js and the arguments that continue a session."""
    continues: Sequence[str]
    """The arguments that continue the last session."""
    tool: str
    """The tool that runs a command."""
    arguments: Callable[[str], dict[str, object]]
    """The tool's arguments for a command."""
    ignored: frozenset[str] = frozenset()
    """The fields that it sends and that have no effect. A new one is looked at: is it served, or is it harmless?"""
    more_calls: Sequence[tuple[str, dict[str, object]]] = ()
    """Calls of further tools, which belong into its session."""
    history: str = ""
    """What its history has after these calls."""


def _codex_config(url: str) -> str:
    return f"""model = "{MODEL}"
model_provider = "headrace"
model_context_window = {CONTEXT}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.headrace]
name = "Headrace"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "HEADRACE_KEY"
stream_max_retries = 3
"""


def _opencode_config(url: str) -> str:
    limit = {"context": CONTEXT, "output": 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headrace",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL, "limit": limit}},
    }
    return json.dumps(
        {
            "model": f"headrace/{MODEL}",
            "small_model": f"headrace/{MODEL}",
            "enabled_providers": ["headrace"],
            "provider": {"headrace": provider},
            "autoupdate": False,
            "share": "disabled",
        }
    )


def _continue_config(url: str) -> str:
    return f"""name: Headrace
version: 0.0.1
schema: v1
models:
  - name: {MODEL}
    provider: openai
    model: {MODEL}
    apiBase: {url}/v1
    apiKey: {KEY}
    capabilities: [tool_use]
    roles: [chat]
    defaultCompletionOptions: {{contextLength: {CONTEXT}, maxTokens: 4096}}
"""


AGENTS = [
    Agent(
        "codex",
        lambda url: {".codex/config.toml": _codex_config(url)},
        lambda url, home: {"CODEX_HOME": str(home / ".codex"), "HEADRACE_KEY": KEY},
        lambda place, _node, more: [
            str(place / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"),
            *("exec", "--skip-git-repo-check", *more, "-"),
        ],
        ["resume", "--last"],
        "exec_command",
        lambda command: {"cmd": command},
        frozenset(
            {"client_metadata", "include[].reasoning.encrypted_content", "reasoning.summary", "tools[].web_search"}
        ),
        [("multi_agent_v1__close_agent", {"target": "nobody"})],
        '"namespace": "multi_agent_v1"',
    ),
    Agent(
        "qwen",
        lambda _url: {
            ".qwen/settings.json": json.dumps(
                {
                    "telemetry": {"enabled": False},
                    "privacy": {"usageStatisticsEnabled": False},
                    "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
                    "security": {"auth": {"selectedType": "openai"}},
                }
            )
        },
        lambda url, _home: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL},
        lambda place, node, more: [*node, str(place / "@qwen-code/qwen-code/cli-entry.js"), "--yolo", *more],
        ["--continue"],
        "run_shell_command",
        lambda command: {"command": command, "is_background": False},
    ),
    Agent(
        "opencode",
        lambda url: {".config/opencode/opencode.json": _opencode_config(url)},
        lambda _url, _home: {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        lambda place, _node, more: [str(place / "opencode-linux-x64/bin/opencode"), "run", "--auto", *more],
        ["--continue"],
        "bash",
        lambda command: {"command": command, "description": "Runs it"},
    ),
    Agent(
        "cn",
        lambda url: {".continue/config.yaml": _continue_config(url)},
        lambda _url, home: {
            "CONTINUE_GLOBAL_DIR": str(home / ".continue"),
            "CONTINUE_TELEMETRY_ENABLED": "0",
            "CONTINUE_CLI_AUTO_UPDATED": "true",
            "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        },
        lambda place, node, more: [
            *(*node, str(place / "@continuedev/cli/dist/cn.js")),
            *("--config", "../.continue/config.yaml", "--auto", "--print", *more),
        ],
        ["--resume"],
        "Bash",
        lambda command: {"command": command},
    ),
    Agent(
        "claude",
        lambda _url: {".claude.json": json.dumps({"hasCompletedOnboarding": True})},
        lambda url, home: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "CLAUDE_CONFIG_DIR": str(home / ".claude"),
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        },
        lambda place, _node, more: [
            str(place / "@anthropic-ai/claude-code-linux-x64/claude"),
            *("--print", "--dangerously-skip-permissions", *more),
        ],
        ["--continue"],
        "Bash",
        lambda command: {"command": command, "description": "Runs it"},
        frozenset(
            {
                *("context_management", "metadata", "output_config.effort", "thinking", "thinking.display"),
                *("messages[].content[].cache_control", "system[].cache_control", "tools[].defer_loading"),
                "system.x-anthropic-billing-header",
            }
        ),
    ),
]


def make_home(agent: Agent, home: Path, url: str) -> dict[str, str]:
    """Write an agent's files into its home; return its environment."""
    for path, text in agent.files(url).items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), url)
    local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return environment.variables(**nowhere, **local, **agent.variables(url, home)) | {"HOME": str(home)}
