"""The version of this program; pyproject.toml reads it here, as a checkout need not be installed to run."""

from __future__ import annotations

VERSION = "0.1.0"
