"""`headrace completion`: a script by which a shell completes the commands and their flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from msgspec import Struct
from msgspec.structs import fields

from deploy.local.usage import COMMANDS, OPTIONAL, WORD, WORDS, flag_value

_SCRIPT = """\
_headrace() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}" offered=""
    case "${{COMP_WORDS[*]:1:$((COMP_CWORD - 1))}}" in
{commands}
    esac
    COMPREPLY=($(compgen -W "$offered" -- "$word"))
}}
complete -o default -F _headrace headrace
"""
"""For bash. Where no word is offered, the shell completes the names of files. (zsh has a variable `words` itself.)"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
"""Loads zsh's own support for scripts of bash."""


def script(shell: Literal["bash", "zsh"]) -> str:
    """Return the script, made of the commands' Structs."""
    groups: dict[str, list[str]] = {"": []}
    for name in COMMANDS:
        group, _, last = name.rpartition(" ")
        groups.setdefault(group, []).append(last)
    groups[""] += [*filter(None, groups), "--help", "--version"]
    cases = [f'        "{group}") offered="{" ".join(verbs)}" ;;' for group, verbs in groups.items()]
    for name, schema in COMMANDS.items():
        cases += [f'        "{name}" | "{name} "*)', '            case "$before" in', *_flags(schema)]
        cases += ["            esac ;;"]
    return (_ZSH if shell == "zsh" else "") + _SCRIPT.format(commands="\n".join(cases))


def _flags(schema: type[Struct]) -> Iterator[str]:
    """Yield the cases of one command: no word, or a few, after a flag that takes a value; else all flags."""
    offered = ["--help"]
    for field in fields(schema):
        kind, placeholder = flag_value(field.type)
        flag = "--" + field.name.replace("_", "-")
        if placeholder == WORD:
            offered += get_args(kind)
        if placeholder in (WORD, WORDS):
            continue
        offered.append(flag)
        if kind is not bool and placeholder not in OPTIONAL:
            words = " ".join(get_args(kind)) if get_origin(kind) is Literal else ""
            yield f'                {flag}) offered="{words}" ;;'
    yield f'                *) offered="{" ".join(offered)}" ;;'
