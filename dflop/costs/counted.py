"""A module's work and memory, counted by running its real layers on fake tensors, which have shapes and no values.

The stage, its made-up microbatches and its pieces are those that are measured on a device (`measure.py`), with weights
in bf16 and gradients in fp32. There are no other ranks, only torch's `fake` process group.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import polars as pl
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.distributed.fake_pg import FakeStore

from dflop.costs.design import Point
from dflop.costs.fusing import Fuser, check_torch_fuses
from dflop.costs.made_up import MadeUpRuns, Run
from dflop.costs.meter import Meter, Work
from dflop.costs.parameter_sizes import parameter_sizes
from dflop.models import ModelSpec, load_runtime
from dflop.models.compilation import RECOMPUTES_POINTWISE, replace_forwards
from dflop.models.loads import main_load
from dflop.models.precision import compute_in, held_in
from dflop.models.stages import Stage
from dflop.models.tensor_group import ALONE, TensorGroup
from dflop.plan.trained import EVERYTHING, TrainedSet

__all__ = ["CountedRun", "CountedStage", "counting"]

# For what grows in proportion to them.
_NUM_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class CountedRun:
    """Work of forward and of backward, bytes kept between the two, and the most bytes at each operation, parameters and
    their gradients left out. `products` are the places of the first matrix product and of the last one."""

    forward: Work
    backward: Work
    saved_bytes: int
    peaks: tuple[int, ...]
    products: tuple[int, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)


@contextmanager
def counting(tp: int) -> Iterator[TensorGroup]:
    """The context in which a stage is built and run: fake tensors, and the first of `tp` ranks."""
    if tp > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield TensorGroup(tuple(range(tp)), 0, dist.group.WORLD) if tp > 1 else ALONE
    finally:
        if tp > 1:
            dist.destroy_process_group()


class CountedStage:
    """A module of `depth` layers, eager or compiled, of a model of which `trained` says what is trained. To be used
    inside `counting`. `change` is called with the stage as soon as it is built.

    Compiled layers are those that train here (`models.compilation`); without `recomputes_pointwise`, those that torch
    makes by default.

    Raises:
        UserError: when the model's family cannot be run, or torch is too old for compiled layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        module: str,
        depth: int,
        ranks: TensorGroup,
        *,
        is_compiled: bool = False,
        recomputes_pointwise: bool = True,
        trained: TrainedSet = EVERYTHING,
        change: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        if is_compiled:
            check_torch_fuses()
        runtime, dtype = load_runtime(spec.family), torch.bfloat16
        self.module, self.tp = module, ranks.size
        self.main_load, self.hidden_size = main_load(module), spec.module(module).hidden_size
        # Whether all positions are in one row, and whether items attend to each other in runs.
        self.is_packed = module == "llm" or runtime.packs_media
        self.has_runs = module != "llm" and runtime.make_up_media(spec, module, 1).sum_sq_items > 0
        self._trained = trained.among(spec.modules)
        spec = runtime.with_depth(spec, module, depth)
        placeholders = ("image", "video", "audio", *spec.rules.special_tokens)
        config = runtime.make_config(spec, {name: place for place, name in enumerate(placeholders)}, 0)
        self.stage = runtime.build_stage(
            config, module, layers=range(depth), seed=0, ranks=ranks, is_empty=True, trained=trained
        )
        change(self.stage)
        self.stage.train_those(partial(self._trained.is_measured_as_trained, module)).train()
        compute_in(self.stage, dtype)
        self._fuser = Fuser()
        self.runs = MadeUpRuns(spec, module, self.stage, dtype)
        self.runs.receive = self._receive
        self._meter: Meter | None = None
        # Eager layers and compiled ones, whose attention is not compiled, keep the same of it.
        self._attention_bytes = self._bytes_of_attention() if module == "llm" else None
        if is_compiled:
            config = RECOMPUTES_POINTWISE if recomputes_pointwise else {}
            replace_forwards(self.stage, partial(self._fuser, config=config), self._fuser)

    def run(self, point: Point, *, keeps_attention: bool = False) -> CountedRun:
        """One forward and backward of a point; with `keeps_attention`, layers are recomputed but for attention."""
        self.stage.layers, again = range(point.num_layers), point.num_layers if point.checkpointing else 0
        self.stage.set_recomputed(again, num_attention_kept=again if keeps_attention else 0)
        for parameter in self.stage.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=held_in(parameter.dtype))
        run, num_traced = self.runs.make(point), self._fuser.num_traced
        counted = self._counted(run)
        # Tracing a layer counts as well, so that the run is repeated.
        return counted if num_traced == self._fuser.num_traced else self._counted(run)

    def _counted(self, run: Run) -> CountedRun:
        with Meter() as meter:
            self._fuser.meter = self._meter = meter
            outputs = [output for output in run.forward() if output.requires_grad]
            forward = meter.work
            edges, gradients = list(map(get_gradient_edge, outputs)), list(map(torch.ones_like, outputs))
            del outputs  # what a stage returns belongs to the stage that receives it
            meter.work = Work()
            saved_bytes = meter.now - sum(gradient.nbytes for gradient in gradients)
            if edges:
                torch.autograd.backward(edges, gradients)
            products = meter.products or [0]
            peaks = (*meter.peaks, meter.peak)
            return CountedRun(forward, meter.work, saved_bytes, peaks, (products[0], products[-1]))

    def _receive(self, leaf: torch.Tensor) -> torch.Tensor:
        """The leaf as a tensor that is freed where nothing keeps it, as what another stage sent would be."""
        received = leaf.clone()
        self._meter.work = Work()
        return received

    @property
    def targets_at_once(self) -> float:
        """For how many targets an LLM's head holds logits at a time."""
        return self.stage.hf.lm_head.num_at_once

    @property
    def has_passing(self) -> bool:
        """Whether the module has frozen layers among trained ones with a backward."""
        return self._trained.ways(self.module).has_passing

    def parameter_sizes(self, passing: tuple[float | None, float | None] = (None, None)) -> pl.DataFrame:
        """As `Bench.parameter_sizes`."""
        return parameter_sizes(self.stage, self.module, self.tp, self._trained, passing, self._attention_bytes)

    def _bytes_of_attention(self) -> float:
        """Bytes a token that a layer keeps more of where it is recomputed but for attention."""
        point = Point("layers", 1, True, segments=(_NUM_TOKENS,), num_targets=1)
        with_attention, whole = (self.run(point, keeps_attention=keeps).saved_bytes for keeps in (True, False))
        return (with_attention - whole) / _NUM_TOKENS
