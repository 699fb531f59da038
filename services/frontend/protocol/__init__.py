"""OpenAI's wire format and vLLM's additions, as types: request bodies, response bodies, chunks and errors."""
