"""Ranks that act as one agree on what does not fit, where one runs out of memory between their collectives."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import spawn

from dflop.costs.design import Point
from dflop.costs.measure import Bench
from dflop.models.llava_onevision import PRESETS, make_spec
from dflop.models.tensor_group import TensorGroup
from dflop.shapes import ChatTokenizer

pytestmark = pytest.mark.serial

POINT = Point("first", 0, False, num_items=2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict[str, list[dict]]]:
    """What each of two ranks says of a point while rank 1 runs out of memory, and afterwards."""
    folder = tmp_path_factory.mktemp("memory")
    spawn(_measure, (folder,), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def _measure(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    tokenizer = ChatTokenizer(None)
    bench = Bench(
        make_spec("tiny", PRESETS["tiny"]),
        "vision",
        1,
        placeholder_ids=tokenizer.placeholder_ids,
        vocab_size=tokenizer.vocab_size(),
        device=torch.device("cpu"),
        precision="fp32",
        ranks=TensorGroup((0, 1), rank, dist.group.WORLD),
    )
    embeddings = next(part for name, part in bench.stage.named_modules() if name.endswith("embeddings"))
    takes_too_much = embeddings.register_forward_pre_hook(
        lambda *_: (torch.empty(1 << 52 if rank == 1 else 1, dtype=torch.uint8), None)[1]
    )
    said = {"while": bench.measure(POINT, 0)}
    takes_too_much.remove()
    said["after"] = bench.measure(POINT, 1)
    measure_bytes, peaks = bench._bytes, iter((100, 101) if rank == 0 else (101, 100))
    bench._bytes, bench._largest = lambda run: (measure_bytes(run)[0], next(peaks)), None
    for num_items in (2, 3):
        bench.measure(POINT._replace(num_items=num_items), 0)
    said["largest"] = bench._largest[0].num_items
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def test_what_one_rank_cannot_hold_is_out_of_memory_on_all(measured):
    for rank in measured:
        assert [row["seconds"] for row in rank["while"]] == [None, None]
        assert [row["peak_bytes"] for row in rank["while"]] == [None, None]


def test_ranks_agree_on_the_point_that_took_most_though_each_saw_another(measured):
    """They run it once more, together: with different ones their collectives would not match."""
    first, second = (rank["largest"] for rank in measured)
    assert first == second


def test_measuring_goes_on_afterwards_with_one_result_for_all_ranks(measured):
    first, second = ([row["seconds"] for row in rank["after"]] for rank in measured)
    assert min(first) > 0
    assert first == second
