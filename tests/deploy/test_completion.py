"""deploy/local/completion.py, in real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.completion import script
from deploy.local.usage import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
ASK = """
set -u
source {file}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_headrace
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p headrace >&2
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = [sys.executable, "-P", "-m", "deploy.local.cli", "completion", "bash"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert text == script("bash")
    file = tmp_path_factory.mktemp("completion") / "headrace.bash"
    file.write_text(text)
    return file


def offered(file: Path, *words: str) -> list[str]:
    ask = ASK.format(file=file, words=" ".join(["./headrace", *(f"'{word}'" for word in words)]))
    told = subprocess.run(["bash", "--norc", "-c", ask], check=True, capture_output=True, text=True)
    assert told.stderr == "complete -o default -F _headrace headrace\n"
    return told.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["st"], ["status"]),
        (["key", ""], ["new", "list", "revoke"]),
        (["key", "re"], ["revoke"]),
        (["key", "new", "alice", "--o"], ["--out"]),
        (["up", "--engine", ""], ["native", "vllm", "attached", "simulated", "echo", "diffusers"]),
        (["up", "--engine", "e"], ["echo"]),
        (["up", "--port", "8001", "--tls-"], ["--tls-cert", "--tls-key"]),
        (["up", "--keys", "k"], []),
        (["status", "--watch", "--j"], ["--json"]),
        (["check", "--serve", "--j"], ["--json"]),
        (["check", "--peer", ""], []),
        (["completion", "z"], ["zsh"]),
        (["no-such-command", ""], []),
    ],
)
def test_a_shell_offers_what_fits(file: Path, words: list[str], expected: list[str]) -> None:
    assert offered(file, *words) == expected


def test_all_commands_are_offered_at_first(file: Path) -> None:
    assert set(offered(file, "")) == {name.split()[0] for name in COMMANDS} | {"--help", "--version"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_loads_its_script(tmp_path: Path) -> None:
    file = tmp_path / "headrace.zsh"
    file.write_text(script("zsh"))
    ask = f"source {file}; print -r -- ${{_comps[headrace]}}; which _headrace"
    told = subprocess.run(["zsh", "-f", "-c", ask], check=True, capture_output=True, text=True)
    assert "_bash_complete" in told.stdout
    assert told.stderr == ""
