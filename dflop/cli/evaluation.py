"""The command that evaluates a trained model on public benchmarks, with lmms-eval."""

import shlex
import subprocess
import sys
from importlib.util import find_spec

import click

from dflop.base import UserError
from dflop.cli.options import RUN_CONFIG, folder_of

__all__ = ["evaluate_command"]


@click.command("evaluate", context_settings={"ignore_unknown_options": True})
@click.argument("run")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--tasks", required=True, help="Tasks of lmms-eval, e.g. mme,mmmu_val; `lmms-eval tasks list` has all.")
def evaluate_command(run: str, tasks: str, arguments: tuple[str, ...]) -> None:
    """Evaluate the model that RUN has trained with lmms-eval, which must be installed (`pip install dflop[evaluate]`).

    Results are written to `evaluation` in the run's folder. All other arguments go to lmms-eval: dflop evaluate demo
    --tasks mine --include_path my-tasks --limit 100.
    """
    from dflop.config import load_config
    from dflop.models import family_of

    folder = folder_of(run)
    model = folder / "train/model"
    if not (model / "config.json").is_file():
        raise UserError(f"{model} is not there: the run has trained no model yet")
    family = family_of(load_config(folder / RUN_CONFIG).model.family)
    if not family.evaluated_as:
        raise UserError(f"lmms-eval has no model for checkpoints of {family.name}")
    command = [
        *("-m", "lmms_eval", "--model", family.evaluated_as, "--model_args", f"pretrained={model}"),
        *("--tasks", tasks, "--batch_size", "1", "--output_path", str(folder / "evaluation"), *arguments),
    ]
    if find_spec("lmms_eval") is None:
        raise UserError(
            "lmms-eval is not installed here: pip install 'dflop[evaluate]' (with its own torchvision), or where it is "
            f"installed: python {shlex.join(command)}"
        )
    code = subprocess.call([sys.executable, *command])
    if code:
        raise UserError(f"lmms-eval ended with exit code {code}, see above")
