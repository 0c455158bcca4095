"""Training: supervised, jointly with the self-supervised task, and two baselines (paper, sections 2 and 3).

A method is a function from a batch to its loss, as a sum of named terms:

    plain   classification loss only ("object recognition task only")
    joint   plus the self-supervised loss on the same images: the starting point of Test-Time Training
    robust  joint, on augmented views that must be classified alike (AugMix, Hendrycks et al. 2020)
    alp     plain plus the distance between the logits of an image and its adversarial example (Kannan et al.)
    uda     joint plus the self-supervised loss on the unlabelled target set (UDA-SS, Sun et al.)

One loop trains them all. The images are stored on the device as uint8; shuffling and augmentation are functions of the
seed, the step and the sample, so an interrupted run resumes from its last epoch bit for bit, and N processes under
`torchrun` see the same batches as one. `train` trains one network, `train_together` several at once. `Recipe` contains
all hyperparameters.

`fit_branch` trains only the self-supervised branch of a network, without labels: for a classifier one already has.
"""

from testtime.training.branch import fit_branch, format_branch
from testtime.training.branch_recipe import BranchRecipe
from testtime.training.loop import format_epoch, train, train_together
from testtime.training.losses import Batch, alp_loss, attack, joint_loss, plain_loss, robust_loss, uda_loss
from testtime.training.pool import Pool, shuffle
from testtime.training.processes import is_first, process_group
from testtime.training.recipe import LossName, Recipe, TrainingError
from testtime.training.setup import Setup, limit_images, open_images, prepare
from testtime.training.trainer import Trainer, fit_together
from testtime.training.training import Training

__all__ = [
    "Batch", "BranchRecipe", "LossName", "Pool", "Recipe", "Setup", "Trainer", "Training", "TrainingError", "alp_loss",
    "attack", "fit_branch", "fit_together", "format_branch", "format_epoch", "is_first", "joint_loss", "limit_images",
    "open_images",
    "plain_loss", "prepare", "process_group", "robust_loss", "shuffle", "train", "train_together", "uda_loss",
]  # fmt: skip
