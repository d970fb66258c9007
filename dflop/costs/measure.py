"""Measuring a module on this device: the real Hugging Face layers, forward and backward, piece by piece.

One shallow copy of the module (random weights from its config) serves all pieces: its embedding, some of its
layers, its head, or all of them together. Microbatches are made up, but packed and laid out as training has them.
"""

import ctypes
import gc
import itertools
import re
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import polars as pl
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dflop.costs.design import Point
from dflop.models import ModelSpec, check_runnable
from dflop.models.llava_onevision.stages import LlmStage, Stage, VisionStage, build_stage, make_hf_config
from dflop.models.microbatch import MediumLayout, TextBatch, VisualBatch
from dflop.runtime.memory import available_bytes, process_bytes

__all__ = ["Bench"]

# Short runs are repeated at once until they fill this time.
_LEAST_MEASURED_S = 0.02
_MOST_RUNS = 5
_CPU_CACHE_BYTES = 32 * 2**20
# Of the free memory, so that fragments do not matter.
_USABLE_SHARE = 0.9

_Result = TypeVar("_Result")


class _Run(NamedTuple):
    """One microbatch on one piece: `forward` gives what to differentiate, `inputs` are leaves that want a gradient."""

    forward: Callable[[], torch.Tensor]
    inputs: list[torch.Tensor]


class Bench:
    """A module of `depth` layers on one device, or on the ranks of a tensor-parallel `mesh`, ready to be measured.

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
        mesh: DeviceMesh | None = None,
    ) -> None:
        check_runnable(spec.family)
        self.spec, self.module, self.device = spec, module, device
        self.tp = mesh.size() if mesh else 1
        self._group = mesh.get_group() if mesh else None
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        self.depth = depth
        self.stage = self._build(placeholder_ids, vocab_size)
        if mesh is not None:
            from dflop.models.tensor_parallel import shard_stage

            shard_stage(self.stage, mesh)
        for parameter in self.stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._flushed = torch.zeros(_cache_bytes(device) // 4, device=device)
        self._largest: tuple[Point, int] | None = None
        self._reserved_share = 0.0
        self._generator = torch.Generator(device=device).manual_seed(0)
        gc.collect()
        gc.freeze()  # what is there by now stays; looking through it at every point would take longer than the point

    def _build(self, placeholder_ids: dict[str, int], vocab_size: int) -> Stage:
        fields = deepcopy(self.spec.hf_config)
        section = "text_config" if self.module == "llm" else "vision_config"
        fields[section]["num_hidden_layers"] = self.depth
        config = make_hf_config(fields, placeholder_ids, vocab_size)
        layer = config.vision_feature_layer
        config.vision_feature_layer = -1 if isinstance(layer, int) else [-1] * len(layer)
        layers = range(self.depth)
        return build_stage(
            config,
            self.module,
            layers=layers,
            seed=0,
            dtype=self.dtype,
            device=self.device,
            draw_on=self.device,
        )

    def measure(self, point: Point, repeat: int) -> list[dict[str, Any]]:
        """One row a pass: the median of a few runs after a warm-up, short ones more often; the slowest rank counts.

        Bytes, the fullest rank's, are measured in the first repeat alone. Out of memory is a measurement without
        seconds and bytes.
        """
        self.stage.layers = range(point.num_layers)
        self.stage.set_checkpointing(point.checkpointing)
        saved_bytes = peak_bytes = None
        seconds: list[float | None] = [None, None]
        try:
            run = self._together(lambda: self._run(point))
            if repeat == 0:
                of_fullest = self._slowest(self._together(lambda: self._bytes(run)))
                saved_bytes, peak_bytes = (int(size) for size in of_fullest)
                if self._largest is None or peak_bytes > self._largest[1]:
                    self._largest = (point, peak_bytes)
            else:
                self._together(lambda: self._timed(run))
            runs = [self._slowest(self._together(lambda: self._timed(run)))]
            count = min(_MOST_RUNS, int(_LEAST_MEASURED_S / sum(runs[0])))
            runs += [self._slowest(self._together(lambda: self._timed(run))) for _ in range(count - 1)]
            seconds = [statistics.median(passes) for passes in zip(*runs, strict=True)]
        except torch.OutOfMemoryError:
            run = saved_bytes = peak_bytes = None
        if seconds[0] is None:
            self._tidy()  # now, and not while the error is handled: it holds the pass's frames, and they its tensors
        about = {"module": self.module, "tp": self.tp} | point.keys()
        bytes_of = {"peak_bytes": peak_bytes, "saved_bytes": saved_bytes, "repeat": repeat}
        return [
            about | {"pass": direction, "seconds": taken} | bytes_of
            for direction, taken in zip(("forward", "backward"), seconds, strict=True)
        ]

    def parameter_sizes(self) -> pl.DataFrame:
        """fp32 bytes of a layer's, the first and the last part's parameters on one rank."""
        sizes = dict.fromkeys(("layer", "first", "last"), 0.0)
        for name, parameter in self.stage.named_hf_parameters().items():
            local = _local(parameter)
            if re.search(r"\blayers\.\d+\.", name):
                sizes["layer"] += 4.0 * local.numel() / self.depth
            else:
                sizes["first" if "embed" in name else "last"] += 4.0 * local.numel()
        return pl.DataFrame(
            [
                {"module": self.module, "tp": self.tp, "part": part, "parameter_bytes": size}
                for part, size in sizes.items()
            ]
        )

    def room_bytes(self) -> float:
        """What the microbatches of this process may take, the least over all ranks; they share a machine's memory."""
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
        """Bytes that the process holds beside its tensors, and what its allocator holds in vain (a share of them)."""
        self._tidy()
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free - torch.cuda.memory_reserved(self.device), self._reserved_share
        own_bytes = sum(2 * _local(parameter).nbytes for parameter in self.stage.parameters()) + self._flushed.nbytes
        ctypes.CDLL(None).malloc_trim(0)
        held_bytes = max(0, process_bytes("VmRSS") - own_bytes)
        if self._largest is None:
            return held_bytes, 0.0
        point, peak_bytes = self._largest
        self.stage.layers = range(point.num_layers)
        self.stage.set_checkpointing(point.checkpointing)
        run = self._run(point)
        before = process_bytes("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted anew
        except OSError:
            return held_bytes, 0.0  # not Linux, or a container that does not let a process do so
        self._timed(run)
        return held_bytes, max(0.0, (process_bytes("VmHWM") - before) / peak_bytes - 1)

    def _timed(self, run: _Run) -> list[float]:
        """Seconds of forward and of backward."""
        self._flushed.add_(1.0)
        for leaf in run.inputs:
            leaf.grad = None
        self._zero_gradients()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # launches must not hide behind what was queued before
        self._slowest([0.0])  # ranks begin together
        start = self._mark()
        output = run.forward()
        half = self._mark()
        gradient = None if output.ndim == 0 else torch.ones_like(output)
        resumed = self._mark()
        output.backward(gradient)
        end = self._mark()
        return [self._between(start, half), self._between(resumed, end)]

    def _zero_gradients(self) -> None:
        for parameter in self.stage.parameters():
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
        """What the call returns. What is out of memory on one of the ranks that act as one is so on all of them.

        They hold equal parts and run out alike. One that does so alone while others wait for it in an all-reduce of
        the pass ends measuring: its collective does not match theirs.

        Raises:
            torch.OutOfMemoryError: on every one of these ranks.
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
        """The largest over the ranks that act as one, who therefore decide alike by it."""
        if self._group is None:
            return numbers
        largest = torch.tensor(numbers, dtype=torch.float64)  # on the host: gloo carries it, whatever the device does
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest.tolist()

    def _bytes(self, run: _Run) -> tuple[int, int]:
        """Bytes that live from forward to backward, and the most that live at any time; a warm-up too."""
        self._tidy()
        if self.device.type == "cuda":
            self._timed(run)  # libraries allocate their workspaces when they are first used
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            output = run.forward()
            saved = torch.cuda.memory_allocated(self.device) - before
            output.backward(None if output.ndim == 0 else torch.ones_like(output))
            del output
            peak = torch.cuda.max_memory_allocated(self.device)
            self._reserved_share = max(self._reserved_share, torch.cuda.max_memory_reserved(self.device) / peak - 1)
            return saved, peak - before
        with _LiveBytes() as live:
            output = run.forward()
            saved = live.now
            output.backward(None if output.ndim == 0 else torch.ones_like(output))
            del output
        return saved, live.peak

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, point: Point) -> _Run:
        return self._llm_run(point) if self.module == "llm" else self._vision_run(point)

    def _vision_run(self, point: Point) -> _Run:
        side, vision = self.spec.rules.image_size, self.stage
        assert isinstance(vision, VisionStage)
        batch = VisualBatch(
            items=self._random(point.num_items, 3, side, side),
            media=tuple((medium,) for medium in self._media(point.num_items)),
            kept_tokens=(1 << 30,) * len(self._media(point.num_items)),
        )
        if point.piece == "first":
            return _Run(self._cast(lambda: vision.embed(batch)), [])
        if point.piece == "whole":
            return _Run(self._cast(lambda: torch.cat(vision(batch))), [])
        with torch.no_grad():
            shape = vision.embed(VisualBatch(items=batch.items[:1], media=(), kept_tokens=())).shape
        leaf = self._random(point.num_items, *shape[1:]).requires_grad_()
        if point.piece == "layers":
            return _Run(self._cast(lambda: vision.encode(leaf)[-1]), [leaf])
        num_outputs = abs(min(_as_list(vision.hf.config.vision_feature_layer)))
        return _Run(self._cast(lambda: torch.cat(vision.finish([leaf] * num_outputs, batch))), [leaf])

    def _media(self, num_items: int) -> list[MediumLayout]:
        """Pictures of a 2x2 grid and single crops that make up the number of items."""
        side = self.spec.rules.image_size
        whole = self.spec.rules.image(2 * side, 2 * side, 1).num_items
        return [MediumLayout("image", whole, 2 * side, 2 * side)] * (num_items // whole) + [
            MediumLayout("image", 1, side, side)
        ] * (num_items % whole)

    def _llm_run(self, point: Point) -> _Run:
        llm = self.stage
        assert isinstance(llm, LlmStage)
        config = llm.hf.config.text_config
        num_tokens = point.num_tokens
        ids = torch.randint(config.vocab_size, (num_tokens,), device=self.device, generator=self._generator)
        targets = torch.arange(num_tokens - point.num_targets, num_tokens, device=self.device)
        batch = TextBatch(
            token_ids=ids,
            position_ids=torch.cat([torch.arange(length, device=self.device) for length in point.segments]),
            segment_ends=list(itertools.accumulate(point.segments)),
            visual_positions=(torch.arange(num_tokens // 2, device=self.device),),
            target_positions=targets,
            target_ids=ids[targets],
        )
        features = self._random(num_tokens // 2, config.hidden_size).requires_grad_()
        if point.piece == "first":
            return _Run(self._cast(lambda: llm.embed(batch, [features])), [features])
        if point.piece == "whole":
            return _Run(
                self._cast(lambda: llm.finish(llm.encode(llm.embed(batch, [features]), batch), batch)), [features]
            )
        leaf = self._random(1, num_tokens, config.hidden_size).requires_grad_()
        if point.piece == "layers":
            return _Run(self._cast(lambda: llm.encode(leaf, batch)), [leaf])
        return _Run(self._cast(lambda: llm.finish(leaf, batch)), [leaf])

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype, generator=self._generator)

    def _cast(self, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with self._autocast:
                return forward()

        return run


class _LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_storage_key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and _storage_key(tensor) not in given | self._known.keys():
                self._note(_local(tensor).untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def forget(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storage_key(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _as_list(value: int | list[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _is_out_of_memory(error: Exception) -> bool:
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        sign in said for sign in ("allocate memory", "out of memory", "ALLOC_FAILED")
    )


def _cache_bytes(device: torch.device) -> int:
    """So much that writing it leaves nothing else in the device's last cache."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii")
        return int(text.strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _CPU_CACHE_BYTES
