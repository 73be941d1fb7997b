"""The commands. Each module is imported only when one of its commands is called, so the others start fast."""
