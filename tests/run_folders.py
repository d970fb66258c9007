"""A run's artifacts as files, for what reads them in processes of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
import yaml

from dflop.plan import Grid, Plan
from dflop.store import SHARD_SCHEMA, ShardFile, write_shapes


class RunFolder(NamedTuple):
    """`shapes.duckdb`, `costs.duckdb`, `plan.yaml`, and a config as a mapping."""

    paths: dict[str, Path]
    config: dict


@pytest.fixture
def make_run(tmp_path, draw_samples, write_made_up_costs) -> Callable[..., RunFolder]:
    """`make_run(…)`: drawn samples on one encoder rank and a pipeline of the LLM; `alike` ones differ by a quarter."""

    def make(
        num_samples: int = 60,
        llm_pp: int = 2,
        num_microbatches: int = 8,
        batch_size: int = 24,
        *,
        alike: bool = False,
        **schedule: object,
    ) -> RunFolder:
        samples = draw_samples(num_samples, seed=1)
        names = ("row", "sample_id", "llm_tokens", "target_tokens")
        frame = pl.DataFrame({name: getattr(samples, name).tolist() for name in names}).with_columns(
            num_items=samples.items_of("vision"), kept_vision_tokens=samples.kept_by("vision")
        )
        if alike:
            drawn = np.exp(np.random.default_rng(1).normal(size=(2, num_samples)) * 0.25)
            frame = frame.with_columns(
                num_items=pl.Series(np.rint(30 * drawn[0]).astype(int)),
                llm_tokens=pl.Series(np.rint(3000 * drawn[1]).astype(int)),
            )
        empty = {"num_frames": 0, "audio_s": 0.0, "audio_tokens": 0, "kept_audio_tokens": 0, "num_audio_windows": 0}
        frame = frame.with_columns(
            modality=pl.lit("image"),
            num_images=1,
            vision_tokens="kept_vision_tokens",
            text_tokens="target_tokens",
            truncated=False,
            **{name: pl.lit(value) for name, value in empty.items()},
        )
        missing = [pl.lit(None).alias(name) for name in SHARD_SCHEMA if name not in frame.columns]
        shard = frame.with_columns(missing).select(SHARD_SCHEMA.names()).cast(dict(SHARD_SCHEMA))
        shard.write_parquet(tmp_path / "s.parquet")
        source = {"name": "drawn", "path": "", "media_root": "", "sampling": "all", "digest": "d"}
        write_shapes(
            tmp_path / "shapes.duckdb",
            [ShardFile(tmp_path / "s.parquet", "s", "drawn", 0, 0)],
            pl.DataFrame([source | {"num_records": num_samples}]),
            {},
            sampled_rows={},
            keep_duplicates=False,
        )
        write_made_up_costs(tmp_path / "costs.duckdb")
        plan = Plan(
            placement="disjoint",
            grids=(Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=llm_pp, pp=llm_pp, rank_offset=1)),
            num_microbatches=num_microbatches,
        )
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"plan": plan.to_dict()}), encoding="utf-8")
        names = {"shapes": "shapes.duckdb", "costs": "costs.duckdb", "plan": "plan.yaml"}
        return RunFolder(
            {name: tmp_path / file for name, file in names.items()},
            {
                "cluster": {"devices_per_node": 1 + llm_pp, "memory_gib": 4.0},
                "schedule": {"policy": "lpt", **schedule},
                "train": {"global_batch_size": batch_size, "steps": 40},
            },
        )

    return make
