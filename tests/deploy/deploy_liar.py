"""A site's resident process that lies, for tests: its first word tells how, from its second round on."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from redgrape import tree
from redgrape.cli import main as cli
from redgrape.deploy.processes import resident
from redgrape.deploy.processes.site_role import SiteRole
from redgrape.deploy.protocol.site import DeployedSite


def _changed(flat: dict[str, torch.Tensor], lie: str) -> dict[str, torch.Tensor]:
    first = next(name for name in flat if name.startswith("delta/"))
    match lie:
        case "nan":
            return {**flat, first: torch.full_like(flat[first], torch.nan)}
        case "shape":
            return {**flat, first: flat[first][:1]}
        case "huge":
            return {name: t * 1e12 if name.startswith("delta/") else t for name, t in flat.items()}
        case "turned":
            turned = ("prototypes/weight", "prototypes/bias")
            return {name: -t if name in turned else t for name, t in flat.items()}
        case "turned weights":
            return {**flat, "prototypes/weight": -flat["prototypes/weight"]}
        case "count":
            return {**flat, "count": flat["count"] * 1000}
    raise AssertionError(lie)


class Liar(DeployedSite):
    def answer(self, header: Any, parts: Any) -> Any:
        back, sent = super().answer(header, parts)
        lie = os.environ["REDGRAPE_TEST_LIE"]
        if header["kind"] == "train" and header["round"] > 1 and "update" in sent:
            if lie == "garbage":
                return back, {"update": b"no tensors at all"}
            if lie == "stale":
                return back | {"round": header["round"] - 1}, sent
            flat = tree.flatten(tree.from_bytes(sent["update"]))
            return back, {"update": tree.to_bytes(tree.unflatten(_changed(flat, lie)))}
        return back, sent


if __name__ == "__main__":
    if sys.argv[1] == "site":  # as the command would, but for the resident process
        SiteRole.resident = (sys.executable, __file__)
        cli.main(["deploy", *sys.argv[1:]])
    resident.DeployedSite = Liar
    resident.main()
