"""Repeated positions: which records belong to one site, their means and scatter, and copies."""
