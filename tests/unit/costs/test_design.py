"""Points are spread over the range of the data, then go where fits disagree, and end when held-out stages agree."""

import dataclasses

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.costs import Loads
from dflop.costs.design import Design, LoadBounds, Point, bounds_of_samples, load_bounds
from dflop.models.loads import FEATURES, Coefficients, Hinge
from dflop.plan.layout_key import LayoutKey

BOUNDS = LoadBounds(num_items=(1, 64), num_tokens=(32, 4096), segment_tokens=(32, 1024), target_share=(0.03, 0.5))


def make_design(module="llm", num_layers=24, target_error=0.05, time_budget_s=600.0, bounds=BOUNDS, repeats=1):
    return Design(
        module, LayoutKey(), num_layers, bounds, repeats=repeats, target_error=target_error, time_budget_s=time_budget_s
    )


def run(design, model, noise=0.0, most=400, seed=0):
    """Measure as the design asks, on a device that costs what the model says; returns the points and their seconds."""
    rng = np.random.default_rng(seed)
    parameters = pl.DataFrame(
        [
            {"module": module, "tp": layout.tp, "part": part, "parameter_bytes": size}
            for (module, layout, part), size in model.parameter_bytes.items()
        ]
    )
    points, seconds, rows = [], [], []
    while len(points) < most and (asked := design.next(rows, parameters)) is not None:
        point, repeat = asked
        about = {"module": design.module, "tp": 1, "repeat": repeat, "peak_bytes": 2000, "saved_bytes": 1000}
        about["attention_s"] = None
        passes = {
            direction: seconds_of(model, design.module, point, direction) * float(np.exp(noise * rng.normal()))
            for direction in ("forward", "backward")
        }
        rows += [point.keys() | about | {"pass": direction, "seconds": taken} for direction, taken in passes.items()]
        points.append(point)
        seconds.append(sum(passes.values()))
        design.took(point, seconds[-1])
    return points, seconds


def seconds_of(model, module, point, direction):
    keys = point.keys()
    loads = Loads(*(np.array(float(keys[name])) for name in FEATURES))
    parts = {"layers": ("stage", "layer"), "whole": ("stage", "layer", "first", "last")}.get(
        point.piece, (point.piece,)
    )
    total = 0.0
    for part in parts:
        checkpointing = point.checkpointing and part in ("stage", "layer")
        count = point.num_layers if part == "layer" else 1
        total += count * float(model.times[module, LayoutKey(), part, checkpointing, direction](loads))
    return total


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_the_first_points_span_the_range_of_the_data_on_every_piece(costs, module):
    points, _ = run(make_design(module), costs)
    load, (low, high) = ("num_tokens", BOUNDS.num_tokens) if module == "llm" else ("num_items", BOUNDS.num_items)
    for piece in ("layers", "first", "last"):
        sizes = [getattr(point, load) for point in points if point.piece == piece]
        assert (min(sizes), max(sizes)) == (low, high)
    layers = [point for point in points if point.piece == "layers"]
    assert {(point.num_layers, point.checkpointing) for point in layers} == {
        (1, False),
        (4, False),
        (1, True),
        (4, True),
    }
    assert len(points) == len(set(points))


def test_text_is_measured_in_long_and_in_short_segments_with_few_and_many_targets(costs):
    points, _ = run(make_design(), costs)
    lengths = {point.segments[0] for point in points if point.piece == "layers" and point.num_tokens >= 1024}
    assert {32, 1024} <= lengths
    shares = {round(point.num_targets / point.num_tokens, 2) for point in points if point.piece == "last"}
    assert {0.03, 0.5} <= shares


def test_exact_measurements_end_soon(costs):
    design = make_design()
    points, _ = run(design, costs)
    assert len(points) < 80
    assert design.error[0] < 0.01


def test_noise_asks_for_more_points_and_held_out_stages_come_between_them(costs):
    design = make_design(target_error=0.01)
    points, _ = run(design, costs, noise=0.1, most=120)
    assert len(points) == 120
    whole = [point for point in points if point.piece == "whole"]
    assert len(whole) >= 25
    assert {point.num_layers for point in whole} <= {2, 3}  # depths that are not fitted
    assert {point.checkpointing for point in whole} == {False, True}


def test_held_out_stages_are_packed_from_unequal_segments_and_cover_all_sizes(costs):
    points, _ = run(make_design(target_error=1e-6), costs, noise=0.1, most=120)
    whole = [point for point in points if point.piece == "whole"]
    (low, high), (shortest, longest) = BOUNDS.num_tokens, BOUNDS.segment_tokens
    octaves = {int(np.log2(point.size / low)) for point in whole}
    assert octaves >= set(range(int(np.log2(high / low))))
    for point in whole:
        assert low <= point.num_tokens <= high
        assert max(point.segments) <= longest
        assert all(length >= shortest for length in point.segments[:-1])
    assert np.median([len(set(point.segments)) for point in whole if point.size > longest]) > 3


def test_what_would_not_fit_into_memory_is_not_asked_for(costs):
    def peak_bytes(point):
        return 1e6 * point.size * max(1, point.num_layers)

    room = 1e6 * 1500
    design = Design("llm", 1, 24, BOUNDS, repeats=1, target_error=1e-6, time_budget_s=600, room_bytes=room)
    asked = []
    for _ in range(45):
        point, _ = design.next([], None)
        asked.append(point)
        design.took(point, 1e-3, peak_bytes(point))
    assert max(map(peak_bytes, asked)) <= room
    sizes = {kind: max(point.size for point in asked if point[:2] == kind) for kind in (("layers", 1), ("layers", 4))}
    assert sizes["layers", 1] > 2 * sizes["layers", 4]
    assert any(point.piece == "whole" for point in asked)


def test_points_go_where_the_fits_disagree(costs):
    """A bend that the first points only hint at draws the next ones."""
    bent = Coefficients(1e-4, (0, 1e-6, 0, 0), (Hinge(1, 1500.0, 2e-5),))
    times = {key: bent if key[0] == "llm" and key[2] == "layer" else fit for key, fit in costs.times.items()}
    model = dataclasses.replace(costs, times=times)
    points, _ = run(make_design(target_error=1e-4), model, most=90)
    asked_later = [point.num_tokens for point in points[50:] if point.piece == "layers"]
    assert np.median(asked_later) > 700


def test_what_takes_too_long_is_not_exceeded(costs):
    design = make_design(time_budget_s=1.0)  # so that a run may take 50 ms
    points, seconds = run(design, costs, most=100)
    assert max(point.num_tokens for point in points if point[:2] == ("layers", 4)) < 4096
    assert max(point.num_tokens for point in points if point.piece == "first") > 2000
    assert sum(taken > 0.05 for taken in seconds) < 0.3 * len(points)
    for kind in {point[:3] for point in points if point.piece != "whole"}:
        assert len({point.num_tokens for point in points if point[:3] == kind}) >= 3, kind


def test_repeats_of_a_point_lie_apart(costs):
    design = make_design(repeats=3, target_error=1e-6)
    asked = [design.next([], None) for _ in range(60)]
    first, again = asked.index(next(entry for entry in asked if entry[1] == 1)), asked.index((asked[0][0], 1))
    assert first == again > 20
    assert [repeat for point, repeat in asked if point == asked[0][0]] == list(range(1 + 59 // again))


def test_a_point_that_runs_out_of_memory_ends_its_sizes():
    design, lost = make_design(), ("layers", 4, False)
    design.took(Point(*lost, segments=(512,)), None)
    points = [design.next([], None)[0] for _ in range(35)]
    assert max(point.num_tokens for point in points if point[:3] == lost) < 512
    assert max(point.num_tokens for point in points if point[:3] != lost) > 512


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9000), st.floats(0, 1)), min_size=1, max_size=50),
)
def test_bounds_hold_every_sample_and_are_powers_of_two(samples):
    items, tokens, shares = (np.array(column) for column in zip(*samples, strict=True))
    targets = (tokens * shares).astype(int)
    bounds = bounds_of_samples(items, tokens, targets)
    assert bounds.num_items[1] >= max(1, items.max())
    assert bounds.num_tokens[1] >= tokens.max()
    assert bounds.num_tokens[0] <= np.quantile(tokens, 0.05)
    for low, high in dataclasses.asdict(bounds).values():
        assert 0 < low <= high
        assert np.log2([low, high]).tolist() == np.round(np.log2([low, high])).tolist()


def test_a_little_more_data_leaves_the_bounds_as_they_are():
    rng = np.random.default_rng(0)
    items, tokens = rng.integers(0, 30, 1000), rng.integers(50, 3000, 1000)
    before = bounds_of_samples(items, tokens, tokens // 5)
    assert bounds_of_samples(items[:990], tokens[:990], tokens[:990] // 5) == before


def test_nothing_to_measure_after_gives_bounds_all_the_same():
    empty = np.zeros(0, dtype=int)
    assert bounds_of_samples(empty, empty, empty).num_items == (1, 8)


def test_data_with_one_picture_or_none_give_an_encoder_sizes_enough_for_a_fit():
    tokens = np.full(50, 40)
    for num_items in (np.zeros(50, dtype=int), np.eye(1, 50, dtype=int)[0]):
        bounds = bounds_of_samples(num_items, tokens, tokens // 4)
        design = make_design(module="vision", num_layers=2, bounds=bounds)
        points = set()
        while not design.is_covered:
            points.add(design.next([], None)[0])
        assert len({point.num_items for point in points if point.piece == "layers"}) >= 3


def test_bounds_come_back_from_their_file(tmp_path):
    path = tmp_path / "load_bounds.json"
    path.write_text(BOUNDS.to_json())
    assert load_bounds(path) == BOUNDS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "{}x",
        '{"num_items": [3, 1]}',
        '{"num_items": [0, 1]}',
        '{"items": [1, 2]}',
        '{"num_items": 4}',
        '{"num_tokens": [0.5, 10.7]}',
    ],
)
def test_a_file_that_holds_no_bounds_is_refused_with_the_command_that_writes_it(tmp_path, text):
    path = tmp_path / "load_bounds.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"load_bounds\.json holds no load bounds; `dflop merge-shapes` writes them"):
        load_bounds(path)
