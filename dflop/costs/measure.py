"""Measuring a module on this device: the real Hugging Face layers, forward and backward, piece by piece.

One shallow copy of the module (random weights from its config) serves all pieces: its embedding, some of its
layers, its head, or all of them together. Microbatches are made up, but packed and laid out as training has them.
"""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import torch
import torch.distributed as dist

from dflop.base.process_memory import available_bytes, process_bytes
from dflop.costs.clocks import keep_busy
from dflop.costs.design import LoadBounds, Point
from dflop.costs.live_bytes import LiveBytes
from dflop.costs.made_up import MadeUpRuns, Run
from dflop.costs.parameter_sizes import parameter_sizes
from dflop.costs.updates import update_bytes
from dflop.models import ModelSpec, check_tp, load_runtime
from dflop.models.attention import clocked_attention
from dflop.models.compilation import compile_layers
from dflop.models.precision import COMPUTES_IN, compute_in, held_in
from dflop.models.tensor_group import ALONE, TensorGroup
from dflop.plan.trained import EVERYTHING, TrainedSet

__all__ = ["Bench"]

# Short runs are repeated until they take this time together.
_LEAST_MEASURED_S = 0.02
_MOST_RUNS = 5
_CPU_CACHE_BYTES = 32 * 2**20
# More than caches hold.
_UPDATED_VALUES = {"cpu": 2**21, "cuda": 2**26}
# A value, its gradient, two moments and a copy in half precision, and as much to spare.
_BYTES_TO_UPDATE_ONE = 2 * 18
# The share of the free memory that is used, so that fragmentation does not matter.
_USABLE_SHARE = 0.9

_Result = TypeVar("_Result")


class Bench:
    """A module of `depth` layers on one device, or on the tensor-parallel `ranks`, ready to be measured.

    `trained` says what of the model is trained. Frozen layers compute the gradients of their inputs alone.

    Raises:
        UserError: when the model's family cannot be run, or tp does not divide its heads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        module: str,
        depth: int,
        *,
        placeholder_ids: dict[str, int],
        vocab_size: int,
        device: torch.device,
        precision: str,
        is_compiled: bool = False,
        trained: TrainedSet = EVERYTHING,
        ranks: TensorGroup = ALONE,
    ) -> None:
        self.module, self.device, self.depth = module, device, depth
        self.tp, self._group = ranks.size, ranks.group
        check_tp(spec, module, ranks.size)
        self._dtype = dtype = COMPUTES_IN[precision]
        runtime, self._set = load_runtime(spec.family), trained.among(spec.modules)
        spec = runtime.with_depth(spec, module, depth)
        self.stage = runtime.build_stage(
            runtime.make_config(spec, placeholder_ids, vocab_size),
            module,
            layers=range(depth),
            seed=0,
            dtype=held_in(dtype),
            device=device,
            draw_on=device,
            ranks=ranks,
            trained=trained,
        )
        self.stage.train_those(partial(self._set.is_measured_as_trained, module))
        if is_compiled:
            compile_layers(self.stage)
        compute_in(self.stage, dtype)
        self._runs = MadeUpRuns(spec, module, self.stage, dtype)
        self._trained = [parameter for parameter in self.stage.parameters() if parameter.requires_grad]
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter, dtype=held_in(dtype))
        self._flushed = torch.zeros(_cache_bytes(device) // 4, device=device)
        self._largest: tuple[Point, int] | None = None
        self._measured: list[Point] = []
        gc.collect()
        gc.freeze()  # exempt all present objects: scanning them at every point would take longer than the point

    def measure(self, point: Point, repeat: int) -> list[dict[str, Any]]:
        """One row a pass, with the median seconds of a few runs after a warm-up. Short runs are repeated more often.
        Of an LLM's layers, the forward's row says the seconds of attention as well.

        Of the tensor-parallel ranks, the slowest one's seconds and the fullest one's bytes count. Bytes are measured
        in the first repeat only. A point that runs out of memory gives rows without seconds and bytes.
        """
        self._carry(point)
        saved_bytes = peak_bytes = attention_s = None
        seconds: list[float | None] = [None, None]
        try:
            run = self._together(lambda: self._runs.make(point))
            if repeat == 0:
                of_fullest = self._slowest(self._together(lambda: self._bytes(run)))
                saved_bytes, peak_bytes = (int(size) for size in of_fullest)
                self._measured.append(point)
                if self._largest is None or peak_bytes > self._largest[1]:
                    self._largest = (point, peak_bytes)
            else:
                self._together(lambda: self._timed(run))
            self._together(lambda: keep_busy(self.device))
            runs = [self._slowest(self._together(lambda: self._timed(run)))]
            count = min(_MOST_RUNS, int(_LEAST_MEASURED_S / sum(runs[0])))
            runs += [self._slowest(self._together(lambda: self._timed(run))) for _ in range(count - 1)]
            medians = [statistics.median(passes) for passes in zip(*runs, strict=True)]
            if self.module == "llm" and point.piece == "layers" and not point.checkpointing:
                # In a run of its own: on a GPU, to note the moments takes the host as long as to launch a kernel.
                clocked = self._slowest(self._together(lambda: self._timed(run, clocks_attention=True)))
                attention_s = medians[0] * clocked[2] / clocked[0]
            seconds = medians
        except torch.OutOfMemoryError:
            run = saved_bytes = peak_bytes = None
        if seconds[0] is None:
            self._tidy()  # only now: while the error is handled, its traceback keeps the pass's tensors alive
        about = {"module": self.module, "tp": self.tp} | self._runs.loads(point)
        bytes_of = {"peak_bytes": peak_bytes, "saved_bytes": saved_bytes, "repeat": repeat}
        return [
            about | {"pass": direction, "seconds": taken, "attention_s": of_attention} | bytes_of
            for direction, taken, of_attention in (("forward", seconds[0], attention_s), ("backward", seconds[1], None))
        ]

    def parameter_sizes(self, bounds: LoadBounds | None = None) -> pl.DataFrame:
        """The parameters' bytes of each part (`parameter_sizes.py`). What an LLM's attention keeps is measured on a
        microbatch in the middle of the bounds, and so is what frozen layers among trained ones take."""
        bounds, is_llm = bounds or LoadBounds(), self.module == "llm"
        tokens = min(int(math.sqrt(math.prod(bounds.num_tokens))), bounds.segment_tokens[1])
        sizes = {"segments": (tokens,)} if is_llm else {"num_items": int(math.sqrt(math.prod(bounds.num_items)))}
        point = Point("layers", self.depth, False, **sizes)
        passing = self._passing_shares(point) if self._set.ways(self.module).has_passing else (None, None)
        attention_bytes = self._attention_bytes(point) if is_llm else None
        return parameter_sizes(self.stage, self.module, self.tp, self._set, passing, attention_bytes)

    def _attention_bytes(self, point: Point) -> float:
        """Bytes a token that a layer keeps more of where it is recomputed but for attention."""
        kept_bytes, run = [], self._runs.make(point)
        self.stage.layers = range(self.depth)
        for num_attention_kept in (self.depth, 0):
            self.stage.set_recomputed(self.depth, num_attention_kept=num_attention_kept)
            kept_bytes.append(self._bytes(run)[0])
        return max(0, kept_bytes[0] - kept_bytes[1]) / (self.depth * point.num_tokens)

    def _passing_shares(self, point: Point) -> tuple[float, float]:
        """Of layers that pass gradients on: their backward and what they keep, as shares of trained layers'."""
        self._carry(point)
        run = self._runs.make(point)
        kept_bytes, backward_s = ([], []), ([], [])
        for _ in range(_MOST_RUNS):
            for place, context in enumerate((nullcontext, self.stage.layers_passing)):
                with context():
                    if not kept_bytes[place]:
                        kept_bytes[place].append(self._bytes(run)[0])
                    backward_s[place].append(self._slowest(self._timed(run))[1])
        (trained_s, passing_s), (trained, passing) = map(statistics.median, backward_s), (own[0] for own in kept_bytes)
        return min(1.0, passing_s / trained_s), min(1.0, passing / max(1, trained))

    def room_bytes(self) -> float:
        """Bytes that the microbatches of a rank may take, the least over all ranks. Ranks on CPUs share the memory."""
        if self.device.type == "cuda":
            room = float(torch.cuda.mem_get_info(self.device)[0])
        else:
            num_ranks = dist.get_world_size() if dist.is_initialized() else 1
            room = available_bytes() / num_ranks
        least = torch.tensor([-_USABLE_SHARE * room], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(least, dist.ReduceOp.MAX)
        return -float(least)

    def overhead(self) -> tuple[int, float]:
        """Bytes that the process holds beside its tensors, and bytes that its allocator reserves without using them, as
        a share of the tensors' bytes."""
        self._tidy()
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free - torch.cuda.memory_reserved(self.device), self._reserved_share()
        own_bytes = self._flushed.nbytes
        own_bytes += sum(parameter.nbytes for parameter in self.stage.parameters())
        own_bytes += sum(parameter.grad.nbytes for parameter in self._trained)
        ctypes.CDLL(None).malloc_trim(0)
        held_bytes = max(0, process_bytes("VmRSS") - own_bytes)
        if self._largest is None:
            return held_bytes, 0.0
        point, peak_bytes = self._largest
        self._carry(point)
        run = self._runs.make(point)
        before = process_bytes("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
        except OSError:
            return held_bytes, 0.0  # not Linux, or a container that does not let a process do so
        self._timed(run)
        return held_bytes, max(0.0, (process_bytes("VmHWM") - before) / peak_bytes - 1)

    def update_bytes_per_s(self) -> float:
        """What an optimiser's step reads and writes in a second: the median of a few steps, as training runs them."""
        self._tidy()
        count, dtype = _UPDATED_VALUES[self.device.type], self._dtype
        if self.device.type == "cuda":  # a large model leaves little room
            count = min(count, torch.cuda.mem_get_info(self.device)[0] // _BYTES_TO_UPDATE_ONE)
        masters = torch.nn.Parameter(torch.zeros(count, dtype=held_in(dtype), device=self.device))
        masters.grad, values = torch.zeros_like(masters), masters.detach().to(dtype)
        optimizer = torch.optim.AdamW([masters], fused=True)
        seconds = []
        for _ in range(1 + _MOST_RUNS):
            self._flushed.add_(1.0)
            start = self._mark()
            masters.grad.zero_()
            torch.linalg.vector_norm(masters.grad)
            masters.grad.mul_(1.0)
            optimizer.step()
            if values.dtype != masters.dtype:
                values.copy_(masters.detach())
            seconds.append(self._between(start, self._mark()))
        return update_bytes(4.0 * count, 1, value_bytes=dtype.itemsize) / statistics.median(seconds[1:])

    def _reserved_share(self) -> float:
        """What a GPU's allocator reserves for microbatches of changing sizes, beyond what they hold at most, as a share
        of that. Between them it keeps its segments, as in training. A point for which they leave no room is the
        last."""
        torch.cuda.reset_peak_memory_stats(self.device)
        with suppress(torch.OutOfMemoryError):
            for point in self._measured:
                self._together(lambda point=point: self._once(point))
        return torch.cuda.max_memory_reserved(self.device) / torch.cuda.max_memory_allocated(self.device) - 1

    def _once(self, point: Point) -> None:
        self._carry(point)
        outputs = self._runs.make(point).forward()
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    def _timed(self, run: Run, *, clocks_attention: bool = False) -> list[float]:
        """Seconds of forward and of backward, and with `clocks_attention` of attention in forward."""
        self._flushed.add_(1.0)
        for leaf in run.inputs:
            leaf.grad = None
        self._zero_gradients()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # launches must not hide behind what was queued before
        self._slowest([0.0])  # ranks begin together
        start = self._mark()
        with clocked_attention(self._mark) if clocks_attention else nullcontext([]) as marks:
            outputs = run.forward()
        half = self._mark()
        gradients = [torch.ones_like(output) for output in outputs]
        resumed = self._mark()
        torch.autograd.backward(outputs, gradients)
        end = self._mark()
        seconds = [self._between(start, half), self._between(resumed, end)]
        if clocks_attention:
            seconds.append(sum(starmap(self._between, zip(marks[::2], marks[1::2], strict=True))))
        return seconds

    def _zero_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad.zero_()

    def _mark(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def _together(self, call: Callable[[], _Result]) -> _Result:
        """The result of `call`, or an error on all tensor-parallel ranks if one of them runs out of memory.

        The ranks hold equal parts, so they run out of memory together. If only one does, while others wait for it in
        an all-reduce of the pass, measuring fails: its next collective does not match theirs.

        Raises:
            torch.OutOfMemoryError: on all of these ranks.
        """
        result, failure = None, None
        try:
            result = call()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            failure = error
        (has_failed,) = self._slowest([float(failure is not None)])
        if has_failed:
            raise torch.OutOfMemoryError("a rank is out of memory") from failure
        return result

    def _slowest(self, numbers: Sequence[float]) -> Sequence[float]:
        """The largest of each number over the tensor-parallel ranks, so that these decide alike."""
        if self._group is None:
            return numbers
        largest = torch.tensor(numbers, dtype=torch.float64)  # on the host: gloo carries it, whatever the device does
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest.tolist()

    def _carry(self, point: Point) -> None:
        self.stage.layers = range(point.num_layers)
        self.stage.set_recomputed(point.num_layers if point.checkpointing else 0)

    def _bytes(self, run: Run) -> tuple[int, int]:
        """Bytes that live from forward to backward, and the most that live at any time. This is a warm-up, too."""
        self._tidy()
        if self.device.type == "cuda":
            self._timed(run)  # libraries allocate their workspaces when they are first used
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            outputs = run.forward()
            saved = torch.cuda.memory_allocated(self.device) - before
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            del outputs
            peak = torch.cuda.max_memory_allocated(self.device)
            return saved, peak - before
        with LiveBytes() as live:
            outputs = run.forward()
            saved = live.now
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            del outputs
        return saved, live.peak

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _is_out_of_memory(error: Exception) -> bool:
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        sign in said for sign in ("allocate memory", "out of memory", "ALLOC_FAILED")
    )


def _cache_bytes(device: torch.device) -> int:
    """The size of a buffer that fills the device's last-level cache when it is written."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii")
        return int(text.strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _CPU_CACHE_BYTES
