"""The command privacy."""

from __future__ import annotations

import argparse
import json
import textwrap

from redgrape.privacy.disclosure import disclosed, in_words
from redgrape.reading.run_view import RunView
from redgrape.reading.terminal import printable


def privacy(options: argparse.Namespace) -> None:
    """Report what each party could learn from a run."""
    facts = disclosed(RunView.read(options.run))
    if options.json:
        print(json.dumps(facts))
        return
    method, rounds = printable(facts["method"]), facts["rounds"]
    print(f"what each party could learn from {printable(facts['run'])}")
    print(f"({method}, preset {printable(facts['preset'])}, {rounds} rounds)")
    for party, sentences in in_words(facts).items():
        print(f"\n{party}")
        for sentence in sentences:
            print(textwrap.fill(printable(sentence), 110, initial_indent="- ", subsequent_indent="  "))
