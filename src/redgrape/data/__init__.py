"""Data: sources, long tails, partitions, and the federation they make."""
