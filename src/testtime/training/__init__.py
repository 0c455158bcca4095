"""Training: the supervised task alone, jointly with the self-supervised one, and two baselines (paper, sections 2, 3).

A method is one function that turns a batch into its loss, as named terms that are added up:

    plain   cross-entropy of the classes: "object recognition task only"
    joint   that, and the self-supervised task's loss on the same images: what Test-Time Training starts from
    alp     that of plain, and the distance between the logits of an image and of its adversarial twin (Kannan et al.)
    uda     that of joint, and the task's loss on the unlabelled target set (UDA-SS, Sun et al.)

One loop trains them all. The images live on the device as uint8; shuffling and augmentation are functions of the seed,
the step and the sample, so a run that was killed goes on from its last epoch bit for bit, and N processes under
`torchrun` see the batches that one would. `train` is that loop; `train_together` is the same for several trainings at
once. `Recipe` is everything that decides the result.
"""

from testtime.training.loop import format_epoch, train, train_together
from testtime.training.losses import Batch, alp_loss, attack, joint_loss, plain_loss, uda_loss
from testtime.training.pool import Pool, shuffle
from testtime.training.processes import is_first, process_group
from testtime.training.recipe import LossName, Recipe, TrainingError
from testtime.training.setup import Setup, prepare
from testtime.training.trainer import Trainer, fit_together
from testtime.training.training import Training

__all__ = [
    "Batch", "LossName", "Pool", "Recipe", "Setup", "Trainer", "Training", "TrainingError", "alp_loss", "attack",
    "fit_together", "format_epoch", "is_first", "joint_loss", "plain_loss", "prepare", "process_group", "shuffle",
    "train", "train_together", "uda_loss",
]  # fmt: skip
