"""Random features of dot-product kernels: harmonics and unit vectors, drawn once."""

from gp_orff.features.frequencies.dot_products.draw import (
    DotProductDraw,
    draw_harmonics,
    lifted_leaf,
)

__all__ = ["DotProductDraw", "draw_harmonics", "lifted_leaf"]
