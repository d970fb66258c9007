"""Measure how long training's loaders take: load a few samples of each modality as training would.

The code that feeds training reads and decodes the media and tokenises the text, on a machine of the cluster. Each
sample is loaded once, because training, too, reads each file for the first time.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.config import Config
from dflop.loading.dataset import (
    LoadedMedia,
    MicrobatchJob,
    MicrobatchLoader,
    SampleRef,
    TrainingRecords,
    microbatch_loader,
)
from dflop.models import load_model_spec, load_runtime
from dflop.shapes.manifests import list_sources
from dflop.shapes.media import open_medium
from dflop.shapes.reader import MediumSize
from dflop.shapes.record_media import RecordError, resolve_medium
from dflop.shapes.samples import SampleShapes, load_samples
from dflop.shapes.text import tokenizer_folder
from dflop.store import LOADING_SCHEMA, read_table

__all__ = ["measure_loading"]

# At most so many samples of a modality are loaded; loading stops earlier once it has taken so many seconds.
MOST_SAMPLES, MOST_SECONDS = 16, 3.0


def measure_loading(config: Config, shapes: Path, progress: Callable[[int], None] = lambda done: None) -> pl.DataFrame:
    """Load samples of `shapes.duckdb`, drawn by the config's seed, and return the times as a `LOADING_SCHEMA` table.

    `progress` is called with 1 for each sample that was loaded.

    Raises:
        UserError: when a record has changed since it was profiled, or `shapes.duckdb` holds no sizes of media.
    """
    spec = load_model_spec(config.model)
    samples, _ = load_samples(shapes, spec.encoders)
    if samples.media is None:
        raise UserError("shapes.duckdb holds no sizes of media; make it again with `dflop profile-shapes`")
    loaders = _loaders(config, samples)
    modality, times = _modality_of(shapes, samples), samples.times_drawn()
    rng = np.random.default_rng(config.seed)
    rows = []
    for name in sorted(set(modality)):
        group, num_samples = samples.take(np.flatnonzero(modality == name)), round(times[modality == name].sum())
        drawn = group.take(rng.permutation(len(group))[:MOST_SAMPLES])
        for module, loader in loaders.items():
            loads = group.llm_tokens if module == "llm" else group.items_of(module)
            if not loads.sum():
                continue
            rows.append(
                {"module": module, "modality": name, "num_samples": num_samples}
                | _measured(module, loader, drawn, float(loads.mean()), progress)
            )
    return pl.DataFrame(rows, schema=LOADING_SCHEMA)


def _loaders(config: Config, samples: SampleShapes) -> dict[str, MicrobatchLoader]:
    """One for each module. Each loads one sample, so that what is made at first use (the tokenizer) is not timed."""
    spec = load_model_spec(config.model)
    records = TrainingRecords(list_sources(config.data), config.seed)
    checkpoint = Path(config.model.path) if config.model.path else None
    processors = load_runtime(spec.family).processors
    loaders = {
        module.name: microbatch_loader(
            config.data,
            spec,
            records,
            tokenizer_folder=tokenizer_folder(config.model),
            module=module.name,
            num_replicas=[1] * len(spec.encoders),
            processor=None if module.name == "llm" else processors[module.name](spec, checkpoint),
        )
        for module in spec.modules
    }
    first = int(samples.num_items.sum(axis=1).argmin()) if spec.encoders else 0
    for loader in loaders.values():
        loader[_job(samples, first)]
    return loaders


def _modality_of(shapes: Path, samples: SampleShapes) -> np.ndarray:
    """The modality of each sample, [num_samples]."""
    frame = read_table(shapes, "samples", made_by="merge-shapes").select("sample_id", "modality")
    known: Mapping[str, str] = dict(frame.iter_rows())
    return np.array([known[sample_id] for sample_id in samples.sample_id])


def _measured(
    module: str, loader: MicrobatchLoader, drawn: SampleShapes, mean_load: float, progress: Callable[[int], None]
) -> dict[str, float | int]:
    """The measured columns, scaled to a sample of the mean load (items of an encoder, tokens of the LLM)."""
    loads = drawn.llm_tokens if module == "llm" else drawn.items_of(module)
    seconds = core_s = media_bytes = 0.0
    num_measured = num_unreadable = 0
    for number in range(len(drawn)):
        job = _job(drawn, number)
        started, cpu_started = time.perf_counter(), time.process_time()
        loaded = loader[job]
        core_s += time.process_time() - cpu_started
        seconds += time.perf_counter() - started
        num_measured += 1
        if isinstance(loaded, LoadedMedia):
            num_unreadable += bool(loaded.unreadable)
            media_bytes += _media_bytes(loader, job.samples[0])
        progress(1)
        if seconds > MOST_SECONDS:
            break
    # The drawn samples may be larger or smaller than the mean.
    scale = mean_load / max(1.0, float(loads[:num_measured].sum()))
    return {
        "num_measured": num_measured,
        "num_unreadable": num_unreadable,
        "seconds": seconds * scale,
        "core_s": core_s * scale,
        "media_bytes": media_bytes * scale,
        "num_cores": len(os.sched_getaffinity(0)),
    }


def _media_bytes(loader: MicrobatchLoader, ref: SampleRef) -> int:
    """Bytes of a sample's media, in their files or in the manifest."""
    record, media_root = loader.records.record(ref)
    size = 0
    for medium in record.media:
        try:
            with open_medium(resolve_medium(media_root, medium)) as file:
                size += file.seek(0, os.SEEK_END)
        except (RecordError, OSError):
            continue  # it was loaded as blank items, which `num_unreadable` counts
    return size


def _job(samples: SampleShapes, number: int) -> MicrobatchJob:
    """One sample alone in a microbatch."""
    assert samples.media is not None
    (sizes,) = samples.media[np.array([number])].of_each()
    return MicrobatchJob(
        samples=(SampleRef(str(samples.source[number]), int(samples.row[number])),),
        media=(tuple(MediumSize(*size) for size in sizes.tolist()),),
        kept_tokens=(tuple(samples.kept_tokens[number].tolist()),),
        llm_tokens=(int(samples.llm_tokens[number]),),
        encoder_rank=((0,) * len(samples.encoders),),
    )
