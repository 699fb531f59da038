"""A Llama and Qwen2 decoder over an array module (NumPy here)."""
