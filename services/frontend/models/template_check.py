"""Checks what a frontend reads of a model before a fleet starts: its chat template and its tokenizer.
`python -m services.frontend.models.template_check MODEL [TEMPLATE]`

`up` and `pull` run it. A frontend would find the same only when a worker's card is there, and would wait for a better
one. Both are tried in bounded processes, as a frontend does it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from services.frontend.models.model import read_templates
from services.frontend.models.tokenizer_trial import try_tokenizer
from services.frontend.output.tokenizer_json import parse_tokenizer_json
from shared import model_file
from shared.errors import HeadraceError


def main(words: list[str]) -> int:
    """Check the template that replaces the model's own, else that of the model's directory, and the directory's
    tokenizer. Return the exit status."""
    model, given = Path(words[0]), "".join(words[1:2])
    at = given or str(model)
    try:
        chat, _ = read_templates(model, given)
        if (model / "tokenizer.json").is_file():
            at = str(model / "tokenizer.json")
            content = model_file.read_model_file(Path(at), model_file.TOKENIZER_LIMIT_BYTES)
            try_tokenizer(content, parse_tokenizer_json(content))
    except HeadraceError as wrong:
        print(f"{at}: {wrong}", file=sys.stderr)
        return 2
    if given and chat is None:
        print(f"{given}: the chat template is empty", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
