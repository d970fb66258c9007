"""The pipeline language: who computes where and when, the instruction list, and its two executors.

`simulate` prices a plan; `run`, which needs torch, executes a program and is imported by training and checks alone.
"""

from dflop.step.check import check_program, most_in_flight
from dflop.step.columns import columns_of
from dflop.step.communicators import communicator_bytes, num_communicators
from dflop.step.compiled import CompiledPlan, compile_plan
from dflop.step.dependencies import Computation, computations_of
from dflop.step.filling import BubbleFiller
from dflop.step.instructions import Instruction, Op, Program, Span, StepInstructions, make_program
from dflop.step.nodes import Node, StageReplicas, Worker, nodes_of, stages_of, workers_of
from dflop.step.routes import Edge
from dflop.step.simulate import Bridges, StageTimes, Timeline, peak_bytes, peak_bytes_of, simulate, simulate_step_s
from dflop.step.slot_counts import SlotCounts

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
    "SlotCounts",
    "Span",
    "StageReplicas",
    "StageTimes",
    "StepInstructions",
    "Timeline",
    "Worker",
    "check_program",
    "columns_of",
    "communicator_bytes",
    "compile_plan",
    "computations_of",
    "make_program",
    "most_in_flight",
    "nodes_of",
    "num_communicators",
    "peak_bytes",
    "peak_bytes_of",
    "simulate",
    "simulate_step_s",
    "stages_of",
    "workers_of",
]
