"""Features f(x) = Σ_f θ_f φ_f(x) m_f: frequencies, columns φ, directions m, truncated variance."""
