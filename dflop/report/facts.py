"""All that a report is made from: its sections and its charts read nothing else."""

from dataclasses import dataclass

from dflop.config import Config
from dflop.models import ModelSpec
from dflop.report.memory import MemorySection
from dflop.report.run import Run, TrainedRun
from dflop.report.savings import SavingsSection
from dflop.report.schedules import PreviewPrices
from dflop.report.steps import StepShown

__all__ = ["Facts"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Facts:
    """`trained` is the training, if it was done with this plan and these costs; None if there is no training yet, or it
    was done with others. `preview` is None for a run without `schedule.parquet`, and `savings` for a plan without
    baselines."""

    config: Config
    spec: ModelSpec
    run: Run
    trained: TrainedRun | None
    preview: PreviewPrices | None
    shown: StepShown
    memory: MemorySection
    savings: SavingsSection | None

    @property
    def is_foreign(self) -> bool:
        """Whether there is a training that was done with another plan or other costs."""
        return self.run.trained is not None and self.trained is None
