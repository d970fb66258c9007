"""The kinds of computations in a pipeline's order, as numbers for kernels.

BACKWARD is the whole of it or, where a stage splits it, the part that its input's gradient takes; WEIGHT is the rest.
"""

__all__ = ["BACKWARD", "FORWARD", "WEIGHT"]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
