"""Runs: the experiment, its folder, checkpoints and client states."""
