"""Runs as a page for people: one HTML file that works offline (`report`), or live while they train (`serve`)."""
