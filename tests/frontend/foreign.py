"""What tests of other providers' APIs ask."""

from __future__ import annotations

from typing import Any

from services.frontend.protocol.foreign import ThinkingSupport

PLAIN = ThinkingSupport(thinks=False, reads=())
HELLO: Any = [{"role": "user", "content": "hello"}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": CITY}
"""A tool in Anthropic's form."""
