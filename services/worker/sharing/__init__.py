"""Blocks shared between the engines of a machine: one engine's device memory, mapped and read by another engine. May
import transfer."""
