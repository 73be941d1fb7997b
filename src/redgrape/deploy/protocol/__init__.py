"""What server and sites ask and answer, and what each side does with it; no process is started here."""
