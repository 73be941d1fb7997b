"""What a run discloses: noise, its accounting, the ledger of epsilon, and what each party could learn."""
