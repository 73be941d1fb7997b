"""Runs as a web page: one HTML file that works offline (`report`), or a live view during training (`serve`)."""
