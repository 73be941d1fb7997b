"""What the commands do. Each module is imported when one of its commands is called, so that the others start fast."""
