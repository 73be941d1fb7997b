"""What a run gives away: noise, its account, the ledger of epsilon, and what each party could learn."""
