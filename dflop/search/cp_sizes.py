"""Over how many replicas long samples are computed: the search of plans, one size after the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

from dflop.balance import LPT, Policy
from dflop.base import UserError
from dflop.config import Config, PlanConfig
from dflop.costs import CostModel, StageKind
from dflop.models import ModelSpec
from dflop.plan.layout_key import LayoutKey
from dflop.schedule import loads_of
from dflop.search.best_first import SearchResult, search_with
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.host_memory import may_offload, search_offloading
from dflop.search.space import allowed_cp_sizes, enumerate_space
from dflop.shapes import SampleShapes

__all__ = ["check_fixed", "search_plans"]

# A sample is long that takes this part of what a device computes of a batch, or of a device's memory where no layer is
# recomputed. Among shorter ones (of up to 0.3), sharing brought nothing: each device has several of them.
_LONG = 0.5


def search_plans(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    policy: Policy = LPT,
    within: PlanConfig | None = None,
    splits_evenly: bool = False,
    compares: bool = False,
) -> SearchResult:
    """Search the config's space; `progress` is called with the number of decided plans and of all plans.

    `policy` groups the batches (`PlanPricer`); `within` are limits in place of those of `config.plan`;
    `splits_evenly` leaves out uneven splits of layers; `compares` finds the ten fastest plans for certain.

    A plan recomputes just enough layers to fit (`recompute`), or all or none where `plan.fixed.checkpointing` pins it.

    Plans whose LLM replicas share long samples (`plan.cp_sizes`) are searched first, those of more replicas before
    others. Smaller sizes are searched for plans as fast as these: in layouts where fewer replicas then meet, and whole
    samples in all. Shares are priced as if they were samples, which may lie on any replicas.

    With `cluster.host_memory_gib`, plans may offload layers and the optimiser's state (`host_memory`).

    Raises:
        UserError: when the space is empty or nothing fits, naming the limit and the nearest plan.
    """
    how = {"policy": policy, "within": within, "splits_evenly": splits_evenly, "compares": compares}
    search = _BySize(config, spec, costs, samples, progress, how)
    sizes = [1] if within or policy is not LPT else cp_sizes(config, search.divided(1))
    # Where no sample is long the smallest size alone, and others only if nothing fits: replicas hold more together.
    num_first = len(sizes) if _has_long_sample(config, spec, costs, search.divided(1)) else 1
    found, trouble, above = None, None, None
    for number, cp in enumerate((*reversed(sizes[:num_first]), *sizes[num_first:])):
        if found and number >= num_first:
            break
        try:
            own = search.of(cp, above, found)
        except UserError as error:
            trouble = error
            continue
        if number < num_first and cp > 1:
            above = cp
        if own is not None:
            found = own if found is None else found.merged(own)
    if may_offload(config) and within is None and policy is LPT:
        for cp in [found.best.plan.grid("llm").cp] if found else reversed(sizes):
            how = partial(search.of, cp, None, found)
            if better := search_offloading(config, spec, costs, search.divided(cp), found, how):
                return better
    if found is None:
        raise trouble or _no_groups(config, sizes)
    return found


def check_fixed(config: Config, spec: ModelSpec, layouts: Mapping[str, Sequence[LayoutKey]]) -> None:
    """Check that some plan agrees with `plan.fixed`, as far as that can be said without costs: whether one fits is not
    checked. `layouts` are those of a layer that there are costs for, by module.

    Raises:
        UserError: when the space is empty, naming the pins to blame.
    """
    enumerate_space(config, spec, layouts, {})
    sizes = allowed_cp_sizes(config)
    if all(enumerate_space(config, spec, layouts, {}, cp=size).is_empty() for size in sizes):
        raise _no_groups(config, sizes)


def _no_groups(config: Config, sizes: Sequence[int]) -> UserError:
    return UserError(
        f"no plan for {config.cluster.num_devices} devices has groups of {' or '.join(map(str, sizes))} LLM "
        "replicas that share samples (`plan.fixed.llm.cp`, `plan.cp_sizes`): the number must divide the LLM's dp; "
        "leave it out, or use a smaller one"
    )


class _BySize:
    """Searches of plans with one `cp` each. They tell of their progress together."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        costs: CostModel,
        samples: SampleShapes,
        progress: Callable[[int, int], None],
        how: Mapping[str, object],
    ) -> None:
        self._about, self._costs, self._how = (config, spec), costs, how
        self._progress, self._num_before, self._num_plans = progress, 0, 0
        self.divided = cache(partial(GroupedBatches, config, spec, costs, samples))

    def of(
        self,
        cp: int,
        above: int | None,
        beside: SearchResult | None,
        costs: CostModel | None = None,
        *,
        offloads_optimizer: bool = False,
    ) -> SearchResult | None:
        """`search_with`, with other costs where some are given."""
        self._num_before = self._num_plans
        about = *self._about, costs or self._costs, self.divided(cp), self._go_on
        how = {"cp": cp, "above": above, "beside": beside, "offloads_optimizer": offloads_optimizer}
        return search_with(*about, **how, **self._how)

    def _go_on(self, done: int, total: int) -> None:
        self._num_plans = self._num_before + total
        self._progress(self._num_before + done, self._num_plans)


def cp_sizes(config: Config, batches: GroupedBatches) -> list[int]:
    """The sizes that the config allows; the least alone where it is not known what shares of all samples encode."""
    sizes = allowed_cp_sizes(config)
    return sizes if batches.largest.can_be_divided.all() else sizes[:1]


def _has_long_sample(config: Config, spec: ModelSpec, costs: CostModel, batches: GroupedBatches) -> bool:
    """Whether a sample takes a large part of what a device computes of a batch, or of its memory (`_LONG`)."""
    largest = max(float(drawn.loads_s.max()) for drawn in batches.drawn) * config.cluster.num_devices
    llm = StageKind.whole("llm", min(costs.layouts["llm"]), spec.module("llm").num_layers)
    kept_bytes = costs.stage_memory(llm, loads_of("llm", batches.largest)).activation_bytes.max()
    return largest >= _LONG or kept_bytes >= _LONG * config.cluster.memory_gib * 2**30
