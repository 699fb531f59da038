"""One reader of a model's files: which of them says what, and which counts first (docs/model_files.md)."""
