"""The contract that every method keeps, as checks for anybody's method: `check_method(MyMethod)`.

`CHECKS` holds the clauses of the contract by name, so that a test suite can run them one at a time:

    @pytest.mark.parametrize("clause", redgrape.testing.CHECKS)
    def test_my_method(clause):
        redgrape.testing.CHECKS[clause](MyMethod())

A method is checked with its own hyper-parameters, except that it trains one epoch in batches of four, because the data
are tiny, and does less of what only costs time (`Method.cheap`). A broken clause raises AssertionError with a sentence
that says what is broken, and where the method raised what it did not expect.
"""

from __future__ import annotations

from collections.abc import Sequence

from redgrape.method import Method
from redgrape.testing.clauses import CHECKS as CHECKS
from redgrape.testing.clauses import EXCHANGES as EXCHANGES
from redgrape.testing.clauses import check_runs


def check_method(method: type[Method] | Method, *, workers: Sequence[int] = (1, 2)) -> None:
    """Raise AssertionError at the first clause of the contract that the method breaks.

    Pass the class where the defaults of its hyper-parameters are to be checked, else an instance. `workers`: the sizes
    of the pools of worker processes whose results must equal those of this process; the class must be importable there.
    """
    instance = method() if isinstance(method, type) else method
    check_runs(instance)
    for name, check in CHECKS.items():
        check(instance, *([workers] if name == "engines_agree" else []))
