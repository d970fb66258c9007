"""What a rank holds in the host's memory to save and to export, and the peaks that it reports."""

import pytest
import torch
import torch.distributed as dist

from dflop.models.llava_onevision.runtime import RUNTIME
from dflop.models.tensor_group import ALONE
from dflop.step import Node
from dflop.train.adamw import Rates
from dflop.train.export import masters_of
from dflop.train.host_buffer import HostBuffer
from dflop.train.peak_memory import forget_peak, peak_memory
from dflop.train.rank_model import NodeModel
from dflop.train.sharded_optimizer import ShardedAdamW


def test_copies_are_equal_and_lie_in_one_buffer_that_is_hardly_larger_and_kept():
    values = [torch.randn(1000), torch.randn(3, 333).bfloat16(), torch.zeros(0), torch.arange(7.0).double()]
    buffer = HostBuffer()
    copies = buffer.copies_of(values)
    for own, copy in zip(values, copies, strict=True):
        assert copy.dtype == own.dtype
        assert torch.equal(copy, own)
    assert {copy.untyped_storage().data_ptr() for copy in copies} == {copies[0].untyped_storage().data_ptr()}
    assert buffer.num_bytes <= 1.1 * sum(own.nbytes for own in values)
    values[0].add_(1.0)
    assert not torch.equal(copies[0], values[0])
    assert buffer.copies_of(values)[0].data_ptr() == copies[0].data_ptr()
    assert torch.equal(copies[0], values[0])


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_only_the_first_replica_keeps_masters_for_the_export(dp_rank, tiny_spec, tokenizer):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = RUNTIME.make_config(tiny_spec, tokenizer.placeholder_ids, tokenizer.vocab_size())
        stage = RUNTIME.build_stage(config, "vision", layers=range(1), seed=0)
        optimizer = ShardedAdamW(
            list(stage.parameters()),
            dist.group.WORLD,
            rates=dict.fromkeys(stage.parameters(), Rates(1e-3, 0.0)),
            computed_in=torch.bfloat16,
        )
        own = NodeModel(
            index=0,
            node=Node("vision", 0, dp_rank),
            stage=stage,
            ranks=ALONE,
            optimizer=optimizer,
            parameters=stage.named_hf_parameters(),
            shards={},
            dtype=torch.bfloat16,
            overlaps=False,
        )
        masters = masters_of(own)
        trained = {name for name, parameter in own.parameters.items() if parameter.requires_grad}
        assert masters.keys() == (set() if dp_rank else trained)
        assert all(whole.dtype == torch.float32 for whole in masters.values())
    finally:
        dist.destroy_process_group()


def test_the_peak_of_a_gpu_is_what_is_reserved_and_outside_and_starting_up_is_forgotten(monkeypatch):
    bytes_of = {"memory_reserved": 30, "max_memory_reserved": 40, "max_memory_allocated": 25}
    for name, number in bytes_of.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    assert peak_memory(torch.device("cuda", 0)) == (50, 25)
    called = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append("reset"))
    forget_peak(torch.device("cuda", 0))
    assert called == ["empty_cache", "reset"]


def test_on_cpus_the_peak_is_the_process_s():
    held, allocated = peak_memory(torch.device("cpu"))
    assert held > 2**20
    assert allocated == 0
    forget_peak(torch.device("cpu"))


def test_memory_that_the_system_does_not_pin_is_used_unpinned_and_its_error_is_cleared(monkeypatch):
    class Refusing:
        def cudaHostRegister(self, *_):
            return 2

        def cudaHostUnregister(self, *_):
            raise AssertionError("this memory was never pinned")

    cleared = []
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr("dflop.train.host_buffer._clear_error", lambda: cleared.append(True))
    buffer = HostBuffer()
    buffer._allocate(8, is_pinned=True)
    buffer._allocate(16, is_pinned=True)
    assert buffer.num_bytes == 16
    assert cleared == [True, True]
