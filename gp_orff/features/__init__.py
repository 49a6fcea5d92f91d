"""f(x) = Σ_f θ_f · φ_f(x) · m_f: frequencies, columns, features, and what they leave out."""
