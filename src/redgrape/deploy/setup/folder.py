"""The files of a deployment. The server has all of them; each site receives its own folder.

    deploy.toml                  who takes part, where the server listens, what the data looks like, deadlines
    experiment.toml              what `redgrape deploy run` runs
    app/                         the Flower app
    server/                      ca.crt, ca.key, server.crt, server.key, start.sh; later the server's own files
    sites/NAME/                  site.toml, ca.crt, key, key.pub, start.sh, README.md
    runs/                        run folders, like those of `redgrape run`

Only their owner can read keys.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from redgrape.data.columns import Column, Columns
from redgrape.errors import ConfigError
from redgrape.runs.values import read_toml
from redgrape.validation import Strict, as_tuple, one_line

FEWEST_IN_SUM = 3  # sites in a secure sum
WHY_THREE = "with two, each learns from the sum what the other sent"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
ALLOWED = "allowed"  # the section of site.toml
FILES = "files"  # in a site's folder: its own copies of code and weights that experiments name
_Folder = TypeVar("_Folder", bound="_Described")


def _site_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name[:40]}' is no name for a site; use letters, digits, '-' and '_'")
    return name


def _host(host: str) -> str:
    """An IP address, or a name as in RFC 1123, in which the last part is not a number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdecimal():
            raise ValueError(f"'{host[:80]}' is no name of a host and no address") from None
    return host


def _each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("something is named twice")
    return values


Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
    BeforeValidator(as_tuple),
    AfterValidator(_each_once),
]
SiteName = Annotated[str, AfterValidator(_site_name)]
Host = Annotated[str, AfterValidator(_host)]


class DataAgreement(Strict):
    """What all sites' data must look like."""

    classes: Names = Field(description="the names of all classes, in order", min_length=2)
    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(as_tuple)] = Field(
        description="the shape of an input: channels, height and width of an image, or the length of a vector",
        min_length=1,
    )
    input: Literal["uint8", "float", "table"] = Field("uint8", description="uint8 pixels, numbers, or rows of a table")
    image_size: int | None = Field(None, ge=1, description="resize the images of folders to this many pixels square")
    label: str | None = Field(None, description="the column of a table that holds the classes")
    numbers: Names = Field((), description="the columns of a table that hold numbers")
    categories: dict[str, Names] = Field(
        default_factory=dict, description="the columns of a table that hold categories, and all their categories"
    )

    @model_validator(mode="after")
    def _columns_give_the_shape(self) -> Self:
        if (self.input == "table") != (self.label is not None):
            raise ValueError("label names the column of classes of a table, for input = 'table' and nothing else")
        if self.label is not None and (width := self.columns().width) != math.prod(self.shape):
            raise ValueError(f"the columns give {width} inputs, and shape is {list(self.shape)}")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The keys of tables are there only for tables."""
        return {k: v for k, v in dump(self).items() if self.label or k not in ("label", "numbers", "categories")}

    def columns(self) -> Columns:
        """The columns of a table before they are scaled. So that all sites give the same inputs, each has one for `is
        missing`, and all agreed categories."""
        kinds = [(name, None) for name in self.numbers] + [
            (name, list(c)) for name, c in sorted(self.categories.items())
        ]
        columns = [Column(name=name, can_be_missing=True, categories=categories) for name, categories in kinds]
        return Columns(label=str(self.label), columns=columns)


class Deadlines(Strict):
    """Deadlines in seconds. Every wait has one."""

    join: float = Field(300.0, gt=0, allow_inf_nan=False, description="seconds for the sites of a round to connect")
    round: float = Field(3600.0, gt=0, allow_inf_nan=False, description="seconds for a site's update")
    evaluate: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="seconds for a site's evaluation, or another answer"
    )


class _Described(Strict):
    @classmethod
    def read(cls: type[_Folder], path: Path) -> _Folder:
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            raise ConfigError(f"'{path}': {one_line(error, cls)}") from error

    def to_toml(self) -> str:
        """Every key under its description, for a person who reads the file."""
        model: type[BaseModel] = type(self)
        lines: list[str] = []
        for line in tomli_w.dumps(self.model_dump(mode="json", exclude_none=True)).splitlines():
            if table := re.fullmatch(r"\[(\w+)\]", line):
                field = type(self).model_fields[table[1]]
                of_keys = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
                model = cast("type[BaseModel]", field.annotation) if of_keys else BaseModel
                lines += [f"# {field.description}"] if field.description else []
            elif (key := line.partition(" = ")[0]) in model.model_fields:
                words = model.model_fields[key].description
                lines += [f"# {words}"] if words else []
            lines.append(line)
        return "\n".join(lines) + "\n"


class DeployOptions(_Described):
    """deploy.toml: the server's description of a deployment."""

    sites: Annotated[tuple[SiteName, ...], BeforeValidator(as_tuple), AfterValidator(_each_once)] = Field(
        description="the names of the sites, in order", min_length=1
    )
    host: Host = Field(description="the name or address by which the sites reach the server")
    port: int = Field(8443, ge=1, le=65535, description="the port of the server")
    bind: Host = Field(description="the address of this machine that the server listens on")
    plain: bool = Field(False, description="no TLS and no keys; on this machine only")
    test: str | None = Field(None, description="the server's test set: a folder of images or an .npz file")
    auxiliary: str | None = Field(None, description="the server's small balanced set, for methods that need one")
    tail: Names = Field((), description="classes that count as the tail in reports; the others are the head")
    secure_aggregation: bool = Field(False, description="the server sees only sums over the sites, no single update")
    class_rows: bool = Field(False, description="run methods that send a row for each class; each site must allow it")
    min_count: int = Field(8, ge=1, description="sites send no row of a class with fewer examples than this")
    min_clients: int = Field(3, ge=1, description="no row of a class is released if fewer sites send one")
    data: DataAgreement
    deadlines: Deadlines = Field(default_factory=Deadlines)

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.plain and not (is_loopback(self.bind) and is_loopback(self.host)):
            raise ValueError(
                f"plain is set, and the server would listen on '{self.bind}' for '{self.host}'; without TLS only "
                "127.0.0.1, ::1 or localhost is allowed"
            )
        if self.secure_aggregation and len(self.sites) < FEWEST_IN_SUM:
            raise ValueError(
                f"secure_aggregation needs at least {FEWEST_IN_SUM} sites, and there are {len(self.sites)}: {WHY_THREE}"
            )
        if unknown := set(self.tail) - set(self.data.classes):
            raise ValueError(f"tail names '{min(unknown)}', which is none of the classes")
        return self

    @property
    def address(self) -> str:
        return address(self.host, self.port)


class SiteOptions(_Described):
    """site.toml: what one site knows about the deployment, and its policy, that is, what it takes part in. The site
    reads it when it starts. Nothing that the server sends changes it."""

    name: SiteName = Field(description="the name of this site")
    index: int = Field(ge=0, description="its number, from 0")
    sites: int = Field(ge=1, description="the number of sites")
    server: str = Field(min_length=3, description="host:port of the server")
    plain: bool = Field(False, description="no TLS and no keys; on this machine only")
    app: str = Field(pattern="^[0-9a-f]{64}$", description="the SHA-256 of the Flower app; no other is run here")
    evaluates: bool = Field(description="whether models are evaluated at the sites; each then holds out a test set")
    secure_aggregation: bool = Field(
        False, description="policy: answer only in secure sums, in which the server sees no update of this site alone"
    )
    class_rows: bool = Field(
        False, description="policy: send a row for each class, such as RedGrape's prototypes, if a method asks for it"
    )
    min_count: int = Field(8, ge=1, description="policy: send no row of a class with fewer examples than this")
    min_clients: int = Field(3, ge=1, description="policy: no row of a class may be released if fewer sites send one")
    data: DataAgreement
    allowed: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(
        default_factory=dict,
        description="policy: code in files/ that may run here, and encoders of other packages, with their SHA-256",
    )

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.plain and not is_loopback(self.server.rpartition(":")[0].strip("[]")):
            raise ValueError(
                f"plain is set, and the server is '{self.server}'; without TLS only this machine is allowed"
            )
        if self.index >= self.sites:
            raise ValueError(f"index is {self.index}, and there are {self.sites} sites")
        return self


def policy_in_words(options: SiteOptions) -> str:
    """A site's policy in one line, for its engineer."""
    sums = "answers only in secure sums" if options.secure_aggregation else "sends its own update, without secure sums"
    code = f"; may run {', '.join(options.allowed)}" if options.allowed else ""
    return f"{sums}; {'sends class rows' if options.class_rows else 'sends no class rows'}{code}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_everywhere(bind: str) -> bool:
    """Whether it means all addresses of the machine, which must be asked for explicitly."""
    try:
        return ipaddress.ip_address(bind).is_unspecified
    except ValueError:
        return False


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Deployment:
    """The server's folder."""

    def __init__(self, path: Path) -> None:
        if not (path / "deploy.toml").is_file():
            is_site = (path / "site.toml").is_file()
            hint = "it is a site's folder; name the server's" if is_site else f"`redgrape deploy init {path}` makes one"
            raise ConfigError(f"'{path}' has no deploy.toml; {hint}")
        self.path = path.resolve()
        self.options = DeployOptions.read(path / "deploy.toml")

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def flower_home(self) -> Path:
        return self.server / "flower"

    def site(self, name: str) -> Path:
        return self.path / "sites" / name


class SiteFolder:
    """A site's folder."""

    def __init__(self, path: Path) -> None:
        if not (path / "site.toml").is_file():
            hint = f"; name one of its sites, such as {path}/sites/NAME" if (path / "deploy.toml").is_file() else ""
            raise ConfigError(f"'{path}' has no site.toml{hint or '; ask the server for the folder of your site'}")
        self.path = path.resolve()
        self.options = SiteOptions.read(path / "site.toml")

    @property
    def key(self) -> Path:
        return self.path / "key"

    @property
    def authority(self) -> Path:
        return self.path / "ca.crt"

    @property
    def flower_home(self) -> Path:
        return self.path / "flower"

    @property
    def states(self) -> Path:
        return self.path / "states"

    @property
    def cache(self) -> Path:
        return self.path / "cache"


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from the first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
