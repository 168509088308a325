"""Training: the loop, checkpoints, and what was measured."""

from gpunet.training.checkpoint import Checkpoint, CheckpointFolder, read_checkpoint, write_checkpoint
from gpunet.training.errors import TrainingError, TrainingInterruptedError
from gpunet.training.evaluation import Evaluator, Score
from gpunet.training.history import Epoch, History, Step, StepLog
from gpunet.training.settings import Ranks, Settings, make_trainer
from gpunet.training.trainer import Quiet, Reporter, Trainer

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "Epoch",
    "Evaluator",
    "History",
    "Quiet",
    "Ranks",
    "Reporter",
    "Score",
    "Settings",
    "Step",
    "StepLog",
    "Trainer",
    "TrainingError",
    "TrainingInterruptedError",
    "make_trainer",
    "read_checkpoint",
    "write_checkpoint",
]
