"""The passes of a microbatch, in a pipeline's order: numbers for kernels."""

__all__ = ["BACKWARD", "FORWARD"]

FORWARD, BACKWARD = 0, 1
