"""Grammars of custom tools as regular expressions, held to texts that they allow."""

from __future__ import annotations

import re

import pytest

from services.frontend.structured.lark_regex import LIMIT_CHARACTERS, NotRegular, lark_regex

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SUM = r"""
// of OpenAI's documents
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)* -> mul
    | factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""


def fits(grammar: str, text: str) -> bool:
    return re.fullmatch(lark_regex(grammar), text) is not None


@pytest.mark.parametrize(
    ("grammar", "text", "allowed"),
    [
        (PATCH, "*** Begin Patch\n*** Add File: a.txt\n+x\n+\n*** End Patch\n", True),
        (PATCH, "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ def f\n-x\n+y\n z\n*** End Patch", True),
        (PATCH, "*** Begin Patch\n*** Delete File: a\n*** Delete File: b\n*** End Patch", True),
        (PATCH, "*** Begin Patch\n*** End Patch", False),
        (PATCH, "*** Begin Patch\n*** Add File: a.txt\nx\n*** End Patch", False),
        (SUM, "1 + 22 * 3", True),
        (SUM, "1 +", False),
        ('start: "a"i ["b"] "c"~2 "d"~1..3', "Accd", True),
        ('start: "a"i ["b"] "c"~2 "d"~1..3', "abccddd", True),
        ('start: "a"i ["b"] "c"~2 "d"~1..3', "abcdddd", False),
        ("start: /[a-c]+/i /x\\/y/ A\nA.2: /q/", "aCbx/yq", True),
        ('start: w "," w\nw: W\n%import common.WORD -> W', "ab,c", True),
        ("start: (INT | WS_INLINE)+\n%import common (INT, WS_INLINE)", "1 2", True),
        ('?start: "a\\n" | "é"', "a\n", True),
    ],
)  # fmt: skip
def test_it_allows_what_the_grammar_does(grammar: str, text: str, allowed: bool) -> None:
    assert fits(grammar, text) is allowed


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"', "contains itself"),
        ('start: a\na: b\nb: a "x"', "contains itself"),
        ("start: nowhere", "no rule 'nowhere'"),
        ('first: "x"', "no rule 'start'"),
        ('start: "x"\n%ignore " "', "%ignore is not supported"),
        ("start: X\n%import common.X", "no terminal common.X"),
        ('start: ("x"', "is missing"),
        ('start: "x")', "wrong place"),
        ('start: %json {"type": "string"}', "not supported"),
    ],
)
def test_what_is_not_regular_is_named(grammar: str, why: str) -> None:
    with pytest.raises(NotRegular, match=re.escape(why)):
        lark_regex(grammar)


def test_rules_that_double_are_bounded() -> None:
    doubling = "\n".join(f"r{at}: r{at + 1} r{at + 1}" for at in range(60))
    with pytest.raises(NotRegular, match=str(LIMIT_CHARACTERS)):
        lark_regex(f'start: r0\n{doubling}\nr60: "x"')


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        ("start: " + "A " * 7000 + "\nA: /" + "a" * 1000 + "/", "more than"),  # 7 MB, and 128 tools may have one
        ("start: " + "(" * 7000 + '"a"' + ")" * 7000, "nested deeper"),
        ("start: a1\n" + "\n".join(f"a{at}: a{at + 1}" for at in range(1, 1000)), "nested deeper"),
        ('start: "\\x"', "unknown escape"),
        ('start: "\\N{no such name}"', "unknown escape"),
    ],
    ids=["repeats", "brackets", "rules", "half an escape", "a name of no character"],
)
def test_hostile_grammars_are_not_regular(hostile: str, why: str) -> None:
    with pytest.raises(NotRegular, match=why):
        lark_regex(hostile)
