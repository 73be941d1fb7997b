"""Suites: many runs that make one table or figure, those of the paper by name and the user's own grids."""
