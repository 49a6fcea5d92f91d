"""The algebra of separable kernels: A = I + C⊗G by blocks I + λ_j C."""
