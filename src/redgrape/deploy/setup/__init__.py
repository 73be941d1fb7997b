"""The folders of a deployment: made, described, checked."""
