"""The rules of the house: who may import whom, what the light modules leave alone, and pins that agree.

The way of the data orders the folders (`ROOMS`); a folder imports only from those above it, and no modules import each
other in a circle.
"""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dflop
from dflop.base.commands import GROUND_ROOMS, ROOMS

REPOSITORY = Path(__file__).parents[2]
PACKAGE = Path(dflop.__file__).parent

PLACES = {name: max(0, place - len(GROUND_ROOMS) + 1) for place, name in enumerate(ROOMS)} | {"cli": 99}
PACKAGE_ITSELF = 100  # dflop/__init__.py may offer anything, so nothing inside may import from it.

IMPORTED_WITHOUT_TORCH = (
    "dflop",
    "dflop.config",
    "dflop.store",
    "dflop.base.commands",
    "dflop.models",
    "dflop.models.audio",
    *(f"dflop.models.{path.parent.name}" for path in sorted((PACKAGE / "models").glob("*/__init__.py"))),
    *(f"dflop.models.{path.parent.name}.work" for path in sorted((PACKAGE / "models").glob("*/work.py"))),
    "dflop.shapes",
    "dflop.costs",
    "dflop.costs.model",
    "dflop.costs.fit",
    "dflop.step",
    "dflop.step.simulate",
    "dflop.schedule",
    "dflop.schedule.preview",
    "dflop.balance.replicas",
    "dflop.schedule.scheduler",
    "dflop.schedule.service",
    "dflop.search",
    "dflop.comparison",
    "dflop.train",
    "dflop.checks",
    "dflop.checks.emulation",
    "dflop.checks.side_by_side",
    "dflop.cli",
)


def imports_of(source: str, package: str) -> set[str]:
    """Dotted names of all that a module of `package` imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            names |= {".".join(filter(None, (*base, node.module, alias.name))) for alias in node.names}
    return names


class WithoutTypeChecking(ast.NodeTransformer):
    """Drops the blocks that only type checkers read."""

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def imported_modules(sources: dict[str, str], packages: set[str]) -> dict[str, set[str]]:
    """For each of these modules, those of them that it imports when it runs."""
    graph = {}
    for name, source in sources.items():
        running = ast.unparse(WithoutTypeChecking().visit(ast.parse(source)))
        found = imports_of(running, name if name in packages else name.rpartition(".")[0])
        graph[name] = {
            next((module for module in (dotted, dotted.rpartition(".")[0]) if module in sources), name)
            for dotted in found
        } - {name}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def place_of(dotted: str) -> int:
    """Where in the house a name of the package lives; what is no module or folder is of the package itself."""
    parts = dotted.split(".")
    return PLACES.get(parts[1], PACKAGE_ITSELF) if len(parts) > 1 else PACKAGE_ITSELF


def offences(room: str, source: str, package: str) -> list[str]:
    """What a module of the folder or top-level module `room` imports against the order."""
    found = []
    for name in sorted(imports_of(source, package)):
        if name.split(".")[0] == "dflop":
            target = name.split(".")[1] if "." in name else ""
            same_floor = target == room or (room in GROUND_ROOMS and target in GROUND_ROOMS)
            if not same_floor and place_of(name) >= PLACES[room]:
                found.append(name)
    return found


def modules() -> list[tuple[str, Path]]:
    """(folder or top-level module, file) of every module but the package's own __init__."""
    listed = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        if room != "__init__":
            listed.append((room, path))
    return listed


def package_of(path: Path) -> str:
    return ".".join(("dflop", *path.relative_to(PACKAGE).parent.parts))


def test_every_folder_and_top_level_module_has_its_place():
    assert {room for room, _ in modules()} == set(PLACES)


def test_the_walker_finds_every_form_of_import_and_judges_it():
    source = """
import dflop.search.best_first as s
from dflop import train, something
from dflop.models import load_model_spec
from ..costs import CostModel
def late():
    from dflop.report.picture import write_picture
"""
    assert offences("schedule", source, "dflop.schedule") == [
        "dflop.report.picture.write_picture",
        "dflop.search.best_first",
        "dflop.something",
        "dflop.train",
    ]
    assert "dflop.costs.CostModel" in imports_of(source, "dflop.schedule")


@pytest.mark.parametrize(
    ("room", "path"), modules(), ids=lambda value: value.name if isinstance(value, Path) else value
)
def test_a_folder_imports_only_from_folders_above_it(room, path):
    assert offences(room, path.read_text(encoding="utf-8"), package_of(path)) == []


def test_a_circle_is_found_whether_imports_stand_at_the_top_or_in_a_function_but_not_for_type_checkers():
    sources = {
        "dflop.a": "from dflop.b import B",
        "dflop.b": "def late():\n    from dflop.c import C",
        "dflop.c": "if TYPE_CHECKING:\n    from dflop.a import A",
    }
    assert circle_in(imported_modules(sources, set())) == []
    sources["dflop.c"] += "\nfrom . import a"
    assert sorted(set(circle_in(imported_modules(sources, set())))) == ["dflop.a", "dflop.b", "dflop.c"]


def test_no_modules_import_each_other_in_a_circle():
    sources, packages = {}, set()
    for path in PACKAGE.rglob("*.py"):
        name = package_of(path) if path.stem == "__init__" else f"{package_of(path)}.{path.stem}"
        sources[name] = path.read_text(encoding="utf-8")
        if path.stem == "__init__":
            packages.add(name)
    assert circle_in(imported_modules(sources, packages)) == []


def test_nothing_in_the_package_imports_snakemake():
    guilty = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for name in imports_of(path.read_text(encoding="utf-8"), package_of(path))
        if name.split(".")[0].startswith("snakemake")
    ]
    assert guilty == []


def test_the_light_modules_load_neither_torch_nor_transformers_nor_vl_convert():
    script = "import importlib, sys\n"
    for name in IMPORTED_WITHOUT_TORCH:
        script += f"importlib.import_module({name!r})\n"
        script += f"assert not {{'torch', 'transformers', 'vl_convert'}} & set(sys.modules), {name!r}\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_layouts_which_loader_processes_compute_import_no_models():
    allowed = {"torch", "transformers.vision_utils", "dflop.models.microbatch", "dflop.models.spec"}
    for path in PACKAGE.glob("models/*/layout.py"):
        names = imports_of(path.read_text(encoding="utf-8"), package_of(path))
        rooms = {name.rpartition(".")[0] if "." in name else name for name in names}
        assert rooms - allowed <= sys.stdlib_module_names | {"collections.abc"}, path


FAMILIES = [path.name for path in (PACKAGE / "models").iterdir() if (path / "__init__.py").is_file()]
# Parts of the families' names, and their encoders.
NAMES_OF_FAMILIES = {*FAMILIES, "llava", "onevision", "intern", "siglip"}
# The default of `model.family`, and the demo, which draws a dataset in LLaVA's format.
MAY_NAME_A_FAMILY = ("config/schema.py", "demo/")


def words_of(source: str) -> set[str]:
    """Every name and text in a module but its docstrings, in small letters."""
    tree = ast.parse(source)
    remarks = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            remarks.add(id(node.body[0].value))
    kept = [node for node in ast.walk(tree) if id(node) not in remarks]
    words = {str(value) for node in kept for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return {word.lower() for word in words}


def names_a_family(source: str) -> set[str]:
    words = {word.replace("_internal", "") for word in words_of(source)}  # which "intern" is a part of
    return {name for name in NAMES_OF_FAMILIES if any(name in word for word in words)}


def test_the_search_for_families_names_sees_imports_names_and_texts():
    assert names_a_family("from dflop.models.internvl import PRESETS") == {"internvl", "intern"}
    assert names_a_family("if spec.family == 'llava_onevision': pass") == {"llava_onevision", "llava", "onevision"}
    assert names_a_family("class SiglipStage: pass") == {"siglip"}
    assert names_a_family('"""Records as LLaVA has them."""') == set()


def test_no_file_outside_a_familys_folder_names_a_family():
    guilty = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        family = relative.parts[1] if relative.parts[0] == "models" and len(relative.parts) > 2 else None
        if not relative.as_posix().startswith(MAY_NAME_A_FAMILY) and family not in FAMILIES:
            guilty[str(relative)] = names_a_family(path.read_text(encoding="utf-8"))
    for path in (REPOSITORY / "workflow").rglob("*.smk"):
        text = path.read_text(encoding="utf-8").lower()
        guilty[path.name] = {name for name in NAMES_OF_FAMILIES if name in text}
    assert {name: found for name, found in guilty.items() if found} == {}


def pyproject() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_conda_environment_is_python_and_the_package_with_its_extras():
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text(encoding="utf-8"))
    project = pyproject()
    assert environment["name"] == project["name"]
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (from_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert sorted(plain) == ["pip", f"python{project['requires-python']}"]
    (extras,) = [entry.removeprefix("-e .") for entry in from_pip if entry.startswith("-e .")]
    assert Requirement(f"dflop{extras}").extras == {"dev", "slurm"} <= set(project["optional-dependencies"])


def pins_in(text: str) -> dict[str, str]:
    """The version of each package that a file of requirements names."""
    pins = {}
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        pins[canonicalize_name(requirement.name)] = specifier.version
    return pins


def test_the_lock_has_the_pinned_versions_each_with_hashes():
    text = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8")
    entries = re.sub(r"(?m)^#.*\n", "", text).replace(" \\\n    --hash=", " --hash=").splitlines()
    assert all(" --hash=sha256:" in entry for entry in entries)
    locked = pins_in("\n".join(entry.split(" --hash=")[0] for entry in entries))
    pins = pins_in((REPOSITORY / "constraints.txt").read_text(encoding="utf-8"))
    assert {name: version for name, version in locked.items() if name in pins}.items() <= pins.items()
    project = pyproject()
    wanted = map(Requirement, project["dependencies"] + project["optional-dependencies"]["slurm"])
    assert {canonicalize_name(requirement.name) for requirement in wanted} <= locked.keys()


@pytest.mark.parametrize("group", ["dependencies", "dev", "docs", "slurm", "tensorboard"])
def test_every_direct_dependency_is_pinned_to_a_version_in_its_range(group):
    pins, project = pins_in((REPOSITORY / "constraints.txt").read_text(encoding="utf-8")), pyproject()
    wanted = project["dependencies"] if group == "dependencies" else project["optional-dependencies"][group]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is outside {requirement.specifier}"


def test_no_two_test_files_have_one_name():
    """Outside packages pytest imports them by their names alone."""
    files = [path for path in (REPOSITORY / "tests").rglob("*.py") if path.name != "conftest.py"]
    names = [path.name for path in files if not (path.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))
