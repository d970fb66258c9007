"""What comes with the package: its version, the workflow and the configs, and new folders to run them in.

In a checkout they are its folders `workflow` and `config`; a wheel holds the same two below `dflop/shipped`.
"""

import shutil
from importlib import metadata
from pathlib import Path

from dflop.base.errors import UserError

__all__ = ["own_version", "shipped_folder", "start_folder"]

_PACKAGE = Path(__file__).parents[1]

_SNAKEFILE = '''\
"""The workflow of the installed dflop, run in this folder."""

from dflop.base import shipped_folder


configfile: "config/config.yaml"


module dflop:
    snakefile:
        str(shipped_folder() / "workflow" / "Snakefile")
    config:
        config


use rule * from dflop


onstart:
    dflop.onstart()
'''


def own_version() -> str:
    """The version of dflop, or "not installed" where it is imported from a checkout that no pip has installed."""
    try:
        return metadata.version("dflop")
    except metadata.PackageNotFoundError:
        return "not installed"


def shipped_folder() -> Path:
    """The folder that holds `workflow/Snakefile` and `config/config.yaml` of this installation."""
    in_wheel = _PACKAGE / "shipped"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent


def start_folder(folder: Path, recipe: str | None = None) -> list[str]:
    """Write a Snakefile that uses the installed workflow, the configs and the profiles into a new or empty folder.

    Snakemake is started there with the same commands as in a checkout. The `recipe` of this name is copied to
    `recipe.yaml`. Returns the names of what was written.

    Raises:
        UserError: when the folder holds anything, or there is no such recipe.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty, and nothing in it is overwritten; name a new or an empty folder")
    shipped = shipped_folder()
    recipes = {path.stem: path for path in sorted((shipped / "config/recipes").glob("*.yaml"))}
    if recipe is not None and recipe not in recipes:
        raise UserError(f"there is no recipe {recipe!r}; there are {', '.join(recipes)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Snakefile").write_text(_SNAKEFILE, encoding="utf-8")
    shutil.copytree(shipped / "config", folder / "config", ignore=shutil.ignore_patterns("demo.yaml"))
    # Snakemake looks for `--profile slurm` beside the Snakefile, and for its default profile in `profiles`.
    shutil.copytree(shipped / "workflow/profiles/slurm", folder / "slurm")
    shutil.copytree(shipped / "workflow/profiles/default", folder / "profiles/default")
    if recipe:
        shutil.copy(recipes[recipe], folder / "recipe.yaml")
    return sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
