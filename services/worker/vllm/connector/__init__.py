"""The KV connector that a vLLM engine loads: it copies blocks between vLLM's tensors and the pool of kvbm."""
