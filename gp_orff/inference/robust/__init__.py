"""Student-t noise: weights of observations (E-step), and leave-one-out residuals."""

from gp_orff.inference.robust.climb import climb
from gp_orff.inference.robust.e_step import (
    Distances,
    all_distances,
    foreseen_weights,
    latent_covariance,
    total_elbo_correction,
    weights_at,
)
from gp_orff.inference.robust.leave_one_out import LeaveOneOut, chi_squared, leave_one_out
from gp_orff.inference.robust.student_t import StudentTNoise, weighs

__all__ = [
    "Distances",
    "LeaveOneOut",
    "StudentTNoise",
    "all_distances",
    "chi_squared",
    "climb",
    "foreseen_weights",
    "latent_covariance",
    "leave_one_out",
    "total_elbo_correction",
    "weighs",
    "weights_at",
]
