"""The checks of the kit. The timed ones run in this order, behind the others."""

from dflop.base.devices import COMMUNICATOR_BYTES
from tests.gpu.check import Check, at_least, at_most, between

__all__ = ["CHECKS"]

_OF_COMMANDS = ("av", "braceexpand", "duckdb", "omegaconf", "soundfile")

CHECKS = (
    Check(
        name="gradients",
        shows="in bf16, stages of all families have the loss and the gradients of fp64, with each attention kernel",
        run="gradients:of_all_families",
        seconds=40,
        is_timed=False,
        limits={"gradients": at_most(2e-2), "loss": at_most(5e-3)},
        fast_s=40,
    ),
    Check(
        name="attention",
        shows="attention over 1 to 4,000 segments is that of fp32, and as fast as torch's on one segment; a share of a "
        "sample takes its part of the whole sample's",
        run="attention:alone",
        seconds=40,
        limits={
            "output": at_most(1e-2),
            "gradients": at_most(2e-2),
            "seconds beside SDPA's": at_most(1.3, of_card=True),
            "seconds of a share over its part": at_most(1.1, of_card=True),
        },
        fast_s=30,
    ),
    Check(
        name="trainer",
        shows="a run that is killed and resumed is the run that was not; it is evaluated and exported",
        run="trainer:killed_and_resumed",
        needs=_OF_COMMANDS,
        seconds=290,
        is_timed=False,
        limits={
            "losses of a resumed run, beyond": at_most(0),
            "steps that are missing": at_most(0),
            "restarts": between(1, 1),
            "seconds until a killed run": at_most(60, of_card=True),
            "last loss over the first": at_most(0.95),
            "evaluation loss": at_most(20),
            "weights that from_pretrained": at_most(0),
            "functions of layers that run eager": at_most(0, of_card=True),
            "losses of a compiled run": at_most(0.02, of_card=True),
        },
        fast_s=100,
    ),
    Check(
        name="streams",
        shows="streams run beside each other, and neither one that waits nor the first use of a kernel holds up others",
        run="streams:side_by_side",
        seconds=60,
        limits={
            "asleep at the same time of 16, training's": at_least(10, of_card=True),
            "held up by a stream that waits, of 16, training's": at_most(0, of_card=True),
            "seconds until the first of a kernel of torch, training's": at_most(0.1, of_card=True),
        },
        fast_s=30,
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
        fast_s=90,
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
        name="levels",
        shows="layers keep the bytes that plans predict, recomputed or not; computing hides copies of offloaded ones",
        run="levels:of_layers",
        seconds=150,
        limits={
            "predicted over measured bytes": between(0.95, 1.05, of_card=True),
            "seconds over those of kept layers": at_most(1.05, of_card=True),
            "bytes that left over those of layers": between(0.95, 1.05, of_card=True),
        },
    ),
    Check(
        name="costs",
        shows="profile-costs of the 7B preset predicts microbatches that no fit has seen, in seconds and bytes",
        run="costs:of_7b",
        needs=_OF_COMMANDS,
        seconds=480,
        limits={
            "median error of seconds": at_most(0.03, of_card=True),
            "p95 error of seconds": at_most(0.08, of_card=True),
            "largest error of bytes": at_most(0.05, of_card=True),
            "reserved over allocated bytes": at_most(1.10, of_card=True),
        },
    ),
    Check(
        name="step",
        shows="steps of a model of 0.9 B parameters take the seconds and bytes that their plan predicts",
        run="step:as_predicted",
        needs=_OF_COMMANDS,
        seconds=240,
        limits={
            "measured over predicted seconds": between(0.9, 1.1, of_card=True),
            "measured over predicted bytes": between(0.85, 1.05, of_card=True),
            "functions that run eager": at_most(0, of_card=True),
        },
    ),
    Check(
        name="groups",
        shows="a process group takes less memory than plans assume, and little time",
        run="groups:bytes_and_seconds",
        seconds=15,
        limits={
            "bytes a group": at_most(COMMUNICATOR_BYTES, of_card=True),
            "seconds a group": at_most(1, of_card=True),
        },
    ),
    Check(
        name="optimiser",
        shows="updating weights runs at the speed of the card's memory",
        run="optimiser:updated",
        seconds=15,
        limits={"update, share of a copy's bandwidth": at_least(0.7, of_card=True)},
    ),
    Check(
        name="offloaded",
        shows="an offloaded optimiser updates as one on the device, and its state comes and goes as fast as plans say",
        run="optimiser:offloaded",
        seconds=30,
        limits={
            "largest difference from an update on the device": at_most(0),
            "both ways of the state, over one copy's bytes a second": at_least(1.0, of_card=True),
        },
    ),
    Check(
        name="saver",
        shows="a checkpoint is copied fast, pins no more than its size, and is written without slowing steps",
        run="optimiser:saved_beside_steps",
        seconds=60,
        limits={
            "bytes copied a second": at_least(20e9, of_card=True),
            "pinned bytes over the state's": at_most(1.1),
            "a step beside writing": at_most(1.03, of_card=True),
            "checkpoints that were not written": at_most(0),
        },
    ),
    Check(
        name="loaders",
        shows="a few processes a rank load pictures and clips as fast as an H100 trains the 7B preset on them",
        run="loaders:beside_training",
        seconds=25,
        limits={"processes a rank": at_most(8, of_card=True)},
    ),
    Check(
        name="two_ranks",
        shows="two ranks of one card have the gradients of the whole model: disjoint, pipelined, colocated, tp, FSDP2",
        run="two_ranks:in_layouts",
        seconds=290,
        is_timed=False,
        limits={"differs": at_most(0)},
    ),
    Check(
        name="faults",
        shows="without a compiler or memory, and with a hundred lengths, work goes on and says so",
        run="faults:survived",
        seconds=45,
        is_timed=False,
        limits={
            "is compiled without a compiler": at_most(0),
            "graphs for": at_most(12, of_card=True),
            "functions that run eager": at_most(0, of_card=True),
            "seconds of the one behind it": at_most(60, of_card=True),
        },
    ),
)
