"""Measuring a module on this device: the real Hugging Face layers, forward and backward, at several sizes.

Two shallow copies of the module (random weights from its config) tell what a layer costs from what the
module costs once. Microbatches are made up, but packed and laid out as training has them. Sizes grow until
one run takes `_LONGEST_RUN_S`, so that slow and fast devices both take seconds.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch

from dflop.costs.model import FEATURES, column_of
from dflop.models import ModelSpec, check_runnable
from dflop.models.batches import MediumLayout, TextBatch, VisualBatch
from dflop.models.llava_onevision.stages import LlmStage, VisionStage, build_stage, make_hf_config

__all__ = ["Measured", "measure_module"]

_LONGEST_RUN_S = 0.15
_LEAST_SIZES = 6
_NUM_ITEMS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144)
_NUM_TOKENS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
# Segments a microbatch is cut into, and the share of its tokens that are learned.
_TEXT_FORMS = ((1, 0.5), (4, 0.05), (8, 0.25))


@dataclass(frozen=True, slots=True)
class Measured:
    """`measurements` has the columns of the DuckDB table; `parameters` the sizes that need no clock."""

    measurements: pl.DataFrame
    parameters: pl.DataFrame


def measure_module(
    spec: ModelSpec,
    module: str,
    *,
    placeholder_ids: dict[str, int],
    vocab_size: int,
    repeats: int,
    device: torch.device,
    precision: str,
    progress: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Time and saved-activation bytes of `module` at tp=1, each point `repeats` times after a warm-up.

    Raises:
        UserError: when the model's family cannot be run.
    """
    check_runnable(spec.family)
    whole_depth = spec.module(module).num_layers
    depths = sorted({1, max(2, min(4, whole_depth))})
    dtype = torch.float64 if precision == "fp64" else torch.float32
    rows: list[dict[str, Any]] = []
    stages = {}
    for depth in depths:
        fields = deepcopy(spec.hf_config)
        fields["text_config" if module == "llm" else "vision_config"]["num_hidden_layers"] = depth
        config = make_hf_config(fields, placeholder_ids, vocab_size)
        layers = range(config.text_config.num_hidden_layers)
        stages[depth] = build_stage(config, module, layers=layers, seed=0, dtype=dtype, device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    for depth, stage in stages.items():
        if module == "llm":
            points = _llm_points(stage, device, dtype, autocast)
        else:
            points = _vision_points(stage, spec, device, dtype, autocast)
        too_long, num_measured = set(), Counter()
        for loads, form, forward in points:
            if form in too_long:
                continue
            sizes = ", ".join(f"{name} {count}" for name, count in loads.items() if count)
            progress(f"{module}: {depth} layer(s), {sizes}")
            keys = loads | {"module": module, "tp": 1, "num_layers": depth}
            num_measured[form] += 1
            if (
                _measure_point(rows, keys, forward, stage, repeats) > _LONGEST_RUN_S
                and num_measured[form] >= _LEAST_SIZES
            ):
                too_long.add(form)
    return Measured(pl.DataFrame(rows), _parameter_sizes(stages, spec, module))


def _measure_point(
    rows: list[dict[str, Any]],
    columns: dict[str, Any],
    forward: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    stage: torch.nn.Module,
    repeats: int,
) -> float:
    """Append one row a pass and repeat; returns the least seconds of forward and backward together."""
    peak_bytes = _saved_bytes(forward, stage)
    totals = []
    for repeat in range(-1, repeats):
        stage.zero_grad(set_to_none=False)
        if repeat < 0:
            gc.collect()
        started = _now(stage)
        output, gradient = forward()
        half = _now(stage)
        output.backward(gradient)
        ended = _now(stage)
        if repeat < 0:
            continue  # the warm-up
        totals.append(ended - started)
        for direction, seconds in (("forward", half - started), ("backward", ended - half)):
            rows.append(columns | {"pass": direction, "seconds": seconds, "peak_bytes": peak_bytes, "repeat": repeat})
    return min(totals)


def _now(stage: torch.nn.Module) -> float:
    if next(stage.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _saved_bytes(forward: Callable[[], Any], stage: torch.nn.Module) -> int:
    """Bytes that autograd keeps between forward and backward, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # while it lives, no other storage can take its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storages.values())


def _vision_points(
    stage: VisionStage, spec: ModelSpec, device: torch.device, dtype: torch.dtype, autocast: torch.autocast
) -> Iterator[tuple[dict[str, int], str, Callable]]:
    side = spec.rules.image_size
    for num_items in _NUM_ITEMS:
        items = torch.randn(num_items, 3, side, side, device=device, dtype=dtype)
        media = tuple((medium,) for medium in _media_of(num_items, spec))
        batch = VisualBatch(items=items, media=media, kept_tokens=(1 << 30,) * len(media))

        def forward(batch: VisualBatch = batch) -> tuple[torch.Tensor, torch.Tensor]:
            with autocast:
                features = torch.cat(stage(batch))
            return features, torch.ones_like(features)

        yield dict.fromkeys(FEATURES, 0) | {"num_items": num_items}, "items", forward


def _media_of(num_items: int, spec: ModelSpec) -> Iterator[MediumLayout]:
    """Pictures of a 2x2 grid and single crops that make up the number of items."""
    side = spec.rules.image_size
    whole = spec.rules.image(2 * side, 2 * side, 1).num_items
    for _ in range(num_items // whole):
        yield MediumLayout("image", whole, 2 * side, 2 * side)
    for _ in range(num_items % whole):
        yield MediumLayout("image", 1, side, side)


def _llm_points(
    stage: LlmStage, device: torch.device, dtype: torch.dtype, autocast: torch.autocast
) -> Iterator[tuple[dict[str, int], str, Callable]]:
    config = stage.hf.config.text_config
    for num_tokens in _NUM_TOKENS:
        if num_tokens > config.max_position_embeddings:
            return
        for num_segments, target_share in _TEXT_FORMS:
            length = num_tokens // num_segments
            ids = torch.randint(config.vocab_size, (num_tokens,), device=device)
            targets = torch.arange(num_tokens - int(num_tokens * target_share) - 1, num_tokens - 1, device=device)
            batch = TextBatch(
                token_ids=ids,
                position_ids=torch.arange(length, device=device).repeat(num_segments),
                segment_ends=[length * (index + 1) for index in range(num_segments)],
                visual_positions=(torch.arange(length // 2, device=device),),
                target_positions=targets,
                target_ids=ids[targets + 1],
            )
            features = torch.randn(length // 2, config.hidden_size, device=device, dtype=dtype, requires_grad=True)

            def forward(batch: TextBatch = batch, features: torch.Tensor = features) -> tuple[torch.Tensor, None]:
                with autocast:
                    return stage(stage.embed(batch, [features]), batch), None

            loads = {
                "num_items": 0,
                "num_tokens": num_tokens,
                "sum_sq_tokens": num_segments * length**2,
                "num_targets": len(targets),
            }
            yield loads, f"{num_segments} segments", forward


def _parameter_sizes(stages: dict[int, torch.nn.Module], spec: ModelSpec, module: str) -> pl.DataFrame:
    """Bytes of a layer's and the rest's parameters in fp32, and of a layer's input per load."""
    (shallow, small), (deep, large) = (
        (depth, sum(4 * parameter.numel() for parameter in stage.parameters())) for depth, stage in stages.items()
    )
    per_layer = (large - small) / (deep - shallow)
    load = "num_tokens" if module == "llm" else "num_items"
    positions = 1 if module == "llm" else spec.rules.tokens_per_item
    nothing = {"const_bytes": 0.0} | {column_of(feature, "bytes"): 0.0 for feature in FEATURES}
    input_bytes = 4.0 * spec.module(module).hidden_size * positions
    rows = [
        {"part": "layer", "parameter_bytes": per_layer} | nothing,
        {"part": "rest", "parameter_bytes": small - shallow * per_layer} | nothing,
        {"part": "layer_input", "parameter_bytes": 0.0} | nothing | {column_of(load, "bytes"): input_bytes},
    ]
    return pl.DataFrame([{"module": module, "tp": 1} | row for row in rows])
