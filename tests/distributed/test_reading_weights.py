"""Ranks that share modules and parameters each read their own part of a Hugging Face checkpoint."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import spawn
from stage_cases import part_of

from dflop.config import load_config
from dflop.models import family_names, load_model_spec, load_runtime
from dflop.plan import Grid, Plan
from dflop.shapes import ChatTokenizer
from dflop.step import make_program
from dflop.train.rank_model import build_rank_model
from dflop.train.topology import place_in_world

pytestmark = pytest.mark.serial

NUM_RANKS = 4


def _save(folder: Path, family: str) -> None:
    """A checkpoint of which no tensor is as it would be drawn, and its weights."""
    spec, runtime = load_model_spec(load_config({"model": {"family": family}}).model), load_runtime(family)
    tokenizer = ChatTokenizer(None, spec.rules)
    config = runtime.make_config(spec, tokenizer.placeholder_ids, tokenizer.vocab_size(spec.media))
    model = runtime.architecture(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    tokenizer.save(folder, spec.media)
    torch.save(dict(model.named_parameters()), folder / "weights.pt")


def _plan(tp: int) -> Plan:
    how = {"num_ranks": NUM_RANKS, "tp": tp, "sharding": "parameters"}
    grids = (Grid(module="vision", **how), Grid(module="llm", **how))
    return Plan(placement="monolithic", grids=grids, num_microbatches=1)


def _check(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=NUM_RANKS)
    for family in family_names():
        config = load_config({"model": {"family": family, "path": str(folder / family)}})
        whole = torch.load(folder / family / "weights.pt")
        for tp in (1, 2):
            plan = _plan(tp)
            topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
            model = build_rank_model(config, plan, topology, torch.float32)
            num_values = 0
            for own in model.nodes:
                for name, parameter in own.parameters.items():
                    part = part_of(whole[name], own.shards.get(name), parameter.shape).flatten()
                    for piece in own.optimizer.pieces(parameter):
                        theirs = part[piece.start :][: len(piece.masters)]
                        assert torch.equal(piece.masters, theirs), (family, tp, rank, name)
                        num_values += len(theirs)
            assert num_values < 0.35 * sum(tensor.numel() for tensor in whole.values())
    dist.destroy_process_group()


def test_ranks_that_share_modules_and_parameters_read_their_own_parts(tmp_path):
    for family in family_names():
        _save(tmp_path / family, family)
    spawn(_check, (tmp_path,), nprocs=NUM_RANKS)
