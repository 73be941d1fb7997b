"""Suites: sets of runs behind one table or figure, either named suites of the paper or the user's own grids."""
