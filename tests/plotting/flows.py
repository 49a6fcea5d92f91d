"""Positions for plots, a flow at these positions, and a posterior that needs no computation."""

import numpy as np


def grid(number=40):
    axis = np.linspace(0, 2, number)
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)


def flow(x):
    return np.stack([np.sin(2 * x[:, 1]), np.cos(3 * x[:, 0])], axis=-1)


class Flow:
    """A posterior of two outputs; its derivatives are those of `flow`, its variance is not."""

    num_inputs, num_outputs, space, box = 2, 2, (0, 1), ((0.0, 2.0), (0.0, 1.5))

    def mean(self, x, symbol=None):
        if symbol is None:
            return flow(x)
        curl = -3 * np.sin(3 * x[:, :1]) - 2 * np.cos(2 * x[:, 1:])
        return curl if type(symbol).__name__ == "Curl" else 0 * curl

    def variance(self, x, symbol=None):
        return np.tile(0.01 + 0.04 * x[:, :1] ** 2, (1, 2 if symbol is None else 1))
