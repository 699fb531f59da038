"""A server that runs already as the engine: vLLM or SGLang over HTTP, with token ids in and out, or one with text."""
