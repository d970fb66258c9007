"""The pipeline language: who computes where and when, the instruction list, and its two executors.

`simulate` prices a plan; `run`, which needs torch, executes a program and is imported by the trainer alone.
"""

from dflop.pipeline.check import check_program, most_in_flight
from dflop.pipeline.columns import columns_of
from dflop.pipeline.compiled import CompiledPlan, compile_plan
from dflop.pipeline.filling import BubbleFiller
from dflop.pipeline.instructions import Instruction, Op, Program, Span, StepInstructions, make_program
from dflop.pipeline.layout import Node, StageReplicas, Worker, nodes_of, stages_of, workers_of
from dflop.pipeline.routes import Edge
from dflop.pipeline.simulate import Bridges, StageTimes, Timeline, peak_bytes, peak_bytes_of, simulate, simulate_step_s
from dflop.pipeline.waits import Computation, computations_of

__all__ = [
    "Bridges",
    "BubbleFiller",
    "CompiledPlan",
    "Computation",
    "Edge",
    "Instruction",
    "Node",
    "Op",
    "Program",
    "Span",
    "StageReplicas",
    "StageTimes",
    "StepInstructions",
    "Timeline",
    "Worker",
    "check_program",
    "columns_of",
    "compile_plan",
    "computations_of",
    "make_program",
    "most_in_flight",
    "nodes_of",
    "peak_bytes",
    "peak_bytes_of",
    "simulate",
    "simulate_step_s",
    "stages_of",
    "workers_of",
]
