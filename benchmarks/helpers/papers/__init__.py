"""Code that several experiments of the papers use."""
