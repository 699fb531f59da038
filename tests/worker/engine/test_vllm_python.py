"""vLLM's Python: whatever is wrong with the setting is said in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.worker.engine.vllm_python import check_vllm_python
from shared.errors import ModelError
from tests.worker.vllm.environment import PYTHON, needs_vllm


def refusal(setting: object) -> str:
    with pytest.raises(ModelError) as wrong:
        check_vllm_python(str(setting))
    text = str(wrong.value)
    assert text.startswith(f"worker.vllm_python is {setting}, ")
    assert "\n" not in text
    return text


def test_a_missing_one_names_the_remedy(tmp_path: Path) -> None:
    assert "which is not there: ./headrace install-vllm" in refusal(tmp_path / "python")
    assert "which is not there" in refusal(tmp_path)


def test_a_python_without_vllm_is_refused() -> None:
    assert ", which lacks vllm: " in refusal(sys.executable)


@pytest.mark.parametrize(
    "text", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho Python\n", "no program", "#!/bin/sh\necho [3]\n"]
)
def test_what_is_no_python_is_refused(tmp_path: Path, text: str) -> None:
    program = tmp_path / "python"
    program.write_text(text)
    program.chmod(0o755)
    assert "does not run as a Python" in refusal(program)


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho '[[3, 9], []]'\n")
    program.chmod(0o755)
    assert "which is Python 3.9; at least 3.11 works" in refusal(program)


@needs_vllm
def test_the_installed_one_is_taken() -> None:
    assert check_vllm_python(str(PYTHON)) == str(PYTHON)
