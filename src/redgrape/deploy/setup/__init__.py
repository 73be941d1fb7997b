"""The folders of a deployment with their keys and data: how they are made, read and checked."""
