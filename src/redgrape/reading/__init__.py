"""From run folders to tables, charts and pages."""
