"""The pipeline language: grids and plans, the instruction list, and its two executors.

`simulate` prices a program; `run`, which needs torch, executes it and is imported by the trainer alone.
"""

from dflop.pipeline.grid import Grid, tile_world
from dflop.pipeline.instructions import Edge, Instruction, Op, Program, Span, make_program
from dflop.pipeline.plan import Plan, Worker, load_plan, plan_from_dict, split_layers
from dflop.pipeline.simulate import (
    CompiledProgram,
    StageTimes,
    Timeline,
    compile_program,
    simulate,
    simulate_step_s,
)

__all__ = [
    "CompiledProgram",
    "Edge",
    "Grid",
    "Instruction",
    "Op",
    "Plan",
    "Program",
    "Span",
    "StageTimes",
    "Timeline",
    "Worker",
    "compile_program",
    "load_plan",
    "make_program",
    "plan_from_dict",
    "simulate",
    "simulate_step_s",
    "split_layers",
    "tile_world",
]
