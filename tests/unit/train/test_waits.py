"""The watch tells ranks that wait for others by the functions in which they do."""

import ast
from pathlib import Path

import pytest

import dflop
from dflop.train.peers import _WAITS


@pytest.mark.parametrize(("path", "name"), [waits for waits in _WAITS if waits[1]])
def test_a_function_in_which_ranks_wait_exists(path, name):
    (file,) = (file for file in Path(dflop.__file__).parent.rglob("*.py") if str(file).endswith(f"/{path}"))
    functions = [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    assert any(function.startswith(name) for function in functions)
