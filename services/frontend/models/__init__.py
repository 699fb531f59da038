"""The models that can be asked: tokenizer, chat template, and the token ids of prompts."""
