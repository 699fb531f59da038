"""Headrace serves language models from many workers: `python -m headrace --help`.

This is `headrace/__init__.py` of the wheel.
"""

from __future__ import annotations

from pathlib import Path

TREE = Path(__file__).resolve().with_name("tree")
"""The directory of Headrace's own packages, which only its own programs have on their path. A `vllm serve` that uses
the KV connector needs it in PYTHONPATH."""
