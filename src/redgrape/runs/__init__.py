"""An experiment carried out in its folder: description, files, checkpoints, client states."""
