"""A KV connector of vLLM that makes it a client of the machine's kvbm. Also for a `vllm serve` of its own."""
