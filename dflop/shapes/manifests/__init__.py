"""Manifests: the sources of a dataset, the records in their files, and the shards they are cut into."""

from dflop.shapes.manifests.shards import Shard, SourceRecords, list_shards
from dflop.shapes.manifests.sources import Source, list_sources

__all__ = ["Shard", "Source", "SourceRecords", "list_shards", "list_sources"]
