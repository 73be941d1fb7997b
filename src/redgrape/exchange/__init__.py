"""The exchange between client and server: the parts of an update, and how they are checked, protected and reduced."""

from __future__ import annotations

from redgrape.exchange.exchange import Exchange as Exchange
from redgrape.exchange.parts import ClassRows as ClassRows
from redgrape.exchange.parts import Count as Count
from redgrape.exchange.parts import Direction as Direction
from redgrape.exchange.parts import Part as Part
from redgrape.exchange.parts import Parts as Parts
from redgrape.exchange.parts import Scalar as Scalar
from redgrape.exchange.parts import Statistics as Statistics
from redgrape.exchange.parts import Sum as Sum
from redgrape.exchange.parts import Weight as Weight
from redgrape.exchange.received import Received as Received
