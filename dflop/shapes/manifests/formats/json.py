"""A list of JSON records, or one of them a line."""

from dflop.shapes.manifests.json_text import open_json as open_file

__all__ = ["open_file"]
