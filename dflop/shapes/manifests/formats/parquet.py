"""Parquet files."""

from dflop.shapes.manifests.tables import ParquetReader as open_file

__all__ = ["open_file"]
