"""The config refuses what it does not understand, and says which key, which value and what would be right."""

import dataclasses
import json
import math
import operator
import re
import typing
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.config import Config, FixedPlan, SlurmConfig, excess_memory, load_config, require_known_memory, select_keys

REPOSITORY = Path(__file__).parents[2]
ANALYTIC = {
    "costs": {"source": "analytic"},
    "train": {"precision": "bf16"},
    "cluster": {"device_model": "h100-80g"},
}

SECTIONS = ["plan", "train", "data.video", "plan.fixed", "data.sources", "train.modules", "slurm.stages"]

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("${data.fps}"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def refusal(*layers) -> str:
    with pytest.raises(UserError) as caught:
        load_config(*layers)
    return str(caught.value)


def nested(key: str, value: object) -> dict:
    """`nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def leaf_keys(section: type, prefix: str = "") -> list[str]:
    """Every dotted key; those of a list's entries have `[]` after the list's name, of every module's `<module>`, of
    every rule's `<rule>`."""
    keys = []
    for name, hint in typing.get_type_hints(section).items():
        inner = [item for item in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(item)]
        # Modules that a plan pins stand beside its other keys.
        of_name = {FixedPlan: "<module>", SlurmConfig: f"{name}.<rule>"}.get(section, f"{name}.<module>")
        below = {list: f"{name}[]", dict: of_name}.get(typing.get_origin(hint), name)
        keys += leaf_keys(inner[0], f"{prefix}{below}.") if inner else [f"{prefix}{name}"]
    return keys


@pytest.mark.parametrize(
    ("config", "name", "way_out"),
    [
        ({"trian": {"lr": 1}}, "`trian`", "did you mean `train`?"),
        ({"train": {"learning_rate": 1}}, "`train.learning_rate`", "known here: global_batch_size, steps, epochs"),
        ({"train": {"step": 1}}, "`train.step`", "did you mean `train.steps`?"),
        ({"data": {"video": {"max_frame": 3}}}, "`data.video.max_frame`", "did you mean `data.video.max_frames`?"),
        ({"plan": {"fixed": {"num_microbatch": 2}}}, "`plan.fixed.num_microbatch`", "did you mean `plan.fixed.num_mic"),
        ({"plan": {"fixed": {"llm": {"ranks": 2}}}}, "`plan.fixed.llm.ranks`", "known here: tp, pp, dp"),
        ({"plan": {"today": {"llm": {"ranks": 2}}}}, "`plan.today.llm.ranks`", "known here: tp, pp, dp"),
        (
            {"data": {"sources": [{"path": "a.json"}, {"pth": "b.json"}]}},
            "`data.sources[1].pth`",
            "did you mean `data.sources[1].path`?",
        ),
        ({1: 2}, "`1`", "known here: run, seed"),
        ({"train": {"a\nb": 1}}, "`train.a\\nb`", "known here: global_batch_size, steps"),
    ],
)
def test_an_unknown_key_is_named_in_full_with_what_was_probably_meant(config, name, way_out):
    message = refusal(config)
    assert f"unknown key {name}" in message
    assert way_out in message


@pytest.mark.parametrize("steps", ["1e3", "1.0E3", "1000.0", "1_000"])
def test_a_whole_number_may_be_written_as_yaml_reads_a_float_or_text(steps, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"train: {{steps: {steps}}}")
    for layer in (path, f"train.steps={steps}"):
        assert load_config(layer).train.steps == 1000


def test_an_unknown_key_is_reported_with_the_file_that_holds_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("train: {lrr: 1}")
    assert f"{path}: unknown key `train.lrr` (value 1)" in refusal(path)


def test_a_wrong_value_is_reported_with_the_last_layer_that_has_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("train: {steps: 0, lr: 1}")
    assert f"{path}: `train.steps` is 0" in refusal({"train": {"steps": 3}}, path, "train.lr=2")
    assert "'train.steps=-1': `train.steps` is -1" in refusal(path, "train.steps=-1")
    path.write_text("plan: {fixed: {llm: {dp: 0}}}")
    assert f"{path}: `plan.fixed.llm.dp` is 0" in refusal(path, {"plan": {"fixed": {}}})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("train.steps", 1.5, "a whole number"),
        ("train.steps", "many", "a whole number"),
        ("seed", math.inf, "a whole number"),
        (
            "plan.fixed.llm",
            3,
            "hold the keys tp, pp, dp, sharding, cp if it is a module; other keys here are placement",
        ),
        ("plan.fixed.modules", 2, "hold the keys tp, pp, dp, sharding, cp if it is a module"),
        ("train.steps", True, "a whole number"),
        ("train.steps", [3], "a whole number"),
        ("train.lr", "fast", "a number"),
        ("train.lr", {"a": 1}, "a number"),
        ("plan.fixed.checkpointing", "maybe", "true or false"),
        ("plan.fixed.vision.tp", "x", "a whole number"),
        ("plan.today.vision.tp", "x", "a whole number"),
        ("run", ["a"], "a text"),
        ("model.path", ["a"], "a text"),
        ("model.freeze", "vision", "a list"),
        ("model.freeze", {"vision": True}, "a list"),
        ("train", "x", "the keys global_batch_size, steps"),
        ("train", [1], "the keys global_batch_size, steps"),
        ("data.sources", {"path": "x"}, "a list, each entry with path, media_root"),
    ],
)
def test_a_wrong_type_names_the_key_the_value_and_the_type(key, value, wanted):
    message = refusal(nested(key, value))
    assert f"`{key}` is {value!r}; it must " in message
    assert wanted in message


def test_a_wrong_type_in_a_list_names_the_entry():
    assert "`costs.tp_sizes[1]` is 'two'; it must be a whole number" in refusal({"costs": {"tp_sizes": [1, "two"]}})
    assert "`data.sources[0]` is null; it must hold the keys path" in refusal({"data": {"sources": [None]}})


@pytest.mark.parametrize(
    ("key", "wanted"), [("train.lr", "be a number"), ("data", "hold the keys sources, max_samples")]
)
def test_null_where_something_must_stand_says_so(key, wanted):
    assert f"`{key}` is null; it must {wanted}" in refusal(nested(key, None))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("train.steps", 0, "at least 1"),
        ("data.max_llm_tokens", -5, "at least 1"),
        ("plan.fixed.llm.dp", 0, "at least 1"),
        ("plan.today.llm.dp", 0, "at least 1"),
        ("train.lr", 0.0, "above 0"),
        ("train.lr", float("nan"), "above 0"),
        ("train.lr", float("inf"), "above 0 and finite"),
        ("data.video.fps", -1.0, "above 0"),
        ("seed", -1, "0 or more"),
        ("train.weight_decay", -0.1, "0 or more"),
        ("model.lora.rank", 0, "at least 1"),
        ("model.lora.dropout", 1.0, "0 or more, and below 1"),
    ],
)
def test_an_impossible_number_names_the_key_the_value_and_the_bound(key, value, wanted):
    assert f"`{key}` is {value}; it must be {wanted}" in refusal(nested(key, value))


def test_an_impossible_number_in_a_list_names_the_entry():
    assert "`costs.tp_sizes[1]` is 0; it must be at least 1" in refusal({"costs": {"tp_sizes": [1, 0]}})
    assert "`train.betas[1]` is 1.0; it must be 0 or more, and below 1" in refusal({"train": {"betas": [0.9, 1.0]}})
    assert "`train.betas` is [0.9]; it must hold two values" in refusal({"train": {"betas": [0.9]}})
    assert "`costs.tp_sizes[0]` is [1]" in refusal({"costs": {"tp_sizes": [[1]]}})


@pytest.mark.parametrize("size", [0, 3, -2, 6])
def test_samples_are_shared_by_powers_of_two(size):
    wanted = "it must be a power of two: 1, 2, 4, 8, …"
    assert f"`plan.cp_sizes[1]` is {size}; {wanted}" in refusal({"plan": {"cp_sizes": [1, size]}})
    assert f"`plan.fixed.llm.cp` is {size}; {wanted}" in refusal({"plan": {"fixed": {"llm": {"cp": size}}}})


def test_only_the_llm_of_what_is_planned_shares_samples():
    assert "`plan.fixed.vision.cp` is 2, but only the LLM has it" in refusal({"plan": {"fixed": {"vision": {"cp": 2}}}})
    message = refusal({"plan": {"today": {"llm": {"cp": 2}}}})
    assert "`plan.today.llm.cp` is 2, but today's layout is priced without" in message
    load_config({"plan": {"today": {"llm": {"cp": 1}}, "fixed": {"llm": {"cp": 4}}}})


@pytest.mark.parametrize("key", ["costs.tp_sizes", "plan.placements", "model.lora.targets"])
def test_a_list_that_needs_a_value_may_not_be_empty(key):
    assert f"`{key}` is empty" in refusal(nested(key, []))


@pytest.mark.parametrize("run", ["", "../up", "a/b", ".hidden", "with space", "a\n", "$(b)", "a'b", "a`b`"])
def test_a_run_name_that_is_no_folder_name_is_refused(run):
    assert f"`run` is {run!r}" in refusal({"run": run})


@pytest.mark.parametrize(
    "sampling", ["firs:3", "first:", "first:-1", "30%", "random:x%", "first:0", "end:0%", "random:0.00%", "first:1.5"]
)
def test_an_unknown_sampling_lists_the_forms(sampling):
    message = refusal({"data": {"sources": [{"path": "a.json", "sampling": sampling}]}})
    assert f"`data.sources[0].sampling` is {sampling!r}" in message
    assert "first:30%" in message


@pytest.mark.parametrize(
    "sampling", ["all", "first:30%", "first:1000", "end:5", "random:12.5%", "first:0.05%", "end:10"]
)
def test_every_documented_sampling_is_accepted(sampling):
    source = load_config({"data": {"sources": [{"path": "a.json", "sampling": sampling}]}}).data.sources[0]
    assert source.sampling == sampling


def test_a_source_without_a_path_is_refused():
    assert "`data.sources[1].path` is empty" in refusal({"data": {"sources": [{"path": "a"}, {"name": "b"}]}})


@pytest.mark.parametrize(
    ("key", "value", "choices"),
    [
        ("schedule.policy", "lptt", "by_length, ilp, lpt, random, search"),
        ("plan.fixed.schedule", "zb", "gpipe, interleaved_1f1b, 1f1b"),
        ("plan.fixed.placement", "apart", "bubble_filled, colocated, disjoint, monolithic"),
        ("plan.today.placement", "apart", "bubble_filled, colocated, disjoint, monolithic"),
        ("train.precision", "fp8", "fp32, bf16, fp64"),
        ("cluster.device", "tpu", "cpu, cuda"),
    ],
)
def test_a_closed_choice_lists_its_values(key, value, choices):
    assert f"`{key}` is {value!r}; it must be one of {choices}" in refusal(nested(key, value))


def test_a_schedule_that_was_removed_is_told_from_one_that_never_was():
    said = refusal({"plan": {"schedules": ["1f1b", "zb_h1"]}})
    assert "`plan.schedules[1]` is 'zb_h1', which was removed; it must be one of gpipe, interleaved_1f1b, 1f1b" in said


@pytest.mark.parametrize("choice", ["off", "on", "auto"])
def test_correction_is_chosen_by_its_name_though_yaml_takes_two_of_them_for_truths(tmp_path, choice):
    path = tmp_path / "config.yaml"
    path.write_text(f"schedule: {{correction: {choice}}}\n")
    assert load_config(path).schedule.correction == choice
    assert load_config({"schedule": {"correction": choice}}).schedule.correction == choice


def test_deterministic_schedules_follow_no_measured_times():
    assert load_config({"schedule": {"deterministic": True}}).schedule.correction == "off"
    message = refusal({"schedule": {"deterministic": True, "correction": "on"}})
    assert "`schedule.correction` is 'on' and `schedule.deterministic` true" in message


def test_a_length_is_given_in_steps_or_in_epochs():
    assert load_config().train.steps == 20
    assert load_config({"train": {"steps": 7}}).train.epochs is None
    by_epochs = load_config({"train": {"epochs": 0.5}}).train
    assert (by_epochs.steps, by_epochs.epochs) == (None, 0.5)
    assert load_config({"train": {"steps": 7}}, {"train": {"steps": None, "epochs": 2}}).train.steps is None
    with pytest.raises(UserError, match=r"`train.steps` is 7 and `train.epochs` is 2; .* give one of them, and null"):
        load_config({"train": {"steps": 7, "epochs": 2}})
    with pytest.raises(UserError, match=r"`train.epochs` is 0.0; it must be above 0"):
        load_config({"train": {"epochs": 0}})


def test_an_evaluation_needs_samples():
    with pytest.raises(UserError, match=r"`train.evaluate_every` is 5, but there is nothing to evaluate on"):
        load_config({"train": {"evaluate_every": 5}})
    source = {"path": "a.json", "evaluation": True}
    for data in ({"evaluation_share": 0.1}, {"sources": [source]}):
        assert load_config({"data": data, "train": {"evaluate_every": 5}}).data.has_evaluation


def test_weights_of_sources_are_for_all_that_are_trained_on_or_for_none():
    def of(*sources):
        return load_config({"data": {"sources": [{"path": f"{n}.json"} | source for n, source in enumerate(sources)]}})

    assert of({"weight": 1}, {"weight": 0.5}, {"evaluation": True}).data.sources[1].weight == 0.5
    with pytest.raises(UserError, match=r"has a `weight` for 1\.json and none for 0\.json;.*every source one, or none"):
        of({}, {"weight": 1})
    with pytest.raises(UserError, match=r"`weight: 1` and `epochs: 2` for 0\.json; give one of them"):
        of({"weight": 1, "epochs": 2})
    with pytest.raises(UserError, match=r"`data\.sources\[0\]\.weight` is 0.0; it must be above 0"):
        of({"weight": 0})
    with pytest.raises(UserError, match=r"data\.sources\[0\]\.columns.*picture.*must be one of"):
        of({"columns": {"picture": "image"}})


def test_a_fixed_plan_may_not_need_more_devices_than_there_are():
    fixed = {"placement": "disjoint", "vision": {"dp": 2}, "llm": {"pp": 2, "dp": 2}}
    message = refusal({"plan": {"fixed": fixed}, "cluster": {"num_nodes": 1, "devices_per_node": 4}})
    assert "`plan.fixed` needs 6 devices (each module its own)" in message
    assert "`cluster` has 4 (1 x 4)" in message
    load_config({"plan": {"fixed": fixed}, "cluster": {"num_nodes": 3, "devices_per_node": 2}})


def test_todays_layout_may_be_of_other_devices_but_has_no_more_microbatches_than_samples():
    load_config({"plan": {"today": {"llm": {"tp": 2, "dp": 4}}}, "cluster": {"devices_per_node": 4}})
    many = {"num_microbatches": 99}
    assert "`plan.today.num_microbatches` is 99, more than the" in refusal({"plan": {"today": many}})


def test_modules_that_may_share_devices_need_no_more_than_the_llm():
    fixed = {"llm": {"pp": 2, "dp": 2}}
    load_config({"plan": {"fixed": fixed}, "cluster": {"devices_per_node": 4}})
    assert "`plan.fixed` needs 4 devices, but" in refusal(
        {"plan": {"fixed": fixed}, "cluster": {"devices_per_node": 3}}
    )


def test_a_cluster_needs_a_device_for_each_module():
    one = {"cluster": {"devices_per_node": 1}}
    message = refusal(one, {"plan": {"placements": ["disjoint"]}})
    assert "`cluster` has 1 device, but in disjoint plans the encoder and the LLM have devices of their own" in message
    load_config({"cluster": {"num_nodes": 2, "devices_per_node": 1}})
    load_config(one)  # where they may share a device, one is enough


def test_analytic_costs_are_those_of_bf16():
    assert "set `train.precision: bf16`" in refusal({"costs": {"source": "analytic"}})
    load_config(ANALYTIC)


def test_analytic_costs_need_a_device_with_a_data_sheet():
    message = refusal(ANALYTIC, {"cluster": {"device_model": "cpu"}})
    assert (
        "`cluster.device_model` is 'cpu', a device of which no data sheet is known; choose one of a100-80g" in message
    )
    assert "`cluster.device_models`" in message


def test_devices_have_the_memory_of_their_data_sheet_unless_the_config_says_otherwise(tmp_path):
    def memory_gib(**cluster: object) -> float:
        return load_config({"cluster": cluster}).cluster.memory_gib

    assert memory_gib(device_model="h100-80g") == 80e9 / 2**30
    assert memory_gib(device_model="h100-80g", memory_gib=60) == 60
    assert memory_gib() == memory_gib(device_model="the big one") == 4
    sheets = tmp_path / "own.yaml"
    sheets.write_text(
        (files("dflop.base") / "devices.yaml").read_text().replace("h200-141g", "mine").replace("80e9", "60e9")
    )
    assert memory_gib(device_model="mine", device_models=str(sheets)) == 141e9 / 2**30
    assert memory_gib(device_model="h100-80g", device_models=str(sheets)) == 60e9 / 2**30
    assert "nowhere.yaml (`cluster.device_models` names it) cannot be read" in refusal(
        {"cluster": {"device_models": "nowhere.yaml"}}
    )


def test_links_are_as_fast_as_the_device_models_unless_the_config_says_otherwise(tmp_path):
    def gbps(**cluster: object) -> tuple[float, float]:
        loaded = load_config({"cluster": cluster}).cluster
        return loaded.intra_node_gbps, loaded.inter_node_gbps

    # NVLink 4: 900 GB/s, half of it each way; a 400-Gbit/s card for each device.
    assert gbps(device_model="h100-80g") == (3600, 400)
    assert gbps(device_model="h100-80g", inter_node_gbps=100) == (3600, 100)
    assert gbps() == gbps(device_model="the big one") == (100, 50)
    sheets = tmp_path / "own.yaml"
    known = (files("dflop.base") / "devices.yaml").read_text().replace("h200-141g", "mine")
    sheets.write_text("".join(line for line in known.splitlines(keepends=True) if "network" not in line))
    assert gbps(device_model="mine", device_models=str(sheets)) == (3600, 50)


def test_more_memory_than_the_data_sheet_says_is_refused_with_analytic_costs():
    message = refusal(ANALYTIC, {"cluster": {"memory_gib": 90}})
    assert "`cluster.memory_gib` is 90, more than the 80 that the data sheet of `cluster.device_model` " in message
    # 80 GB may be 80 GiB.
    assert load_config(ANALYTIC, {"cluster": {"memory_gib": 80}}).cluster.memory_gib == 80
    # Measured costs are of a device that is there, whatever its name.
    measured = load_config({"cluster": {"device_model": "h100-80g", "memory_gib": 90}}).cluster
    assert "90, more than the 80" in excess_memory(measured)
    assert excess_memory(load_config().cluster) is None


def test_a_module_that_is_not_pinned_still_needs_a_device_of_its_own():
    plan = {"placements": ["disjoint"], "fixed": {"llm": {"dp": 2}}}
    assert "needs 3 devices" in refusal({"plan": plan, "cluster": {"devices_per_node": 2}})


def test_a_null_takes_away_a_module_that_an_earlier_layer_pins():
    pinned = {"plan": {"fixed": {"vision": {"dp": 2}, "llm": {"tp": 1}}}}
    fixed = load_config(pinned, "plan.fixed.vision=null").plan.fixed
    assert fixed == load_config({"plan": {"fixed": {"llm": {"tp": 1}}}}).plan.fixed
    assert load_config(pinned, "plan.fixed.vision=null", {"plan": {"fixed": {"vision": {"pp": 1}}}}).plan.fixed == (
        load_config({"plan": {"fixed": {"vision": {"pp": 1}, "llm": {"tp": 1}}}}).plan.fixed
    )
    assert load_config(pinned, "plan.fixed=null").plan.fixed is None


def test_more_microbatches_than_samples_are_refused():
    message = refusal({"plan": {"fixed": {"num_microbatches": 9}}, "train": {"global_batch_size": 8}})
    assert "`plan.fixed.num_microbatches` is 9, more than the 8 samples" in message


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "x${oc.env:HOME,${seed}}"])
def test_a_config_that_asks_for_the_environment_is_refused(text):
    """What it says would be kept in the run's folder."""
    message = (
        "`data.sources[0].path`: Unsupported interpolation type oc.env; `${…}` may name the config's own keys alone"
    )
    assert message in refusal({"data": {"sources": [{"path": text}]}})
    assert load_config({"run": "a", "data": {"sources": [{"path": "x:${run}"}]}}).data.sources[0].path == "x:a"


def test_a_reference_that_leads_nowhere_names_the_key_that_holds_it():
    assert "`run`: Interpolation key 'nowhere' not found" in refusal({"run": "${nowhere}"})
    assert "`run`: no viable alternative at input '${'" in refusal({"run": "${"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("run: [1, 2", "is not YAML"),
        ("- run", "holds a list; it must hold `key: value` pairs"),
        ("just words", "holds a str"),
        ("run: demo\nrun : !!python/object:os.system {}", "is not YAML"),
    ],
)
def test_a_file_that_holds_no_config_is_named(tmp_path, text, complaint):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = refusal(path)
    assert f"config file {path} {complaint}" in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: caf\xe9")
    assert "cannot be read" in refusal(tmp_path / "latin.yaml")


def test_what_anchors_stand_for_may_be_held_beside_the_keys(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("x-rates: &rates {lr: 0.5}\ntrain: {<<: *rates, steps: 7}\n")
    train = load_config(path).train
    assert (train.lr, train.steps) == (0.5, 7)


@pytest.mark.parametrize(
    ("time", "is_one"), [("90", True), ("24h", True), ("2d", True), ("0h", False), ("24:00", False)]
)
def test_a_time_limit_is_minutes_or_has_its_unit(time, is_one):
    layer = {"slurm": {"stages": {"train": {"time": time}}}}
    if is_one:
        assert load_config(layer).slurm.stages["train"].time == time
    else:
        assert "`slurm.stages.train.time`" in refusal(layer)


def test_options_of_slurm_are_quoted_as_for_a_shell():
    assert load_config({"slurm": {"extra": "--wckey='a b'"}}).slurm.extra == "--wckey='a b'"
    assert refusal({"slurm": {"extra": "--wckey='a"}}) == (
        'config: `slurm.extra` is "--wckey=\'a": no closing quotation; quote it as for a shell'
    )


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "empty.yaml") == load_config() == load_config()


@pytest.mark.parametrize(
    "layer",
    [
        ' {"train": {"lr": 0.5, "steps": 7}}',
        "{train: {lr: 5e-1, steps: 7}}",
        {"train": {"lr": 0.5, "steps": 7}},
        {"train.lr": "5e-1", "train": {"steps": 7, "lr": 3}},
    ],
    ids=["JSON", "YAML", "mapping", "dotted keys"],
)
def test_a_layer_may_be_given_in_several_forms(layer):
    train = load_config(layer).train
    assert (train.lr, train.steps) == (0.5, 7)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.lr=1e-3", lambda c: c.train.lr, 1e-3),
        ("seed=3", lambda c: c.seed, 3),
        ("schedule.correction=on", lambda c: c.schedule.correction, "on"),
        ("costs.tp_sizes=[1, 2]", lambda c: c.costs.tp_sizes, [1, 2]),
        ("costs.tp_sizes=[1,2]", lambda c: c.costs.tp_sizes, [1, 2]),
        (" train.lr = 0.5 ", lambda c: c.train.lr, 0.5),
        ("data.sources=[{path: x}]", lambda c: [source.path for source in c.data.sources], ["x"]),
        ("plan.fixed.llm={dp: 2}", lambda c: c.plan.fixed.modules["llm"].dp, 2),
        ("model.path=a=b", lambda c: c.model.path, "a=b"),
        ("cluster.memory_gib=", lambda c: c.cluster.memory_gib, 4.0),
    ],
)
def test_a_layer_may_be_one_key_with_its_value(override, read, value):
    assert read(load_config(override)) == value


def test_a_single_key_goes_over_earlier_layers_and_leaves_other_keys_alone():
    train = load_config({"train": {"lr": 0.5, "steps": 7}}, "train.lr=0.1").train
    assert (train.lr, train.steps) == (0.1, 7)


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        ('{"train": ', "config text is neither JSON nor YAML"),
        ("train.lr=[1", "config text 'train.lr=[1': the value is not YAML"),
        ("train.stepz=3", "unknown key `train.stepz` (value 3); did you mean `train.steps`?"),
        ("train.lr=fast", "`train.lr` is 'fast'; it must be a number"),
        ("train.lr.high=1", "`train.lr` is {'high': 1}; it must be a number"),
        ({"train": 3, "train.lr": 1}, "`train.lr` cannot be set: `train` is 3, which holds no keys"),
        ("nowhere.yaml", "config file nowhere.yaml does not exist"),
        ("train: {lr: 0.1}", "config text 'train: {lr: 0.1}' must stand in braces: {train: {lr: 0.1}}"),
        ("runs/lr=1.yaml", "config file runs/lr=1.yaml does not exist"),
        ("train.global-batch-size=3", "unknown key `train.global-batch-size` (value 3); did you mean"),
        *(
            (
                f"{key}=x",
                f"`{key}` is one entry of the list `data.sources`, which can be given as a whole only: data.sou",
            )
            for key in ("data.sources[0].path", "data.sources[0]", "data.sources.0.path")
        ),
    ],
)
def test_a_text_that_is_no_config_is_refused(layer, complaint):
    message = refusal(layer)
    assert complaint in message
    assert "\n" not in message


def test_a_file_is_a_file_though_its_name_looks_like_a_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=1.yaml").write_text("seed: 4")
    assert load_config("lr=1.yaml").seed == 4


def test_later_layers_win_key_by_key_and_lists_are_replaced_whole(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text("train: {lr: 0.1, steps: 7}\ndata: {sources: [{path: a.json}, {path: b.json}]}")
    config = load_config(path, '{"train": {"lr": 0.2}, "data": {"sources": [{"path": "c.json"}]}}', {"seed": 3})
    assert (config.train.lr, config.train.steps, config.seed) == (0.2, 7, 3)
    assert [source.path for source in config.data.sources] == ["c.json"]
    assert load_config({"train": {"lr": 0.2}}, path).train.lr == 0.1


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config().train.lr = 1.0


@settings(max_examples=150)
@given(key=st.sampled_from([*leaf_keys(Config), *SECTIONS]), value=any_json)
def test_whatever_stands_at_a_key_is_taken_or_refused_with_a_message_of_one_line(key, value):
    path, _, entry = key.partition("[].")
    config = nested(path, [nested(entry, value)] if entry else value)
    try:
        loaded = load_config(config)
    except UserError as error:
        message = str(error)
    else:
        message = path
        assert load_config(select_keys(loaded, [item.name for item in dataclasses.fields(Config)])) == loaded
    assert path.split(".")[0] in message
    assert "\n" not in message.replace(repr(value), "")


@pytest.mark.parametrize(
    "path",
    # Recipes have a test of their own.
    sorted(path for path in (REPOSITORY / "config").rglob("*.yaml") if path.parent.name != "recipes"),
    ids=lambda path: path.name if path else None,
)
def test_every_config_that_ships_is_valid_over_the_demos(path):
    load_config(REPOSITORY / "config" / "config.yaml", path)


def test_the_config_that_all_are_merged_over_sets_the_data_and_nothing_else():
    base = load_config(REPOSITORY / "config" / "config.yaml")
    assert base == load_config({"data": {"sources": [dataclasses.asdict(source) for source in base.data.sources]}})


def test_every_key_is_documented():
    """The page names a key as `` `train.lr` ``, one in a list's entries as `` `data.sources[].path` ``.

    A small section may stand in one line with its keys as a mapping: `` `plan.fixed.<module>` … `{tp: 1, …}` ``.
    """
    lines = (REPOSITORY / "config" / "README.md").read_text(encoding="utf-8").splitlines()

    def is_documented(key: str) -> bool:
        section, _, name = key.rpartition(".")
        return any(f"`{key}`" in line or (f"`{section}`" in line and f"{name}: " in line) for line in lines)

    assert [key for key in leaf_keys(Config) if not is_documented(key)] == []


def default_of(key: str) -> object:
    """What the code gives a key that is not in a list."""
    section, (*sections, name) = Config, key.split(".")
    for inner in sections:
        hint = typing.get_type_hints(section)[inner]
        section = next(kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind))
    (field,) = (field for field in dataclasses.fields(section) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def test_the_documented_defaults_are_those_of_the_code():
    """A default stands in backticks, or as null; cells in words say what is found out instead."""
    text = (REPOSITORY / "config" / "README.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| (?:`([^`]+)`|null) \|", text, re.MULTILINE))
    assert len(documented) > 70
    for key, cell in documented.items():
        # What is null may be filled in while the config is loaded; what is not may be null until then.
        default = operator.attrgetter(key)(load_config()) if cell else default_of(key)
        read = float if isinstance(default, float) else yaml.safe_load  # YAML takes 1e-4 for a text
        assert (read(cell) if cell else None) == default, key


def test_the_documentation_names_no_key_that_does_not_exist():
    pages = [REPOSITORY / "config" / "README.md", REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    sections = "|".join(item.name for item in dataclasses.fields(Config) if item.name not in ("run", "seed"))
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.\[\]]+)`", text))
    known = set(leaf_keys(Config))
    parents = {key.rsplit(".", depth)[0].removesuffix("[]") for key in known for depth in range(1, key.count(".") + 1)}
    files = {name for name in named if name.endswith((".yaml", ".json", ".parquet", ".duckdb", ".md"))}
    assert named - files <= known | parents


def test_selected_keys_are_plain_and_load_again():
    config = load_config(
        {"data": {"sources": [{"path": "a.json"}]}, "train": {"lr": 0.5}, "plan": {"fixed": {"llm": {"pp": 2}}}}
    )
    part = select_keys(config, ["seed", "train.lr", "data.sources", "data.video", "plan.fixed"])
    assert part == {
        "seed": 0,
        "train": {"lr": 0.5},
        "data": {
            "sources": [
                {"path": "a.json", "media_root": None, "sampling": "all", "name": None}
                | {"trust_sizes": False, "evaluation": False, "columns": {}, "epochs": None, "weight": None}
            ],
            "video": {"fps": 1.0, "max_frames": 32},
        },
        "plan": {
            "fixed": {"llm": {"tp": None, "pp": 2, "dp": None, "sharding": None, "cp": None}}
            | dict.fromkeys(("placement", "num_microbatches", "checkpointing", "schedule"))
        },
    }
    assert load_config(json.dumps(part)) == config


def test_measured_costs_are_of_the_layers_that_train():
    assert "measured costs are those of the layers that train" in refusal({"costs": {"implementation": "compiled"}})
    analytic = {"costs": {"source": "analytic", "implementation": "compiled"}, "train": {"precision": "bf16"}}
    load_config({"cluster": {"device": "cuda", "device_model": "a800-80g"}} | analytic)


@pytest.mark.parametrize(
    ("source", "device", "implementation", "compiles", "layers"),
    [
        ("analytic", "cuda", "auto", "auto", "compiled"),
        ("analytic", "cuda", "auto", "on", "compiled"),
        ("analytic", "cuda", "auto", "off", "eager"),
        ("analytic", "cuda", "eager", "auto", "eager"),
        ("analytic", "cuda", "compiled", "off", "compiled"),
        ("analytic", "cpu", "auto", "auto", "compiled"),  # a machine without a GPU plans for GPUs
        ("measured", "cuda", "eager", "auto", "compiled"),
        ("measured", "cpu", "auto", "auto", "eager"),
        ("measured", "cpu", "auto", "on", "compiled"),
    ],
)
def test_costs_are_of_layers_made_as_training_makes_them(source, device, implementation, compiles, layers):
    config = load_config(
        {
            "cluster": {"device": device, "device_model": "h100-80g"},
            "costs": {"source": source, "implementation": implementation},
            "train": {"precision": "bf16", "compile": compiles},
        }
    )
    assert config.layers_of_costs == layers


def test_plans_are_refused_for_gpus_of_unknown_memory_alone():
    require_known_memory(load_config({}).cluster)
    with pytest.raises(UserError, match=r"need `cluster\.device_model`, such as h100-80g, or `cluster\.memory_gib`"):
        require_known_memory(load_config({"cluster": {"device": "cuda"}}).cluster)
    for known in ({"memory_gib": 40}, {"device_model": "h100-80g"}):
        require_known_memory(load_config({"cluster": {"device": "cuda"} | known}).cluster)
