"""Uncompressed tar files, as of WebDataset."""

from dflop.shapes.manifests.tar import TarReader as open_file

__all__ = ["open_file"]
