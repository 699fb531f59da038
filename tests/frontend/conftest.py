"""The model directory that all tests of the frontend share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.frontend.cards import Templated
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """One to be changed."""
    return Path(shutil.copytree(directory, tmp_path / "model"))


@pytest.fixture
def templated(directory: Path, tmp_path: Path) -> Templated:
    """The model's directory with another template."""

    def write(template: str) -> Path:
        shutil.copytree(directory, tmp_path / "templated")
        (tmp_path / "templated" / "chat_template.jinja").write_text(template)
        return tmp_path / "templated"

    return write
