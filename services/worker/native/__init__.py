"""A decoder of Llama and the models that resemble it, over an array module (NumPy here)."""
