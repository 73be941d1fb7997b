"""Models that leave a run: export, card, inference."""
