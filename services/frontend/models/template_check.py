"""Checks chat templates before a fleet starts: `python -m services.frontend.models.template_check MODEL [TEMPLATE]`.

`up` runs it. A frontend would find the same only when a worker's card is there, and would wait for a better one. The
template is tried in a bounded process, as a frontend does it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from services.frontend.models.model import read_templates
from shared.errors import HeadraceError


def main(words: list[str]) -> int:
    """Check the template that replaces the model's own, else that of the model's directory. Return the exit status."""
    model, given = Path(words[0]), "".join(words[1:2])
    try:
        chat, _ = read_templates(model, given)
    except HeadraceError as wrong:
        print(f"{given or model}: {wrong}", file=sys.stderr)
        return 2
    if given and chat is None:
        print(f"{given}: the chat template is empty", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
