"""The README.md of each party: what it is to do, and, for a site, what leaves it."""

from __future__ import annotations

from redgrape.data.federation import MANY
from redgrape.data.table import SUFFIXES
from redgrape.deploy.setup.folder import DataAgreement, DeployOptions, SiteOptions
from redgrape.learning.sums import DENSE

_SERVER_README = """\
# A deployment of redgrape

Sites: {sites}. Server: {address}, listening on {bind}.

1. Give each site its folder below `sites/`, over a channel that only the two of you can read: it holds the site's key.
   You may delete it here afterwards, but keep `sites/NAME/key.pub`, by which the server knows the site.
2. `redgrape deploy server .` (or `server/start.sh`) starts the server and stays in the foreground.
3. Every site starts its own part.
4. `redgrape deploy status .` shows who is connected; `redgrape deploy run .` runs `experiment.toml`. The run folder
   appears below `runs/`. After an interruption, the same command continues from the last finished round.
5. `redgrape doctor .` looks for problems.

`server/ca.key` signs certificates that all sites trust: keep it secret.
"""

_SITE_README = """\
# Site {name}

Your data stays on your machine. You need Python 3.11 or newer, this folder, and an outgoing connection to {address}
(TCP). Nobody connects to you.

1. Install: `pip install -e '.[flower,images]'` in a clone of redgrape, in the same
   version as the server.
2. Check your setup: `redgrape doctor . --data PATH`.
3. Start: `redgrape deploy site . --data PATH` (or `./start.sh PATH`), and leave it running. It reconnects by itself.
   Ctrl-C ends it; start it again whenever you like: your site is known by its key. During a run some methods need all
   sites, and stop without yours.

PATH is {path}. The classes are: {classes}. You need not hold all of them.{input}{evaluation}

What leaves your site:

{leaves}

What your site takes part in is its policy, in `site.toml` (`secure_aggregation`, `class_rows`, `min_count`,
`min_clients`). It is enforced here, whatever the server asks for. Your site refuses what the policy does not allow, and
tells you why. To change the policy, edit `site.toml` and start the site again. Within it the server chooses the method
and its settings. It also sends the Flower app, which is code: only the app with the SHA-256 `app` in `site.toml` runs
here. No other code is sent. If an experiment needs code of its own, your site runs your copy in `files/`, and only if
`[allowed]` in `site.toml` has its name and SHA-256.

`key` is your site's key: keep it secret, readable only by you. `states/` holds what your site must remember between
rounds: keep it during a run.
"""

_LEAVES = """\
- in each round your update of the model (with some methods also a second one of its size, such as that of
  SCAFFOLD's control variates), the number of your examples and your mean training loss; such an update often
  discloses which classes you hold, and nearly the features of an example that is the only one of its class;
- {rows};
- if a method asks for it before the first round, how many examples of each class you hold, or which: {counts};
- {evaluation};
- who you are: the name of your site, the versions of redgrape, torch and numpy, and the kind of processor;
- that something failed, and what kind of failure it was; what it was exactly is in `resident.log`, which stays here."""

_COLUMNS = """\
- before the first round, for each column of numbers, how many you know, their sum and the sum of their squares;"""

_MASKED = """

All but the last two are masked, so that the server can read only the sum over all sites (secure aggregation)."""

_ROWS = """\
with RedGrape and CReFF a mean gradient for each class of which you hold at least {min_count} examples, with FedNH and
  RUCR a mean of its features, and so which these classes are; with some settings also how many examples of them you
  hold"""

_ARRAYS = """\
a folder with a sub-folder for each class, or an `.npz` file with `x`, `y` and, if classes are not simply
numbered, `class_names`"""


def for_server(options: DeployOptions) -> str:
    return _SERVER_README.format(sites=", ".join(options.sites), address=options.address, bind=options.bind)


def for_site(site: SiteOptions) -> str:
    held_out = "\nModels are evaluated at the sites: of data without a test set a fifth is held out for that."
    return _SITE_README.format(
        name=site.name,
        address=site.server,
        classes=", ".join(site.data.classes),
        **_data_in_words(site.data),
        evaluation=held_out if site.evaluates else "",
        leaves=_leaves(site),
    )


def _data_in_words(data: DataAgreement) -> dict[str, str]:
    if data.label is None:
        kind = "pixels as uint8" if data.input == "uint8" else "numbers"
        return {"path": _ARRAYS, "input": f" An input has the shape\n{' x '.join(map(str, data.shape))} ({kind})."}
    columns = [f"- {name}: numbers" for name in data.numbers]
    columns += [f"- {name}: one of {', '.join(categories)}" for name, categories in data.categories.items()]
    said = "\n".join(
        ["", "", "An empty cell is a missing value. Columns that are not listed here are not read:", "", *columns, ""]
    )
    return {"path": f"a table ({', '.join(SUFFIXES)}) with the classes in the column `{data.label}`", "input": said}


def _leaves(site: SiteOptions) -> str:
    """What leaves a site, for its engineer."""
    unrestricted = site.secure_aggregation or site.min_count == 1
    counts = "your site answers" if unrestricted else f"your site refuses, because its min_count is {site.min_count}"
    floor = "" if unrestricted else f", for the classes of which you train with at least {site.min_count} examples"
    classes = len(site.data.classes)
    pairs = "which class of your test set was taken for which"
    counted = pairs if classes <= DENSE else "each class of your test set was tested, recognised and predicted"
    near = ", how often it was among the five most probable" if classes >= MANY else ""
    evaluation = (
        f"in an evaluation how often {counted}{near}, and the loss{floor}"
        if site.evaluates
        else "nothing of a test set: models are evaluated at the server"
    )
    rows = _ROWS.format(min_count=site.min_count) if site.class_rows else "no row of a class: your site refuses"
    words = _LEAVES.format(rows=rows, counts=counts, evaluation=evaluation)
    words = words if site.data.label is None else f"{_COLUMNS}\n{words}"
    return words + _MASKED if site.secure_aggregation else words
