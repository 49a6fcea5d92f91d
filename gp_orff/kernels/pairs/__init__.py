"""Covariances between observed numbers: −∇∇ᵀk, and vᵀK(x, z)w for directions v and w."""
