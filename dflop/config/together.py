"""Checks of values that must agree with each other, in a config whose single values are right."""

from dflop.base import UserError
from dflop.config.schema import Config, FixedPlan
from dflop.plan import PLACEMENTS

__all__ = ["check_together"]


def check_together(config: Config, *, has_cluster: bool = True) -> None:
    """Refuse a config that no run can be made with. With `has_cluster`, check that there are enough devices, too.

    Raises:
        UserError: naming the keys, their values and what would be right.
    """
    if config.costs.source == "analytic" and config.train.precision != "bf16":
        raise UserError(
            f"`costs.source` is 'analytic', which knows bf16 alone, and `train.precision` is "
            f"{config.train.precision!r}; set `train.precision: bf16`"
        )
    if config.costs.source == "measured" and config.costs.implementation not in ("auto", "eager"):
        raise UserError(
            f"`costs.implementation` is {config.costs.implementation!r}, and measured costs are those of the layers "
            "that train; leave it out, or set `costs.source: analytic`"
        )
    if config.schedule.deterministic and config.schedule.correction == "on":
        raise UserError(
            "`schedule.correction` is 'on' and `schedule.deterministic` true: corrections follow measured times, which "
            "no two runs share; set one of them to off (false)"
        )
    if config.train.steps is not None and config.train.epochs is not None:
        raise UserError(
            f"`train.steps` is {config.train.steps} and `train.epochs` is {config.train.epochs:g}; the one follows "
            "from the other: give one of them, and null for the other"
        )
    _check_mixture(config)
    if config.train.evaluate_every is not None and not config.data.has_evaluation:
        raise UserError(
            f"`train.evaluate_every` is {config.train.evaluate_every}, but there is nothing to evaluate on; hold a "
            "share of the samples out with `data.evaluation_share`, or give a source `evaluation: true`"
        )
    for name, pins in _pins(config).items():
        _check_cp(name, pins)
    if has_cluster:
        _check_devices(config)


def _check_mixture(config: Config) -> None:
    trained = [source for source in config.data.sources if not source.evaluation]
    weighted = [source for source in trained if source.weight is not None]
    if mixed := next((source for source in weighted if source.epochs is not None), None):
        raise UserError(
            f"`data.sources` has `weight: {mixed.weight:g}` and `epochs: {mixed.epochs:g}` for {mixed.path}; give one "
            "of them: a share of what is drawn, or how often an epoch draws each sample"
        )
    if weighted and len(weighted) < len(trained):
        other = next(source for source in trained if source.weight is None)
        raise UserError(
            f"`data.sources` has a `weight` for {weighted[0].path} and none for {other.path}; a weight is a share of "
            "all that is drawn: give every source one, or none"
        )


def _check_devices(config: Config) -> None:
    fixed, cluster = config.plan.fixed, config.cluster
    placements = config.plan.placements if fixed is None or fixed.placement is None else [fixed.placement]
    if cluster.num_devices < 2 and not any(PLACEMENTS[name].shares_ranks for name in placements):
        raise UserError(
            f"`cluster` has {cluster.num_devices} device, but in {' and '.join(placements)} plans the encoder and the "
            "LLM have devices of their own; set `cluster.devices_per_node` to at least 2 (on CPUs: processes), "
            "or use `plan.placements: [colocated]`"
        )
    if fixed:
        _check_number(config, fixed, placements)
    for name, pins in _pins(config).items():
        if pins.num_microbatches and pins.num_microbatches > config.train.global_batch_size:
            raise UserError(
                f"`{name}.num_microbatches` is {pins.num_microbatches}, more than the "
                f"{config.train.global_batch_size} samples of `train.global_batch_size`; every microbatch needs at "
                "least one sample"
            )


def _pins(config: Config) -> dict[str, FixedPlan]:
    both = {"plan.fixed": config.plan.fixed, "plan.today": config.plan.today}
    return {name: pins for name, pins in both.items() if pins is not None}


def _check_cp(name: str, pins: FixedPlan) -> None:
    for module, grid in pins.modules.items():
        if grid.cp and module != "llm":
            raise UserError(
                f"`{name}.{module}.cp` is {grid.cp}, but only the LLM has it: encoders compute the frames of a long "
                f"sample wherever its shares are; leave it out, or set `{name}.llm.cp`"
            )
        if grid.cp and grid.cp > 1 and name == "plan.today":
            raise UserError(
                f"`{name}.{module}.cp` is {grid.cp}, but today's layout is priced without context parallelism, since "
                "other frameworks divide every sample; leave it out"
            )


def _check_number(config: Config, fixed: FixedPlan, placements: list[str]) -> None:
    cluster = config.cluster
    least_ranks = {"llm": 1} | {module: grid.least_ranks for module, grid in fixed.modules.items()}
    is_apart = not any(PLACEMENTS[name].shares_ranks for name in placements)
    # An encoder without a pinned grid needs a device, too.
    needed = max(2, sum(least_ranks.values()), least_ranks["llm"] + 1) if is_apart else least_ranks["llm"]
    if needed > cluster.num_devices:
        remark = " (each module its own)" if is_apart else ""
        raise UserError(
            f"`plan.fixed` needs {needed} devices{remark}, but `cluster` has {cluster.num_devices} "
            f"({cluster.num_nodes} x {cluster.devices_per_node}); "
            "ask for fewer ranks or raise `cluster.devices_per_node`"
        )
