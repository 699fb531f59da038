"""The diffusers engine, a program with an environment of its own: pictures and videos, a denoising step at a time."""
