"""The store of processes of one machine does what torch's do."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from dflop.base.folder_store import FolderStore


@pytest.fixture(params=["ours", "torch's"])
def store(request, tmp_path):
    if request.param == "ours":
        return FolderStore(tmp_path / "store", timedelta(milliseconds=1))
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    return store


def test_values_are_set_replaced_read_and_deleted(store):
    store.set("a/1", "text")
    store.set("a/2", b"\0bytes")
    store.set("a/1", "another")
    assert store.clone().get("a/1") == b"another"
    assert store.multi_get(["a/2", "a/1"]) == [b"\0bytes", b"another"]
    assert (store.delete_key("a/1"), store.delete_key("a/1")) == (True, False)
    with pytest.raises(dist.DistStoreError):
        store.get("a/1")
    with pytest.raises(dist.DistStoreError):
        store.wait(["a/2", "a/1"], timedelta(milliseconds=1))


def test_only_the_first_of_several_sets_a_key_that_nobody_has_set(store):
    assert [store.compare_set("who", "", rank) for rank in ("3", "1")] == [b"3", b"3"]


def test_nothing_is_kept_of_values_that_were_replaced_or_deleted(tmp_path):
    store = FolderStore(tmp_path, timedelta(seconds=1))
    for step in range(9):
        store.set("sign", str(step))
        store.set(f"schedule/{step}", b"0" * 1000)
        store.delete_key(f"schedule/{step}")
    assert [path.name for path in tmp_path.iterdir()] == ["sign"]
