"""Which sites have joined, what each has declared, and which nodes are refused.

The key identifies a site. What the site says about itself when it joins must agree with it. Until then nothing of the
model is sent to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

import redgrape
from redgrape.data.federation import Declared
from redgrape.deploy.protocol.messages import JoinAnswer, JoinQuestion, Letter
from redgrape.deploy.protocol.transport import NoAnswer, Transport
from redgrape.deploy.setup.folder import DeployOptions
from redgrape.exchange.checks import MOST_EXAMPLES, UNDECLARED, UpdateRejected
from redgrape.method import ClientId

NODES = 1.0  # seconds between two checks for new sites
JOIN = 30.0  # seconds for a node to identify itself


class _Member(NamedTuple):
    """A node that has joined as a site, and the time of its connection."""

    site: ClientId
    since: str


class Members:
    """`joined`: receives what each site declares. `keys`: the public key of each site; None if nodes are not
    authenticated. `declared`: what sites declared when they first joined a continued run, by name. `record`: called
    with what a site declares when it joins."""

    def __init__(
        self,
        transport: Transport,
        options: DeployOptions,
        joined: dict[ClientId, Declared],
        keys: Sequence[bytes] | None,
        say: Callable[[str], None],
        declared: Mapping[str, Mapping[str, Any]],
        record: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._transport, self._options, self._joined, self._keys = transport, options, joined, keys
        self._say, self._record = say, record
        self._waited = False  # whether all sites were waited for once
        self._declared: dict[str, dict[str, int]] = {
            name: {key: said[key] for key in ("examples", "tests")}
            for name, said in declared.items()
            if "examples" in said
        }
        self._shares_reported = True
        self._members: dict[int, _Member] = {}  # by node id
        self._refused: dict[int, str] = {}  # by node id: the time of the connection
        self._failed: dict[int, str] = {}  # by node id: why it was asked again

    def name(self, k: ClientId) -> str:
        return self._options.sites[k]

    def tests(self, k: ClientId) -> int:
        """The number of test examples that the site declared."""
        return self._declared[self.name(k)]["tests"]

    def connected(self, sites: Iterable[ClientId], fewest: int) -> dict[ClientId, int]:
        """The nodes of these sites. The first call waits for all of them, so that a run continues with the same sites.
        Later calls wait only until `fewest` are there. The wait has a deadline."""
        wanted, ends, announced = set(sites), time.monotonic() + self._options.deadlines.join, False
        while True:
            there = {k: node for k, node in self._join().items() if k in wanted}
            enough = len(there) >= (min(fewest, len(wanted)) if self._waited else len(wanted))
            if enough or time.monotonic() >= ends:
                self._waited = True
                if not self._shares_reported:
                    self._report_shares()
                return there
            if not announced:
                self._say(f"waiting for {', '.join(self.name(k) for k in sorted(wanted - there.keys()))}")
                announced = True
            time.sleep(NODES)

    def _join(self) -> dict[ClientId, int]:
        """The connected sites. A node that is new, or was away, is asked who it is."""
        nodes = self._transport.nodes()
        self._members = {i: m for i, m in self._members.items() if i in nodes and m.since == nodes[i].last_activated_at}
        new = [i for i in nodes if i not in self._members and self._refused.get(i) != nodes[i].last_activated_at]
        question = JoinQuestion(deadline=JOIN, secure_aggregation=self._options.secure_aggregation)
        letters: dict[int, Letter] = {i: (question, {}) for i in new}
        for i, reply in self._transport.ask(letters, JoinAnswer):
            if isinstance(reply, NoAnswer) and reply.again:
                if self._failed.get(i) != reply.reason:
                    self._failed[i] = reply.reason
                    self._say(f"{self._by_key(nodes[i])} {reply.reason}; asking it again who it is")
                continue
            try:
                if isinstance(reply, NoAnswer):
                    raise UpdateRejected(f"{self._by_key(nodes[i])} {reply.reason}")
                self._admit(nodes[i], reply.answer)
            except UpdateRejected as reason:
                self._refused[i] = nodes[i].last_activated_at
                self._say(f"a node is refused: {reason}")
            else:
                self._members[i] = _Member(reply.answer.site, nodes[i].last_activated_at)
        return {member.site: i for i, member in self._members.items()}

    def _by_key(self, node: Any) -> str:
        """The name for a node that has not identified itself yet."""
        if self._keys is None or node.public_key not in self._keys:
            return "a node"
        return f"site '{self.name(self._keys.index(node.public_key))}'"

    def _admit(self, node: Any, said: JoinAnswer) -> None:
        """Record what the site declares; UpdateRejected if the node cannot be the site that it says it is."""
        k, sites = said.site, self._options.sites
        if not 0 <= k < len(sites):
            raise UpdateRejected(f"it says that it is site {k}, but there are {len(sites)} sites")
        name = self.name(k)
        if self._keys is not None and node.public_key != self._keys[k]:
            whose = self._keys.index(node.public_key) if node.public_key in self._keys else None
            owner = "nobody here" if whose is None else f"'{self.name(whose)}'"
            raise UpdateRejected(f"it says that it is site '{name}', but its key is that of {owner}")
        if any(member.site == k for member in self._members.values()):
            raise UpdateRejected(f"site '{name}' is connected already")
        agreed = self._options.data.model_dump(mode="json")
        both = {
            "number of sites": (said.sites, len(sites)),
            "where models are evaluated": (said.evaluates, self._options.test is None),
            "secure_aggregation": (said.secure_aggregation, self._options.secure_aggregation),
            "data": (said.agreement.keys(), agreed.keys()),
            **{key: (said.agreement.get(key), value) for key, value in agreed.items()},
        }
        if different := [what for what, (theirs, ours) in both.items() if theirs != ours]:
            raise UpdateRejected(
                f"site '{name}' and the server do not agree on {', '.join(different)}: compare its site.toml with "
                "deploy.toml"
            )
        if said.redgrape != redgrape.__version__:
            raise UpdateRejected(
                f"site '{name}' has redgrape {said.redgrape[:40]}, and the server {redgrape.__version__}; install the "
                "same"
            )
        versions = {key: str(getattr(said, key))[:40] for key in ("redgrape", "torch", "numpy", "machine", "cpu")}
        facts = self._declare(said) | versions
        self._record(name, facts)
        self._say(f"site '{name}' has joined ({json.dumps(facts)})")
        for package, here in (("torch", torch.__version__), ("numpy", np.__version__)):
            if versions[package] != here:
                self._say(f"site '{name}' has {package} {versions[package]}, and the server {here}: bits may differ")

    def _declare(self, said: JoinAnswer) -> dict[str, Any]:
        """Hold a site to the numbers of training and test examples that it declared when it first joined the run. They
        are its weights in averages and evaluations. With secure sums it declares none."""
        k, name = said.site, self.name(said.site)
        if self._options.secure_aggregation:
            self._joined[k] = replace(UNDECLARED, name=f"site '{name}'")
            return {}
        if said.examples is None or not 1 <= said.examples <= MOST_EXAMPLES:
            raise UpdateRejected(f"site '{name}' declares {said.examples} examples, which is not possible")
        if said.tests is None or not 0 <= said.tests <= MOST_EXAMPLES:
            raise UpdateRejected(f"site '{name}' declares {said.tests} tests, which is not possible")
        first = self._declared.setdefault(name, {"examples": said.examples, "tests": said.tests})
        if said.examples > first["examples"] or said.tests != first["tests"]:
            raise UpdateRejected(
                f"site '{name}' joined this run with {first['examples']} examples and {first['tests']} to test on, but "
                f"now declares {said.examples} and {said.tests}; put its data back, or start a new run"
            )
        if k not in self._joined:
            self._joined[k] = Declared(first["examples"], name=f"site '{name}'")
            self._shares_reported = False
        return dict(first)

    def _report_shares(self) -> None:
        """Report what each site declared, and a site that decides the average alone."""
        self._shares_reported = True
        for key, what in (("examples", "in averages"), ("tests", "in evaluations")):
            numbers = {self.name(k): self._declared[self.name(k)][key] for k in sorted(self._joined)}
            if not (total := sum(numbers.values())):
                continue
            words = ", ".join(f"{name} {n} ({n / total:.0%})" for name, n in numbers.items())
            self._say(f"{key} that sites have declared: {words}")
            name, most = max(numbers.items(), key=lambda item: item[1])
            if 2 * most > total and len(numbers) > 1:
                self._say(f"site '{name}' has declared more {key} than all others together, and decides {what}")
