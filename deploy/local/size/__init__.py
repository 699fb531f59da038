"""`headrace estimate`, `profile` and `plan`: what a model and a load need, before GPUs are bought."""
