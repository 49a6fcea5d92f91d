"""What was observed: y = H f + noise, and its sufficient statistics."""
