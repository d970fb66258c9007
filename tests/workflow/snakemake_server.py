"""Snakemake, imported once. Each line of stdin has the arguments of `run` as JSON, and a fork of this process does what
the `snakemake` command would. Its exit code is printed. With the argument `dflop` that package is imported, too; forks
that are to find another one need a server without."""

import gc
import json
import os
import sys

import snakemake.cli
import snakemake.dag
import snakemake.executors.local
import snakemake.scheduling.greedy
import snakemake.workflow

if sys.argv[1:] == ["dflop"]:
    from dflop import models, shapes  # noqa: F401
    from dflop.base import commands  # noqa: F401


def run(arguments: list[str], folder: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Become the command; does not return."""
    for name, descriptor in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["snakemake", *arguments]
    snakemake.cli.main()


def serve() -> None:
    gc.freeze()  # forks copy none of its pages
    for line in sys.stdin:
        if not (process := os.fork()):
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
