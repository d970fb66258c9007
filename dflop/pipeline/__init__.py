"""The pipeline language: grids and plans, the instruction list, and its two executors.

`simulate` prices a plan; `run`, which needs torch, executes a program and is imported by the trainer alone.
"""

from dflop.pipeline.check import check_program, most_in_flight
from dflop.pipeline.compiled import CompiledPlan, compile_plan
from dflop.pipeline.grid import Grid, tile_world
from dflop.pipeline.instructions import Edge, Instruction, Op, Program, Span, make_program
from dflop.pipeline.layout import Node, Stage, Worker, nodes_of, stages_of, workers_of
from dflop.pipeline.notation import Action, actions_of, format_actions, parse_actions
from dflop.pipeline.placements import DISJOINT, MONOLITHIC, PLACEMENTS, Placement, register_placement
from dflop.pipeline.plan import Plan, load_plan, plan_from_dict, split_layers, why_not_runnable
from dflop.pipeline.resimulate import CellTimes, Clocks, Network, fresh_clocks, mark, network_of, resimulate, take_back
from dflop.pipeline.schedules import PLAIN_SCHEDULE, SCHEDULES, Schedule, register_schedule
from dflop.pipeline.simulate import Bridges, StageTimes, Timeline, peak_bytes, simulate, simulate_step_s

__all__ = [
    "DISJOINT",
    "MONOLITHIC",
    "PLACEMENTS",
    "PLAIN_SCHEDULE",
    "SCHEDULES",
    "Action",
    "Bridges",
    "CellTimes",
    "Clocks",
    "CompiledPlan",
    "Edge",
    "Grid",
    "Instruction",
    "Network",
    "Node",
    "Op",
    "Placement",
    "Plan",
    "Program",
    "Schedule",
    "Span",
    "Stage",
    "StageTimes",
    "Timeline",
    "Worker",
    "actions_of",
    "check_program",
    "compile_plan",
    "format_actions",
    "fresh_clocks",
    "load_plan",
    "make_program",
    "mark",
    "most_in_flight",
    "network_of",
    "nodes_of",
    "parse_actions",
    "peak_bytes",
    "plan_from_dict",
    "register_placement",
    "register_schedule",
    "resimulate",
    "simulate",
    "simulate_step_s",
    "split_layers",
    "stages_of",
    "take_back",
    "tile_world",
    "why_not_runnable",
    "workers_of",
]
