"""The command privacy."""

from __future__ import annotations

import argparse
import json

from redgrape.reading.learned import disclosed
from redgrape.reading.learned_in_words import in_words
from redgrape.reading.run_view import RunView
from redgrape.reading.terminal import paragraph


def privacy(options: argparse.Namespace) -> None:
    """Report what each party could learn from a run."""
    facts = disclosed(RunView.read(options.run))
    if options.json:
        print(json.dumps(facts))
        return
    print(paragraph(f"what each party could learn from {facts['run']}", "  "))
    print(paragraph(f"({facts['method']}, preset {facts['preset']}, {facts['rounds']} rounds)", "  "))
    for party, sentences in in_words(facts).items():
        print(f"\n{party}")
        for sentence in sentences:
            print(paragraph(f"- {sentence}", "  "))
