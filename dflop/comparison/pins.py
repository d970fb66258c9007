"""A check of `plan.fixed` and `plan.today` before anything is measured, by the layouts that will be measured."""

from dflop.comparison.systems.today import todays_layout_note
from dflop.config import Config
from dflop.models import ModelSpec, able_tp_sizes
from dflop.plan.layout_key import LayoutKey
from dflop.search import check_fixed

__all__ = ["check_pins"]


def check_pins(config: Config, spec: ModelSpec) -> str | None:
    """Why no plan agrees with `plan.today`, which is then left out; None where one does.

    Raises:
        UserError: when none agrees with `plan.fixed`, naming the key, its value and the way out.
    """
    tp_sizes = able_tp_sizes(spec, config.costs.tp_sizes)
    layouts = {module: [LayoutKey(tp=tp) for tp in sizes] for module, sizes in tp_sizes.items()}
    if config.plan.fixed:
        check_fixed(config, spec, layouts)
    return todays_layout_note(config, spec, layouts)
