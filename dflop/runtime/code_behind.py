"""The code behind a command: what its function names, what those definitions name in turn, and so on.

The unit is a definition at the top level of a module (a function, class or constant), not a file: a change to one
command's function does not concern its neighbour's, and a package that re-exports everything does not tie everything
together. Names are followed through imports, also those inside functions, to the module that defines them. Besides,
these count as code behind a definition:

- the module that a text in it names, such as "dflop.training.rank": a process to start, or a module imported by name;
- the definitions that a text with a star names, such as "dflop.models.*.FAMILY": one in each module that fits;
- files beside its module that a text in it names: a script, data such as "devices.yaml", the files of a folder;
- the statements of its module that define nothing and run when the module is imported.

Comments, docstrings and annotations do not count. Nothing is imported: the source is only parsed. What cannot be seen
there is missed: names put together at run time, and tables that a decorator fills.
"""

import ast
import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Set
from functools import cached_property
from pathlib import Path

from dflop.runtime.artifacts import cache_folder, written_whole

__all__ = ["CodeBehind", "code_digests", "imported_names"]

_PACKAGE = Path(__file__).parents[1]
_WHOLE_MODULE, _AT_IMPORT = "*", ""
# A text that may name a module or a file beside one.
_PATH = re.compile(r"\w[\w./*-]{1,60}")


def code_digests(entries: Iterable[str], stops: Set[str]) -> dict[str, str]:
    """Digest of the code behind each entry (as "dflop.cli.plans.plan_command").

    The modules and definitions in `stops` are not followed. Every job of the workflow asks for the digests, so they
    are cached until a file of the package changes.
    """
    entries = sorted(entries)
    files = sorted(path for path in _PACKAGE.rglob("*") if path.suffix != ".pyc" and path.is_file())
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    stamp = hashlib.sha256(json.dumps([stats, entries, sorted(stops)]).encode()).hexdigest()
    kept = cache_folder() / "code.json"
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return known["digests"]
    behind = CodeBehind(_PACKAGE, stops)
    digests = {entry: behind.digest(entry) for entry in entries}
    with contextlib.suppress(OSError), written_whole(kept) as path:
        path.write_text(json.dumps({"stamp": stamp, "digests": digests}), encoding="utf-8")
    return digests


class CodeBehind:
    """Follows names through the package that lies in the folder `package`."""

    def __init__(self, package: Path, stops: Set[str] = frozenset()) -> None:
        self._package, self._stops = package, stops
        self._files = {_module_name(path, package): path for path in package.rglob("*.py")}
        self._modules: dict[str, _Module] = {}

    def digest(self, entry: str) -> str:
        """A digest of every definition and file behind `entry`, and of their names."""
        definitions, files = self.reach(entry)
        running = hashlib.sha256()
        for module, name in sorted(definitions):
            for statement in self._module(module).statements(name):
                running.update(f"{module}.{name}\0{statement.text}\0".encode())
        for path in sorted(files):
            running.update(f"{path.relative_to(self._package)}\0".encode() + path.read_bytes())
        return running.hexdigest()[:16]

    def reach(self, entry: str) -> tuple[set[tuple[str, str]], set[Path]]:
        """The definitions behind `entry`, as (module, name), and the files beside modules."""
        found: set[tuple[str, str]] = set()
        files: set[Path] = set()
        waiting = list(self._resolve(entry))
        while waiting:
            place = module, name = waiting.pop()
            if place in found or not self._stops.isdisjoint((module, f"{module}.{name}")):
                continue
            found.add(place)
            waiting.append((module, _AT_IMPORT))
            if name == _WHOLE_MODULE:
                own = self._module(module)
                waiting += [(module, defined) for defined in own.definitions]
                waiting += [place for dotted in own.imported.values() for place in self._resolve(dotted)]
            for statement in self._module(module).statements(name):
                for dotted in statement.names:
                    waiting += self._resolve(self._module(module).in_full(dotted, statement.imported))
                for text in statement.texts:
                    waiting += self._fitting(text) if "*" in text else ()
                    script, data = self._named_by(text, self._files[module].parent)
                    waiting += [(script, _WHOLE_MODULE)] if script else []
                    files |= data
        return found, files

    def _resolve(self, dotted: str) -> Iterator[tuple[str, str]]:
        """The (module, name) of what a dotted name stands for: nothing where it lies outside the package, one
        definition, or a whole module."""
        parts = dotted.split(".")
        depth = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self._files), 0)
        module = ".".join(parts[:depth])
        if not depth or module in self._stops:
            return
        if depth == len(parts) and parts[-1] in self._offered_by(".".join(parts[:-1])):
            depth, module = depth - 1, ".".join(parts[:-1])  # a package offers something of its submodule's name
        if depth == len(parts):
            yield module, _WHOLE_MODULE
            return
        own, wanted = self._module(module), parts[depth]
        if wanted in own.definitions:
            yield module, wanted
        elif wanted in own.imported:
            yield from self._resolve(".".join([own.imported[wanted], *parts[depth + 1 :]]))
        elif "__getattr__" in own.definitions:
            yield module, "__getattr__"

    def _fitting(self, pattern: str) -> Iterator[tuple[str, str]]:
        """The (module, name) of each definition that a dotted name with stars for some of its parts stands for."""
        module, _, name = pattern.rpartition(".")
        fits = re.compile(re.escape(module).replace(r"\*", r"\w+"))
        for found in filter(fits.fullmatch, self._files):
            yield from self._resolve(f"{found}.{name}")

    def _offered_by(self, package: str) -> Set[str]:
        """The names that a package's own file binds, other than to submodules."""
        if package not in self._files:
            return frozenset()
        own = self._module(package)
        return {*own.definitions, *(name for name, origin in own.imported.items() if origin != f"{package}.{name}")}

    def _named_by(self, text: str, folder: Path) -> tuple[str, set[Path]]:
        """The module that a text names, by its dotted name or its file in `folder`, and the data files it names."""
        if text in self._files and "." in text:
            return text, set()
        beside = folder / text
        if beside.is_dir():
            return "", {path for path in beside.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc")}
        if beside.is_file():
            return (_module_name(beside, self._package), set()) if beside.suffix == ".py" else ("", {beside})
        return "", set()

    def _module(self, name: str) -> "_Module":
        if name not in self._modules:
            self._modules[name] = _Module(name, self._files[name])
        return self._modules[name]


class _Module:
    """The top level of a module: its statements by the names they define, and what it imported under which name."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.definitions: dict[str, list[_Statement]] = {}
        self.imported: dict[str, str] = {}
        self._at_import: list[_Statement] = []
        for node in _WithoutRemarks().visit(ast.parse(path.read_text(encoding="utf-8"))).body:
            if _tests(node, "TYPE_CHECKING"):
                continue
            statement = _Statement(node, package)
            is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            self.imported |= {} if is_definition else statement.imported
            if _tests(node, "__name__"):
                self.definitions["__main__"] = [statement]
            elif names := list(_defined_by(node)):
                for defined in names:
                    self.definitions.setdefault(defined, []).append(statement)
            elif not isinstance(node, (ast.Import, ast.ImportFrom)):
                self._at_import.append(statement)

    def statements(self, name: str) -> list["_Statement"]:
        return self._at_import if name == _AT_IMPORT else self.definitions.get(name, [])

    def in_full(self, dotted: str, imported: dict[str, str]) -> str:
        """A name used in the module, with its origin put in; `imported` is what the statement itself imports."""
        first, _, rest = dotted.partition(".")
        origin = imported.get(first) or (f"{self._name}.{first}" if first in self.definitions else "")
        origin = origin or self.imported.get(first, "")
        return f"{origin}.{rest}" if origin and rest else origin


class _Statement:
    """A statement of a module's top level: what it imports, the dotted names and the texts in it."""

    def __init__(self, node: ast.stmt, package: str) -> None:
        self._node = node
        self.imported: dict[str, str] = {}
        self.names: set[str] = set()
        self.texts: set[str] = set()
        waiting: list[ast.AST] = [node]
        while waiting:
            inner = waiting.pop()
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                self.imported |= imported_names(inner, package)
            elif dotted := _dotted(inner):
                self.names.add(dotted)
            elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                self.texts |= {inner.value} if _PATH.fullmatch(inner.value) else set()
            else:
                waiting += ast.iter_child_nodes(inner)

    @cached_property
    def text(self) -> str:
        """Equal for equal code, however it is laid out."""
        return ast.dump(self._node, annotate_fields=False)


def imported_names(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, str]:
    """What an import in a module of `package` binds: the dotted origin by its name here."""
    if isinstance(node, ast.Import):
        firsts = [alias.name if alias.asname else alias.name.split(".")[0] for alias in node.names]
        return {alias.asname or first: first for alias, first in zip(node.names, firsts, strict=True)}
    parents = package.split(".")
    base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
    origin = ".".join(filter(None, (base, node.module)))
    return {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}


class _WithoutRemarks(ast.NodeTransformer):
    """Takes docstrings and annotations out of a tree."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        may_have_docstring = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module))
        if may_have_docstring and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _defined_by(node: ast.AST) -> Iterator[str]:
    """The names that a statement of the top level defines; for a branch or a block, those defined inside it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _defined_by(target)
    elif isinstance(node, (ast.Tuple, ast.If, ast.Try, ast.With)):
        for inner in ast.iter_child_nodes(node):
            yield from _defined_by(inner)


def _tests(node: ast.stmt, name: str) -> bool:
    """Whether the statement is an `if` whose condition uses `name`."""
    return isinstance(node, ast.If) and any(
        isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node.test)
    )


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for that expression; nothing for what does not start with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = _dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""
