"""Fields that no kernel represents exactly: sums of plane waves with spectra of many kinds."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

WAVES = 500
_CHUNK = 10_000

Rng = np.random.Generator


@dataclass(frozen=True)
class Waves:
    """The field f(x) = Σ_j a_j cos(⟨ω_j, x⟩ + φ_j), with its derivatives and potentials."""

    frequencies: Float[np.ndarray, "J d"]
    phases: Float[np.ndarray, "J"]
    amplitudes: Float[np.ndarray, "J p"]

    def __call__(self, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n p"]:
        chunks = [x[start : start + _CHUNK] for start in range(0, len(x), _CHUNK)]
        return np.concatenate(
            [np.cos(own @ self.frequencies.T + self.phases) @ self.amplitudes for own in chunks]
        )

    def in_units(
        self, shift: Float[np.ndarray, "d"], scale: Float[np.ndarray, "d"], size: float
    ) -> "Waves":
        """Return the field size · f((x − shift) / scale)."""
        omega = self.frequencies / scale
        return Waves(omega, self.phases - omega @ shift, size * self.amplitudes)

    def jacobian(self, x: Float[np.ndarray, "n d"], space: int) -> Float[np.ndarray, "n p space"]:
        """Return ∂_j f_i for the first `space` inputs j."""
        slopes = self.amplitudes[:, :, None] * self.frequencies[:, None, :space]
        sines = np.sin(x @ self.frequencies.T + self.phases)
        return -np.tensordot(sines, slopes, axes=1)

    def potential(self, x: Float[np.ndarray, "n d"], space: int) -> Float[np.ndarray, "n"]:
        """Return g, where ∇g is the curl-free part of f."""
        omega = self.frequencies[:, :space]
        return self._integrated(x, omega, (self.amplitudes * omega).sum(1))

    def stream_function(self, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n"]:
        """Return ψ, where (∂₂ψ, −∂₁ψ) is the divergence-free part of a field in the plane."""
        omega, a = self.frequencies[:, :2], self.amplitudes
        return self._integrated(x, omega, a[:, 0] * omega[:, 1] - a[:, 1] * omega[:, 0])

    def _integrated(self, x, omega, along: Float[np.ndarray, "J"]) -> Float[np.ndarray, "n"]:
        return np.sin(x @ self.frequencies.T + self.phases) @ (along / np.square(omega).sum(1))


def smooth(rng: Rng, d: int):
    return rng.standard_normal((WAVES, d)), np.ones(WAVES)


def student(degrees: int):
    """Return a sampler of the spectrum of a Matérn kernel with ν = degrees / 2."""

    def spectrum(rng: Rng, d: int):
        scale = np.sqrt(rng.chisquare(degrees, (WAVES, 1)) / degrees)
        return rng.standard_normal((WAVES, d)) / scale, np.ones(WAVES)

    return spectrum


def many_lengths(rng: Rng, d: int):
    """Draw frequencies from the spectrum of a rational quadratic kernel with α = 0.7."""
    scale = np.sqrt(rng.gamma(0.7, 1 / 0.7, (WAVES, 1)))
    return rng.standard_normal((WAVES, d)) * scale, np.ones(WAVES)


def red(rng: Rng, d: int):
    """Draw frequencies and amplitudes from a power law over one and a half decades of wave numbers,
    as in winds and currents."""
    radius = np.exp(rng.uniform(np.log(0.5), np.log(15.0), (WAVES, 1)))
    direction = rng.standard_normal((WAVES, d))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return radius * direction, radius[:, 0] ** (-2 / 3)


def swell(rng: Rng, d: int):
    """Draw frequencies of waves of nearly the same length in all directions."""
    direction = rng.standard_normal((WAVES, d))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return direction * rng.normal(1.5, 0.15, (WAVES, 1)), np.ones(WAVES)


SPECTRA: dict[str, Callable] = {
    "smooth": smooth,
    "Matérn 1/2": student(1),
    "Matérn 3/2": student(3),
    "Matérn 5/2": student(5),
    "many lengths": many_lengths,
    "red": red,
    "swell": swell,
}


def directions(
    rng: Rng, constraint: str, omega: Float[np.ndarray, "J d"], p: int
) -> Float[np.ndarray, "J p"]:
    """Return the directions of waves: parallel to ω for a curl-free field, orthogonal to ω for a
    divergence-free field."""
    if constraint == "none":  # correlated outputs: L g with two functions g
        return rng.standard_normal((len(omega), 2)) @ rng.standard_normal((2, p))
    along = omega / np.linalg.norm(omega, axis=1, keepdims=True)
    along *= rng.standard_normal((len(omega), 1))
    across = rng.standard_normal(omega.shape)
    unit = omega / np.linalg.norm(omega, axis=1, keepdims=True)
    across -= (across * unit).sum(1, keepdims=True) * unit
    shares = {"curl-free": (1.0, 0.0), "divergence-free": (0.0, 1.0), "Helmholtz": (0.5, 1.0)}
    first, second = shares[constraint]
    return first * along + second * across


def waves(
    rng: Rng, spectrum: str, constraint: str, lengths: Float[np.ndarray, "c"], d: int, p: int
) -> Waves:
    """Return a random field with `lengths` along all inputs. The first d inputs are space, and a
    further one is time."""
    omega, sizes = SPECTRA[spectrum](rng, d)
    times = rng.standard_normal((WAVES, len(lengths) - d)) / np.sqrt(
        rng.chisquare(5, (WAVES, 1)) / 5
    )
    omega = np.concatenate([omega, times], axis=1) / lengths
    across = directions(rng, constraint, omega[:, :d], p)
    return Waves(omega, rng.uniform(0, 2 * np.pi, WAVES), sizes[:, None] * across)


def polynomial(rng: Rng, d: int, p: int) -> Callable:
    """Return a random polynomial of second degree around the middle of the box."""
    first, second = rng.standard_normal((d, p)), rng.standard_normal((d, d, p))
    return lambda x: (x - 0.5) @ first + np.einsum("ni,nj,ijp->np", x - 0.5, x - 0.5, second)
