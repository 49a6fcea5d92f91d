"""Which coordinates of a search are those of the curves of learned spectra."""

import numpy as np
from gpytorch.kernels import Kernel
from jaxtyping import Float

from gp_orff.kernels.learned_spectrum import learned_spectra
from gp_orff.models.fitting.coordinates import Coordinates


def prior_scales(kernel: Kernel, coordinates: Coordinates) -> Float[np.ndarray, "k"]:
    """∂z/∂u of the coordinates u of the curves z ~ N(0, I) of learned spectra; 0 for all others."""
    curves = {id(part.shape) for part in learned_spectra(kernel)}
    return np.concatenate(
        [
            np.full(part.parameter.numel(), part.scale * (id(part.parameter) in curves))
            for part in coordinates.parts
        ]
    )
