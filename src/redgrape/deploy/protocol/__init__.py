"""What server and sites say to each other, and what each of them does with it."""
