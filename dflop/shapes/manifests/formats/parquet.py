"""Parquet files."""

from dflop.shapes.manifests.tables import ParquetReader as open_file

__all__ = ["IS_TABLE", "open_file"]

IS_TABLE = True
