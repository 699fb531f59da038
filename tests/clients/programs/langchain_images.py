"""LangChain's ChatOpenAI shows a PNG file to the model `eyes` at the URL given, in both of its forms of images."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

URL, FILE = sys.argv[1], Path(sys.argv[2])


def main() -> None:
    eyes = ChatOpenAI(model="eyes", base_url=URL, api_key="any", temperature=0, max_retries=0, max_tokens=4)
    data, text = base64.b64encode(FILE.read_bytes()).decode(), {"type": "text", "text": "What is this?"}
    blind = eyes.invoke([HumanMessage([text])])
    image = {"type": "image", "base64": data, "mime_type": "image/png"}
    as_openai = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    shown = [eyes.invoke([HumanMessage([text, one])]) for one in (image, as_openai)]
    assert shown[0].content == shown[1].content, shown
    counts = [one.usage_metadata["input_tokens"] for one in (blind, *shown)]
    assert counts[0] < counts[1] == counts[2], counts
    streamed = "".join(chunk.content for chunk in eyes.stream([HumanMessage([text, image])]))
    assert streamed == shown[0].content, (streamed, shown)


main()
