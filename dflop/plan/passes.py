"""The kinds of computations in a pipeline's order, as numbers for kernels.

BACKWARD is the whole backward or, if the schedule splits it, the part that computes the gradient of the stage's input.
WEIGHT is the other part, which computes the gradients of weights.
"""

__all__ = ["BACKWARD", "FORWARD", "WEIGHT"]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
