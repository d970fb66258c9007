"""Messages as NCCL has them: the host goes on before they have come, and only what reads their values waits.

gloo's `wait` blocks the host, so a place that takes a message's wait for its arrival goes unnoticed on CPUs. A rank may
also ask which samples another could not decode before that one has decoded any. So here the word comes as late as it
may: once a rank has asked for it.
"""

import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_plans import PLANS
from layouts import check
from processes import spawn
from test_layouts import prepare  # noqa: F401  (a fixture)
from torch.multiprocessing import ProcessRaisedException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflop.plan import Plan
from dflop.step import Node
from dflop.train import node_work
from dflop.train.undecodable import Undecodable, _key

pytestmark = pytest.mark.serial

CASES = [
    ("disjoint 4+1", "damaged"),
    ("monolithic tp 2 dp 2", "damaged"),
    ("disjoint 1+2, LLM tp 2", "plain"),
    ("colocated pp 2", "qwen3"),
]


class Late(TorchDispatchMode):
    """Messages whose `wait` returns at once. The first operation that reads a message waits until it has come, and
    must not be before `wait`."""

    # They give a tensor another shape or name, and read no values.
    LAZY = ("aten.detach.default", "aten.view.default", "aten.alias.default", "aten._unsafe_view.default")

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.coming = dist.batch_isend_irecv, {}

    def exchange(self, operations: list[dist.P2POp]) -> list:
        works = self.begin(operations)
        late = []
        for operation, work in zip(operations, works, strict=True):
            if operation.op is dist.irecv:
                message = _Message(work)
                self.coming[operation.tensor.untyped_storage()._cdata] = message
                late.append(message)
            else:
                late.append(work)
        return late

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.coming and str(operation) not in self.LAZY and operation.namespace != "c10d":
            for own in tree_leaves((args, kwargs)):
                if not isinstance(own, torch.Tensor):
                    continue
                if message := self.coming.pop(own.untyped_storage()._cdata, None):
                    assert message.is_waited_for, f"{operation} reads a message that nobody has waited for"
                    message.work.wait()
        return operation(*args, **(kwargs or {}))


class _Message:
    def __init__(self, work: dist.Work) -> None:
        self.work, self.is_waited_for = work, False

    def wait(self) -> None:
        self.is_waited_for = True

    def is_completed(self) -> bool:
        return False


class _LateWords(Undecodable):
    """A rank tells what it could not decode only when some rank has asked."""

    def tell(self, batch, microbatch, encoder, samples):
        late = Undecodable(self.store.clone(), self.longest_wait, self._told)

        def tell() -> None:
            late.store.wait([_asked(batch, microbatch, encoder)])
            late.tell(batch, microbatch, encoder, samples)

        threading.Thread(target=tell, daemon=True).start()

    def of(self, batch, microbatch, encoders):
        for encoder in encoders:
            self.store.set(_asked(batch, microbatch, encoder), "")
        return Undecodable.of(self, batch, microbatch, encoders)


class _NobodyWaits(_LateWords):
    """The defect: whoever asks takes what was told so far."""

    def of(self, batch, microbatch, encoders):
        told = [node for node in encoders if self.store.check([_key(batch, microbatch, node)])]
        _LateWords.of(self, batch, microbatch, encoders)
        return Undecodable.of(self, batch, microbatch, told) if told else set()


def _asked(batch: str, microbatch: int, encoder: Node) -> str:
    return f"asked/{_key(batch, microbatch, encoder)}"


@contextmanager
def _world(rank: int, folder: Path, name: str, variant: str) -> Iterator[Plan | None]:
    """In a case's process group: its plan. None on a rank that has no part in it."""
    plan = PLANS[name]
    if rank >= plan.world_size:
        yield None
        return
    store = dist.FileStore(str(folder / f"{name} {variant}" / "store"), plan.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size)
    try:
        yield plan
    except Exception:
        print(f"rank {rank}, {name}, {variant}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        raise
    dist.destroy_process_group()


def _run_late(rank: int, folder: Path, cases: list[tuple[str, str]], words: type[Undecodable]) -> None:
    node_work.Undecodable = words
    for name, variant in cases:
        with _world(rank, folder, name, variant) as plan:
            if plan:
                late = Late()
                dist.batch_isend_irecv = late.exchange
                with late:
                    check(folder, name, variant, plan)
                dist.batch_isend_irecv = late.begin


def test_layouts_have_the_gradients_of_one_process_where_only_reading_a_message_waits_for_it(prepare):  # noqa: F811
    num_ranks = max(PLANS[name].world_size for name, _ in CASES)
    spawn(_run_late, (prepare(CASES), CASES, _LateWords), nprocs=num_ranks)


def test_a_rank_that_does_not_wait_for_the_word_of_what_could_be_decoded_is_found(prepare):  # noqa: F811
    name, variant = case = "disjoint 2+1", "damaged"
    with pytest.raises(ProcessRaisedException, match=f"AssertionError: {re.escape(name)}, {variant}, step 0"):
        spawn(_run_late, (prepare([case]), [case], _NobodyWaits), nprocs=PLANS[name].world_size)
