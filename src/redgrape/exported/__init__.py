"""Exported models: export, model card, inference."""
