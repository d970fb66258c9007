"""The checks of the kit, in the order in which they run."""

from tests.gpu.check import Check, at_least, at_most

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
    Check(
        name="attention",
        shows="attention over 1 to 4,000 segments is that of fp32, and as fast as torch's on one segment",
        run="attention:alone",
        seconds=60,
        limits={
            "output": at_most(1e-2),
            "gradients": at_most(2e-2),
            "seconds beside SDPA's": at_most(1.3, of_card=True),
        },
        is_fast=True,
    ),
    Check(
        name="streams",
        shows="streams run beside each other, and neither a stream that waits nor a kernel's first use holds up others",
        run="streams:side_by_side",
        seconds=30,
        limits={
            "asleep at the same time of 16, training's": at_least(10, of_card=True),
            "held up by a stream that waits, of 16, training's": at_most(0, of_card=True),
            "seconds that a first use waits, training's": at_most(0.1, of_card=True),
        },
        is_fast=True,
    ),
    Check(
        name="utilisation",
        shows="compiled layers of real sizes reach the share of the card's peak that plans count on",
        run="utilisation:of_layers",
        seconds=240,
        limits={
            "Qwen2-7B, compiled": at_least(0.45, of_card=True),
            "Qwen2-7B, eager": at_least(0.38, of_card=True),
            "Qwen2-7B: 64 segments beside one": at_least(0.85, of_card=True),
            "SigLIP, compiled, 32": at_least(0.35, of_card=True),
            "SigLIP, compiled, 128": at_least(0.35, of_card=True),
            "InternViT-6B": at_least(0.25, of_card=True),
            "Qwen2.5-VL vision": at_least(0.25, of_card=True),
        },
        is_fast=True,
    ),
    Check(
        name="idle",
        shows="the host keeps the card busy: it waits once a microbatch at most, and launches kernels in time",
        run="utilisation:idle_and_waits",
        seconds=90,
        limits={
            "idle at 8192 tokens": at_most(0.05, of_card=True),
            "waits of the host a microbatch": at_most(1, of_card=True),
        },
    ),
    Check(
        name="costs",
        shows="profile-costs of the 7B preset predicts microbatches that no fit has seen, in seconds and bytes",
        run="costs:of_7b",
        seconds=480,
        limits={
            "median error of seconds": at_most(0.03, of_card=True),
            "p95 error of seconds": at_most(0.08, of_card=True),
            "largest error of bytes": at_most(0.05, of_card=True),
            "reserved over allocated bytes": at_most(1.10, of_card=True),
        },
    ),
)
