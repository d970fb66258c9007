"""The results of a search for people: the printed table of the best plans, `candidates.parquet` and `plan.yaml`."""

from collections.abc import Sequence

import polars as pl
import yaml

from dflop.config import Config
from dflop.costs import CostModel, launch_bound_load
from dflop.models.loads import main_load
from dflop.search.baseline import TODAY, Baseline
from dflop.search.best_first import FINALISTS_PERCENT, MORE_GIB, SearchResult, more_than
from dflop.search.candidate import Candidate
from dflop.search.loader_processes import LoadingNeed

__all__ = ["candidates_frame", "describe_choice", "explain_choice", "faster_baselines_note", "uneven_note"]

_NUM_SHOWN = 10
# A baseline counts as faster where its step time is below this share of the chosen plan's.
_WORTH_A_WORD = 0.995


def candidates_frame(result: SearchResult) -> pl.DataFrame:
    """The table `candidates.parquet`, fastest first."""
    rows = []
    for rank, candidate in enumerate(result.candidates, start=1):
        plan = candidate.plan
        rows.append(
            {
                "rank": rank,
                "placement": plan.placement,
                **{f"{grid.module}_{key}": getattr(grid, key) for grid in plan.grids for key in ("tp", "pp", "dp")},
                "num_microbatches": plan.num_microbatches,
                "checkpointing": plan.checkpointing,
                "schedule": plan.schedule,
                "step_s": candidate.step_s,
                "idle": candidate.idle,
                **{f"{grid.module}_memory_bytes": candidate.memory_bytes[grid.module] for grid in plan.grids},
                "bottleneck": candidate.bottleneck,
                "num_chunks": plan.num_chunks,
                "llm_layers": list(plan.grid("llm").layers) or None,
                "num_batches": candidate.num_batches,
                "extrapolated": candidate.extrapolated,
                **{f"{grid.module}_sharding": grid.sharding for grid in plan.grids},
                **{f"{grid.module}_shards": grid.num_shards for grid in plan.grids},
                "llm_cp": plan.grid("llm").cp,
                **{f"{grid.module}_recomputed": list(grid.recomputed) or None for grid in plan.grids},
                "llm_attention_kept": list(plan.grid("llm").attention_kept) or None,
                **{f"{grid.module}_offloaded": list(grid.offloaded) or None for grid in plan.grids},
                "offloads_optimizer": plan.offloads_optimizer,
            }
        )
    lists = [name for name in rows[0] if name.endswith(("_layers", "_recomputed", "_attention_kept", "_offloaded"))]
    return pl.DataFrame(rows, schema_overrides=dict.fromkeys(lists, pl.List(pl.Int64)))


def describe_choice(
    result: SearchResult,
    baselines: Sequence[Baseline],
    config: Config,
    costs: CostModel,
    *,
    num_left_out: int = 0,
    loading: LoadingNeed | None = None,
) -> str:
    """The text of `plan.yaml`: the chosen plan, its predictions, the costs that they come from, and why it won.

    It also has the baselines. `num_left_out` is the number of samples that no plan can hold. `loading` is None where
    loading was not measured.
    """
    best = result.best
    values = {
        "plan": best.plan.to_dict(),
        "predicted": _predicted(best, config),
        "why": _why(result, config),
    }
    if loading:
        values["loading"] = loading.to_dict()
    values["next"] = _next_constraint(result, config, costs)
    if larger := result.larger:
        values["with_more_memory"] = {"plan": larger.plan.to_dict(), "predicted": _predicted(larger, config)}
    values |= {
        "baselines": [baseline.beside(best) for baseline in baselines],
        "num_plans": result.num_plans,
        "num_candidates": len(result.candidates),
        "costs": f"{config.cluster.device_model}, {costs.source}",
    }
    if num_left_out:
        values["num_samples_left_out"] = num_left_out
    return yaml.safe_dump(values, sort_keys=False, width=110)


def explain_choice(result: SearchResult, baselines: Sequence[Baseline], config: Config, costs: CostModel) -> str:
    """The text that `dflop plan --explain` prints."""
    best = result.best
    cluster = config.cluster
    bounded = "the bounds of all others are higher"
    if any(candidate.plan.offloads for candidate in result.candidates):
        bounded = "what waits in host memory was tried in the fastest alone"
    lines = [
        f"{result.num_plans:,} plans for {cluster.num_devices} devices ({cluster.device_model}, {costs.source} costs), "
        f"{len(result.candidates)} priced on {best.num_batches} global batches of {config.train.global_batch_size}; "
        + bounded,
        "",
        "    step      vs    idle   memory      bound by       plan",
    ]
    for rank, candidate in enumerate(result.candidates[:_NUM_SHOWN], start=1):
        lines.append(_line(candidate, best, f"{rank:2}"))
    if best not in result.candidates[:_NUM_SHOWN]:
        lines += ["    …", _line(best, best, f"{result.candidates.index(best) + 1:2}")]
    lines += ["", f"chosen: {best.plan}"]
    if result.num_finalists > 1:
        lines.append(f"  {_of_finalists(result)}")
    lines += ["", "instead, on the same batches:"]
    for baseline in baselines:
        if baseline.priced is None:
            says = "does not fit    " if baseline.name == TODAY else "nothing fits    "
            lines.append(f"    {says} {baseline.name}")
            if baseline.name == TODAY:
                lines.append(f"{'':42}{baseline.why_not}")
        else:
            lines.append(
                f"    {baseline.step_s:.3f} s {baseline.step_s / best.step_s:5.2f}x {baseline.priced.idle:6.1%}  "
                f"{baseline.memory_bytes / 2**30:6.3g} GiB  {baseline.name}\n{'':42}{baseline.plan}"
            )
    lines += ["", f"next: {_next_constraint(result, config, costs)}"]
    if note := uneven_note(result, config):
        lines.append(note)
    if (cp := best.plan.grid("llm").cp) > 1:
        lines.append(
            f"long samples are computed by up to {cp} neighbouring replicas of the LLM (context parallelism): by how "
            "many is chosen for each sample and batch"
        )
    return "\n".join(lines)


def _line(candidate: Candidate, best: Candidate, rank: str) -> str:
    return (
        f"{rank}  {candidate.step_s:.3f} s {candidate.step_s / best.step_s:5.2f}x {candidate.idle:6.1%}  "
        f"{max(candidate.memory_bytes.values()) / 2**30:6.3g} GiB  {candidate.bottleneck:14} {candidate.plan}"
    )


def _predicted(candidate: Candidate, config: Config) -> dict[str, object]:
    return {
        "step_s": float(f"{candidate.step_s:.6g}"),
        "idle": round(candidate.idle, 4),
        "samples_per_s": round(config.train.global_batch_size / candidate.step_s, 3),
        "memory_bytes": {module: round(size) for module, size in candidate.memory_bytes.items()},
        "bottleneck": candidate.bottleneck,
        "num_batches": candidate.num_batches,
        # The share of the microbatches with loads outside the measured range.
        "extrapolated": round(candidate.extrapolated, 4),
    }


def _why(result: SearchResult, config: Config) -> str:
    best = result.best
    busiest = ", ".join(f"{module} {seconds:.3g} s" for module, seconds in best.busy_s.items())
    others = [candidate for candidate in result.candidates if candidate is not best]
    is_shortest = not others or best.step_s <= others[0].step_s
    opening = "Shortest" if is_shortest else f"Within {FINALISTS_PERCENT} % of the shortest"
    why = (
        f"{opening} expected step of {result.num_plans} plans; bound by {_bound_by(best, config)} "
        f"(busiest rank: {busiest})."
    )
    if result.num_finalists > 1:
        why += f" {_of_finalists(result)}."
    if others and is_shortest:
        why += f" The next, {others[0].plan}, takes {others[0].step_s / best.step_s:.2f}x as long."
    elif others:
        ratio = others[0].step_s / best.step_s
        why += f" By price alone {others[0].plan} would be chosen, which takes {ratio:.3f}x as long."
    return why


def _of_finalists(result: SearchResult) -> str:
    return (
        f"Of {result.num_finalists} plans within {FINALISTS_PERCENT} % that train the LLM in different ways, it is the "
        "fastest once batches are scheduled"
    )


def _bound_by(candidate: Candidate, config: Config) -> str:
    """The bottleneck in words. A plan that is bound by memory may use little of it, since it recomputes layers."""
    if candidate.bottleneck != "memory":
        return candidate.bottleneck
    which = "some layers" if any(grid.recomputed for grid in candidate.plan.grids) else "all layers"
    ways = [f"recomputes {which}"] if candidate.plan.checkpointing else []
    away = ["some layers"] if any(grid.offloaded for grid in candidate.plan.grids) else []
    away += ["the optimiser's state"] if candidate.plan.offloads_optimizer else []
    ways += [f"offloads {' and '.join(away)}"] if away else []
    return f"memory (it {' and '.join(ways)}: kept, they would not fit into {config.cluster.memory_gib:.4g} GiB)"


def _next_constraint(result: SearchResult, config: Config, costs: CostModel) -> str:
    best = result.best
    if launches := _bound_by_launches(best, costs):
        return launches
    if larger := result.larger:
        needed_gib = max(larger.memory_bytes.values()) / 2**30
        more = f"{more_than(config.cluster.memory_gib, needed_gib)} memory per device ({needed_gib:.3g} GiB)"
        said = f"with {more}, {larger.plan} would take {larger.step_s / best.step_s:.2f}x as long"
        if result.with_more and config.cluster.memory_gib >= MORE_GIB:
            said += f"; with {MORE_GIB} GiB more, the fastest plan here would take {result.with_more:.2f}x as long"
        return said
    ways = {
        "bubble": "the pipeline's fill and drain; a larger `train.global_batch_size` gives it more microbatches",
        "bridge": "features on their way to the LLM; a faster `cluster.inter_node_gbps` or encoders nearby",
        "gradient sync": "gradients on their way; a faster network, or a larger `train.global_batch_size`",
        "memory": "memory: with fewer layers recomputed this plan would not fit, nor anything as fast",
    }
    if best.plan.offloads:
        ways["memory"] = "memory: with less offloaded or recomputed this plan would not fit"
    return f"bound by {ways.get(best.bottleneck, best.bottleneck + '; only faster or more devices shorten it')}"


def _bound_by_launches(best: Candidate, costs: CostModel) -> str:
    """The constraint where the module that bounds the plan has microbatches so small that larger ones take as long;
    else empty."""
    module = best.bottleneck.removesuffix(" compute")
    if module not in best.mean_load:
        return ""
    least = launch_bound_load(costs, module, best.plan.grid(module).layout)
    if least is None or best.mean_load[module] >= least:
        return ""
    unit = main_load(module).removeprefix("num_")
    return (
        f"bound by launches: below {least:,.0f} {unit} a microbatch of {module} takes the same time, and this plan's "
        f"have {best.mean_load[module]:,.0f}; a larger `train.global_batch_size` fills them"
    )


def faster_baselines_note(result: SearchResult, baselines: Sequence[Baseline]) -> str:
    """A note on the baselines that are predicted to be faster than any plan found; empty where none is.

    Baselines have prices alone. The chosen plan may have a longer one: it is the fastest once batches are scheduled.
    """
    ratios = {baseline.name: baseline.step_s / result.candidates[0].step_s for baseline in baselines}
    faster = [f"{name} {ratio:.2f}x as long" for name, ratio in ratios.items() if ratio < _WORTH_A_WORD]
    return f"note: predicted to be faster than all plans found, by price: {'; '.join(faster)}" if faster else ""


def uneven_note(result: SearchResult, config: Config) -> str:
    """A note where replicas get unequal numbers of samples, which takes as long as a larger batch; else empty."""
    size, dp = config.train.global_batch_size, result.best.plan.grid("llm").dp
    if size % dp == 0 or size / dp > 8:
        return ""
    least, more = divmod(size, dp)
    return (
        f"note: {size} samples do not divide by {dp} LLM replicas: {more} of them get {least + 1}, the others {least}; "
        f"`train.global_batch_size: {dp * (least + 1)}` would cost hardly more"
    )
