"""The checks of the kit, in the order in which they run."""

from tests.gpu.check import Check, at_most

__all__ = ["CHECKS"]

CHECKS = (
    Check(
        name="gradients",
        shows="in bf16, stages of all families have the loss and the gradients of fp64, with each attention kernel",
        run="gradients:of_all_families",
        seconds=60,
        limits={"gradients": at_most(2e-2), "loss": at_most(5e-3)},
        is_fast=True,
    ),
)
