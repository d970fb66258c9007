"""The databases have the promised columns, keep every record once, and say why they cannot be read."""

from collections import Counter
from dataclasses import replace

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.shapes import load_samples
from dflop.store import (
    CORRECTIONS_SCHEMA,
    LEFT_OUT_SCHEMA,
    MODALITIES,
    REJECT_REASONS,
    SCHEMA_VERSION,
    SHARD_SCHEMA,
    STEP_SECONDS_SCHEMA,
    HeldOut,
    ShardFile,
    database,
    read_meta,
    read_table,
    write_costs,
    write_observations,
    write_shapes,
)
from dflop.store.shapes import NOTHING_HELD_OUT

# The columns that others rely on, in this order; more may follow.
SAMPLES = [
    ("sample_id", "VARCHAR"),
    ("source", "VARCHAR"),
    ("row", "BIGINT"),
    ("shard", "VARCHAR"),
    ("modality", "VARCHAR"),
    ("num_images", "INTEGER"),
    ("num_frames", "INTEGER"),
    ("audio_s", "DOUBLE"),
    ("num_items", "INTEGER"),
    ("vision_tokens", "INTEGER"),
    ("audio_tokens", "INTEGER"),
    ("text_tokens", "INTEGER"),
    ("llm_tokens", "INTEGER"),
    ("truncated", "BOOLEAN"),
]
REJECTS = [(name, "VARCHAR") for name in ("source", "row", "sample_id", "reason", "detail")]
REJECTS[1] = ("row", "BIGINT")


def good(row: int, sample_id: str | None, **values) -> dict:
    return {
        "row": row,
        "sample_id": sample_id,
        "modality": "image",
        "num_images": 1,
        "num_frames": 0,
        "audio_s": 0.0,
        "num_items": 5,
        "vision_tokens": 100,
        "kept_vision_tokens": 100,
        "num_audio_windows": 0,
        "audio_tokens": 0,
        "kept_audio_tokens": 0,
        "text_tokens": 20,
        "target_tokens": 8,
        "llm_tokens": 120,
        "truncated": False,
    } | values


def bad(row: int, sample_id: str | None, reason: str = "empty") -> dict:
    return {"row": row, "sample_id": sample_id, "reason": reason, "detail": f"because of {reason}"}


@pytest.fixture
def merge(tmp_path):
    """`merge((source, start, rows), …)` writes the shards and merges them; returns the database's path."""

    def run(*shards: tuple[str, int, list[dict]], keep_duplicates: bool = False, held_out=NOTHING_HELD_OUT):
        files = []
        for number, (source, start, rows) in enumerate(shards):
            path = tmp_path / f"shard-{number}.parquet"
            pl.DataFrame(rows, schema=SHARD_SCHEMA, orient="row").write_parquet(path)
            files.append(ShardFile(path, f"{source}-{number}", source, start, start))
        names = list(dict.fromkeys(source for source, _, _ in shards))
        fields = {"path": "p", "media_root": "m", "sampling": "all", "digest": "d", "num_records": 1}
        sources = pl.DataFrame([{"name": name} | fields for name in names])
        database = tmp_path / "shapes.duckdb"
        how = {"sampled_rows": {}, "keep_duplicates": keep_duplicates, "held_out": held_out}
        write_shapes(database, files, sources, {"config_digest": "abc"}, **how)
        return database

    return run


def rows_of(path, table: str, *columns: str) -> list[tuple]:
    return read_table(path, table, made_by="merge-shapes").select(*columns).rows()


def columns_of(path, table: str) -> list[tuple[str, str]]:
    with duckdb.connect(str(path), read_only=True) as connection:
        return [row[:2] for row in connection.execute(f"DESCRIBE {table}").fetchall()]


def test_samples_and_rejects_have_the_promised_columns_in_order(merge):
    path = merge(("train", 0, [good(0, "a"), bad(1, "b")]))
    assert columns_of(path, "samples")[: len(SAMPLES)] == SAMPLES
    assert columns_of(path, "rejects")[: len(REJECTS)] == REJECTS
    assert [name for name, _ in columns_of(path, "sources")][:2] == ["name", "path"]


def test_columns_are_those_of_this_schema_version(merge):
    """Whoever changes the columns raises `SCHEMA_VERSION`, or older files would be misread."""
    path = merge(("train", 0, [good(0, "a")]))
    behind = ["kept_vision_tokens", "kept_audio_tokens", "target_tokens", "num_audio_windows", "audio_rate_hz"]
    behind += [
        "media_width",
        "media_height",
        "media_frames",
        "media_frame_us",
        "media_samples",
        "media_rate_uhz",
        "sum_sq_items",
        "evaluation",
    ]
    assert (SCHEMA_VERSION, [name for name, _ in columns_of(path, "samples")]) == (
        9,
        [*(name for name, _ in SAMPLES), *behind],
    )


def test_a_share_of_the_samples_is_held_out_by_the_seed_and_whole_sources_where_they_say_so(merge):
    rows, others = [good(row, f"a{row}") for row in range(50)], [good(row, f"b{row}") for row in range(3)]

    def held_out(seed, share=0.1, records=rows):
        path = merge(("train", 0, records), ("val", 0, others), held_out=HeldOut(["val"], share, seed))
        return {name for name, out in rows_of(path, "samples", "sample_id", "evaluation") if out}

    of_val = {"b0", "b1", "b2"}
    drawn = held_out(0)
    assert len(drawn) == 5 + 3
    assert of_val < drawn == held_out(0)
    assert held_out(1) != drawn
    assert held_out(0, share=0.0) == of_val
    assert len(held_out(0, share=0.01)) == 1 + 3
    # A record that goes takes none of the others with it.
    assert len(drawn - held_out(0, records=rows[1:])) <= 1


def test_samples_that_are_held_out_are_no_part_of_what_is_trained_on(merge, tiny_spec):
    path = merge(("train", 0, [good(row, f"a{row}") for row in range(10)]), held_out=HeldOut(share=0.3))
    trained, evaluated = (load_samples(path, tiny_spec.encoders, evaluation=held_out)[0] for held_out in (False, True))
    assert (len(trained), len(evaluated)) == (7, 3)
    assert sorted([*trained.row, *evaluated.row]) == list(range(10))
    with pytest.raises(UserError, match="holds no sample to evaluate on"):
        load_samples(merge(("train", 0, [good(0, "a")])), tiny_spec.encoders, evaluation=True)


def test_the_closed_lists_are_the_promised_ones():
    assert MODALITIES == ("text", "image", "multi_image", "video", "audio", "mixed")
    assert set(REJECT_REASONS) == {
        "missing_media",
        "unreadable_media",
        "bad_record",
        "placeholder_mismatch",
        "no_encoder",
        "empty",
        "path_escape",
        "too_long",
        "duplicate_id",
    }


def test_row_numbers_count_from_the_sources_first_record(merge):
    path = merge(
        ("train", 0, [good(0, "a"), good(1, "b")]),
        ("train", 2, [bad(0, "c"), good(1, "d")]),
        ("other", 0, [good(0, "e")]),
    )
    assert rows_of(path, "samples", "sample_id", "source", "row", "shard") == [
        ("a", "train", 0, "train-0"),
        ("b", "train", 1, "train-0"),
        ("d", "train", 3, "train-1"),
        ("e", "other", 0, "other-2"),
    ]
    assert rows_of(path, "rejects", "source", "row", "sample_id", "reason", "detail") == [
        ("train", 2, "c", "empty", "because of empty")
    ]


def test_samples_keep_the_order_of_the_shards_they_came_in(merge):
    path = merge(("b", 0, [good(0, "z"), good(1, "y")]), ("a", 0, [good(0, "x")]))
    assert [row[0] for row in rows_of(path, "samples", "sample_id")] == ["z", "y", "x"]
    assert [row[0] for row in rows_of(path, "sources", "name")] == ["b", "a"]


@pytest.mark.parametrize("keep_duplicates", [False, True])
def test_a_record_without_an_id_is_no_duplicate_of_one_that_is_called_as_it_would_be(merge, keep_duplicates):
    rows = [good(0, None), good(1, "train/0"), good(2, "train/3"), good(3, None)]
    path = merge(("train", 0, rows), keep_duplicates=keep_duplicates)
    assert rows_of(path, "samples", "sample_id", "row") == [
        ("train/0#2", 0),
        ("train/0", 1),
        ("train/3", 2),
        ("train/3#2", 3),
    ]
    assert rows_of(path, "rejects", "reason") == []


ids = st.none() | st.sampled_from(["a", "a#2", "a##2", "a#2#2", "#", "s1/a", "s1/0", "s0/0", "s1/a#2"])


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sources=st.lists(st.lists(st.lists(ids, max_size=4), max_size=2), min_size=1, max_size=3),
    keep_duplicates=st.booleans(),
    data=st.data(),
)
@example(sources=[[["a", "a", "a#2"]]], keep_duplicates=True, data=None)
@example(sources=[[["a"]], [["a", "s1/a"]]], keep_duplicates=False, data=None)
def test_every_sample_has_an_id_of_its_own_and_every_record_is_a_sample_or_a_reject(
    merge, sources, keep_duplicates, data
):
    shards, records = [], []
    for number, parts in enumerate(sources):
        start = 0
        for part in parts:
            is_bad = [data is not None and data.draw(st.integers(0, 4)) == 0 for _ in part]
            rows = [bad(row, name) if is_bad[row] else good(row, name) for row, name in enumerate(part)]
            shards.append((f"s{number}", start, rows))
            records += [(f"s{number}", start + row, name, is_bad[row]) for row, name in enumerate(part)]
            start += len(part)
    if not shards:
        return
    path = merge(*shards, keep_duplicates=keep_duplicates)
    samples = rows_of(path, "samples", "source", "row", "sample_id")
    rejects = rows_of(path, "rejects", "source", "row", "reason")
    assert len({sample_id for *_, sample_id in samples}) == len(samples)
    assert sorted((source, row) for source, row, _ in [*samples, *rejects]) == sorted(key[:2] for key in records)
    # Oracle: the first good record of an id in a source is a sample, the others as the config says.
    seen, kept = set(), []
    for source, row, name, is_bad in records:
        if not is_bad and (keep_duplicates or name is None or (source, name) not in seen):
            kept.append((source, row, name if name is not None else f"{source}/{row}"))
        if not is_bad:
            seen.add((source, name))
    assert [key[:2] for key in samples] == [key[:2] for key in kept]
    assert all(name in sample_id for (*_, name), (*_, sample_id) in zip(kept, samples, strict=True))
    first_of = {name: source for source, _, name in reversed(kept)}
    for (source, _, name), (*_, sample_id) in zip(kept, samples, strict=True):
        if Counter(entry[2] for entry in kept)[name] == 1 and "/" not in name:
            assert sample_id == name
        if first_of[name] != source:
            assert sample_id.startswith(f"{source}/{name}")


def test_the_summary_of_the_shapes_agrees_with_numpy(merge):
    rng = np.random.default_rng(0)
    quantities = ("num_items", "text_tokens", "vision_tokens", "audio_tokens", "llm_tokens")
    rows = []
    for row in range(400):
        values = {name: int(value) for name, value in zip(quantities, rng.geometric(0.01, 5) - 1, strict=True)}
        rows.append(good(row, None, modality=str(rng.choice(["image", "video", "text"])), **values))
    path = merge(("b", 0, rows[:150]), ("b", 150, rows[150:300]), ("a", 0, rows[300:]))
    summary = read_table(path, "shape_summary", made_by="merge-shapes")
    assert summary.select("source", "modality", "quantity").rows() == sorted(
        (source, modality, quantity)
        for source in "ab"
        for modality in ("image", "text", "video")
        for quantity in quantities
    )
    for entry in summary.to_dicts():
        of_source = rows[:300] if entry["source"] == "b" else rows[300:]
        values = np.array([row[entry["quantity"]] for row in of_source if row["modality"] == entry["modality"]])
        assert (entry["num_samples"], entry["max"], entry["total"]) == (
            len(values),
            int(values.max()),
            int(values.sum()),
        )
        for percent in (5, 50, 95, 99):
            assert entry[f"p{percent}"] == pytest.approx(np.percentile(values, percent), abs=0.051)
        assert entry["coefficient_of_variation"] == pytest.approx(values.std() / values.mean(), abs=6e-4)


def test_a_quantity_that_is_always_zero_does_not_vary(merge):
    summary = read_table(merge(("train", 0, [good(0, "a")])), "shape_summary", made_by="merge-shapes")
    (audio,) = summary.filter(pl.col("quantity") == "audio_tokens").to_dicts()
    assert (audio["max"], audio["coefficient_of_variation"]) == (0, 0)


def test_the_summary_of_the_rejects_counts_them_and_shows_three_of_each_reason(merge):
    rows = [bad(row, f"r{row}", "empty" if row % 3 else "too_long") for row in range(30)]
    path = merge(("b", 0, rows), ("a", 0, [bad(0, None, "bad_record"), good(1, "x"), good(2, "x")]))
    assert rows_of(path, "reject_summary", "source", "reason", "num_records", "examples") == [
        ("a", "bad_record", 1, ["a/0: because of bad_record"]),
        (
            "a",
            "duplicate_id",
            1,
            ["x: an earlier record of the source has the same id (`data.duplicate_ids: keep` keeps both)"],
        ),
        ("b", "empty", 20, [f"r{row}: because of empty" for row in (1, 2, 4)]),
        ("b", "too_long", 10, [f"r{row}: because of too_long" for row in (0, 3, 6)]),
    ]
    assert rows_of(merge(("train", 0, [good(0, "a")])), "reject_summary", "reason") == []


def test_every_database_says_how_it_was_made(merge):
    meta = read_meta(merge(("train", 0, [good(0, "a")])), made_by="merge-shapes")
    assert meta["schema_version"] == str(SCHEMA_VERSION)
    assert meta["config_digest"] == "abc"
    assert {"dflop_version", "created"} <= set(meta)


def test_a_failed_merge_leaves_the_old_database_and_nothing_beside_it(merge, tmp_path):
    path = merge(("train", 0, [good(0, "a")]))
    before = sorted(tmp_path.iterdir())
    missing = ShardFile(tmp_path / "none.parquet", "none", "train", 0, 0)
    sources = read_table(path, "sources", made_by="merge-shapes")
    with pytest.raises(UserError, match=r"none\.parquet does not exist"):
        write_shapes(path, [missing], sources, {}, sampled_rows={}, keep_duplicates=False)
    assert sorted(tmp_path.iterdir()) == before
    assert rows_of(path, "samples", "sample_id") == [("a",)]


def refusal(path, table: str = "samples") -> str:
    with pytest.raises(UserError) as caught:
        read_table(path, table, made_by="merge-shapes")
    assert str(path) in str(caught.value)
    assert "`dflop merge-shapes`" in str(caught.value)
    return str(caught.value)


def test_a_missing_database_says_which_command_makes_it(tmp_path):
    assert "does not exist; make it with" in refusal(tmp_path / "shapes.duckdb")


def test_a_database_of_another_version_says_both_versions(merge, monkeypatch):
    path = merge(("train", 0, [good(0, "a")]))
    monkeypatch.setattr(database, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    assert f"has schema version {SCHEMA_VERSION}, this dflop writes {SCHEMA_VERSION + 1}" in refusal(path)


def test_shards_that_lack_a_column_say_what_to_run(merge, tmp_path):
    path = merge(("train", 0, [good(0, "a")]), ("train", 1, [good(0, "b")]))
    sources = read_table(path, "sources", made_by="merge-shapes")
    new, old = tmp_path / "shard-0.parquet", tmp_path / "shard-1.parquet"
    pl.read_parquet(old).drop("media_width").write_parquet(old)
    for paths in ([new, old], [old]):
        files = [ShardFile(path, path.stem, "train", start, start) for start, path in enumerate(paths)]
        with pytest.raises(UserError, match="make it again with `dflop profile-shapes --shard shard-1`") as caught:
            write_shapes(tmp_path / "again.duckdb", files, sources, {}, sampled_rows={}, keep_duplicates=False)
        assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_of_ours_is_refused(tmp_path):
    path = tmp_path / "shapes.duckdb"
    path.write_text("hello")
    assert "is not a dflop database" in refusal(path)
    path.unlink()
    duckdb.connect(str(path)).close()
    message = refusal(path)
    assert "is not a dflop database" in message
    assert "\n" not in message


def test_a_view_that_reads_another_file_is_refused(merge, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    path = merge(("train", 0, [good(0, "a")]))
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"CREATE OR REPLACE VIEW reject_summary AS FROM read_text('{tmp_path}/secret.txt')")
    assert "file system operations are disabled" in refusal(path, "reject_summary")


def test_a_database_without_the_table_says_so(merge):
    assert "Table with name time_model does not exist" in refusal(merge(("train", 0, [good(0, "a")])), "time_model")


def test_a_database_can_be_read_by_several_at_once(merge):
    path = merge(("train", 0, [good(0, "a")]))
    with duckdb.connect(str(path), read_only=True):
        assert len(read_table(path, "samples", made_by="merge-shapes")) == 1


def test_cost_tables_come_back_as_they_went_in(tmp_path):
    names = ("measurements", "time_model", "memory_model", "load_range", "fit_error", "device")
    frames = {name: pl.DataFrame({"name": [name], "value": [0.1]}) for name in names}
    write_costs(tmp_path / "costs.duckdb", frames, {"source": "measured"})
    for name in names:
        assert read_table(tmp_path / "costs.duckdb", name, made_by="fit-costs").equals(frames[name])


def test_ratios_are_measured_over_predicted_time_without_the_warm_up(tmp_path):
    rows = [
        ("llm", "forward", 9.0, 1.0, True),
        ("llm", "forward", 2.0, 1.0, False),
        ("llm", "forward", 4.0, 2.0, False),
    ]
    rows += [("llm", "sync", 1.0, None, False), ("vision", "backward", 3.0, 6.0, False)]
    schema = ["module", "pass", "seconds", "predicted_s", "warmup"]
    observations = pl.DataFrame(rows, schema=schema, orient="row")
    nothing = (schema.to_frame() for schema in (CORRECTIONS_SCHEMA, LEFT_OUT_SCHEMA, STEP_SECONDS_SCHEMA))
    write_observations(tmp_path / "o.duckdb", observations, *nothing, {})
    ratios = read_table(tmp_path / "o.duckdb", "measured_over_predicted", made_by="train")
    assert ratios.select("module", "pass", "num_observations", "ratio").rows() == [
        ("llm", "forward", 2, 2.0),
        ("llm", "sync", 1, None),
        ("vision", "backward", 1, 0.5),
    ]


def test_each_encoder_has_its_columns_and_without_encoders_texts_alone_are_left(merge, tiny_spec):
    text = {"num_items": 0, "vision_tokens": 0, "kept_vision_tokens": 0}
    records = [good(0, "text", **text), good(1, "both", num_audio_windows=2, kept_audio_tokens=50), good(2, "picture")]
    path = merge(("train", 0, records))
    (vision,) = tiny_spec.encoders
    samples, left_out = load_samples(path, (vision, replace(vision, name="audio", media=("audio",))))
    assert (samples.encoders, left_out) == (("vision", "audio"), {})
    assert samples.num_items.tolist() == [[0, 0], [5, 2], [5, 0]]
    assert samples.kept_by("audio").tolist() == [0, 50, 0]
    samples, left_out = load_samples(path, ())
    assert samples.sample_id.tolist() == ["text"]
    assert samples.num_items.shape == samples.kept_tokens.shape == (1, 0)
    assert sum(left_out.values()) == 2


def test_shapes_without_a_sample_to_train_on_point_to_the_rejects(merge, tiny_spec):
    with pytest.raises(UserError, match=r"no sample to train on \(1 with audio left out\); `from rejects`"):
        load_samples(merge(("train", 0, [good(0, "b", kept_audio_tokens=50), bad(1, "c")])), tiny_spec.encoders)


def test_sources_whose_records_are_all_rejected_give_an_empty_table_of_samples(merge):
    path = merge(("train", 0, [bad(0, "a")]), ("other", 0, []))
    assert rows_of(path, "samples", "sample_id") == []
    assert columns_of(path, "samples")[: len(SAMPLES)] == SAMPLES


def test_sources_without_any_record_are_refused(merge, tmp_path):
    sources = read_table(merge(("train", 0, [good(0, "a")])), "sources", made_by="merge-shapes")
    with pytest.raises(UserError, match=r"no manifest of `data\.sources` holds any record"):
        write_shapes(tmp_path / "empty.duckdb", [], sources, {}, sampled_rows={}, keep_duplicates=False)
