"""Searches on the readings that are kept of many, where waves cannot hold shallow sources."""

from dataclasses import replace

from gp_orff.inference.representation import Representation
from gp_orff.models.fitting.robust_em import RobustEM
from gp_orff.models.fitting.searches.exact import ExactKernel
from gp_orff.models.fitting.searches.starting import best_start
from gp_orff.models.fitting.trainer import Trainer


def learned_from_kept(
    trainer: Trainer, kept: Representation, whole: Representation
) -> tuple[Trainer, Representation]:
    """Learn again, from the readings that are kept of many: neighbours along a line tell of the
    noise along it, which is less than what readings of several lines differ by. Under that noise
    the means of all readings may do; the representation that does, with the trainer of the kept."""
    trainer = replace(trainer, survey=kept.data.survey)
    robust = RobustEM(trainer)
    if robust.e_step.heavy_tailed:
        return trainer, replace(kept, data=robust.start(kept.data, warm_start=False))
    ExactKernel(trainer, kept.data).run(best_start(trainer))
    return trainer, again if (again := whole.mended).rule is None else kept
