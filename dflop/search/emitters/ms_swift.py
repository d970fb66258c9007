"""ms-swift's flags: those of its `megatron sft`, which trains with tensor and pipeline parallelism."""

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import Emitted, Framework, encoders_beside, recomputed_by_module
from dflop.search.megatron_layout import megatron_layout

__all__ = ["FRAMEWORK"]


def _flags(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    recomputed, layers = recomputed_by_module(plan, spec)
    encoders = [grid.module for grid in plan.grids[:-1]]
    recomputes_encoders = any(recomputed[module] for module in encoders)
    layout = megatron_layout(plan, spec, {module: (layers[module] * recomputes_encoders,) for module in encoders})
    # Where nothing is said, it recomputes each layer's attention.
    values = {"recompute_granularity": "none", **layout.flags}
    values |= {
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * plan.num_buckets,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    beyond = layout.beyond
    if encoders:
        values["vit_gradient_checkpointing"] = recomputes_encoders
        beyond.append(
            "encoders and projectors are frozen unless `--freeze_vit false` and `--freeze_aligner false` are given; "
            "the predicted step is that of `model.freeze` in the config"
        )
    if llm.gathers:
        values |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
        beyond.append("`--use_megatron_fsdp` demands that `CUDA_DEVICE_MAX_CONNECTIONS` is more than 1")
    beyond += encoders_beside(plan, spec, "`megatron sft` knows one grid, that of the LLM")
    flags = {
        f"--{name}": str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()
    }
    return Emitted(plan=layout.plan, flags=flags, beyond=beyond)


FRAMEWORK = Framework("ms-swift 4.6 (`megatron sft`)", _flags, "--context_parallel_size")
