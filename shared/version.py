"""The version of this program. pyproject.toml reads it here, so that a checkout can run without an installation."""

from __future__ import annotations

VERSION = "0.2.0"
