"""A deployment's certificate authority, the server's certificate, and a key for each site.

The authority signs only the server's certificate. A site proves its identity by its own key, which the server knows.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from redgrape.errors import ConfigError

PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey
Certificate: TypeAlias = x509.Certificate

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
_SKEW = datetime.timedelta(hours=1)  # the sites' clocks may be behind


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def authority(key: PrivateKey) -> Certificate:
    """The deployment's own certificate authority, self-signed, which cannot sign another authority."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "redgrape deployment")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def server_certificate(
    key: PrivateKey,
    hosts: list[str],
    signer: Certificate,
    signing_key: PrivateKey,
    days: int = SERVER_DAYS,
) -> Certificate:
    """The server's certificate for these names and addresses."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    alternatives = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key())
    return (
        _builder(name, signer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(signing_key, hashes.SHA384())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    begin = now - _SKEW if days > 0 else now + datetime.timedelta(days=days - 1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def load_authority(key_file: Path, certificate_file: Path) -> tuple[PrivateKey, Certificate]:
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"'{key_file}' or '{certificate_file}' cannot be read ({error}); put them back") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"'{key_file}' is not the key of '{certificate_file}'; put the right one back")
    return key, certificate


def certificate_bytes(certificate: Certificate) -> bytes:
    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def private_bytes(key: PrivateKey) -> bytes:
    """The private key in the form for a TLS server."""
    plain = serialization.NoEncryption()
    return bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


def site_key_bytes(key: PrivateKey) -> tuple[bytes, bytes]:
    """A site's private and public key, in OpenSSH's format, which Flower reads."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b"\n"


def public_identity(key_file: Path) -> bytes:
    """A site's public key in the form by which Flower identifies a node."""
    return _identity(serialization.load_ssh_public_key(key_file.read_bytes()))


def private_identity(key_file: Path) -> bytes:
    """The same, from the private key."""
    return _identity(serialization.load_ssh_private_key(key_file.read_bytes(), None).public_key())


def _identity(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("it is not an elliptic-curve key")
    return bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))


def days_left(certificate_file: Path) -> float:
    """Days until a certificate expires, below 0 if it has expired; ConfigError if it cannot be read."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{certificate_file}' cannot be read as a certificate ({error}); put it back") from error
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_before_utc > now:
        raise ConfigError(
            f"'{certificate_file}' is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, and the "
            f"clock here says {now:%Y-%m-%d %H:%M}; set the clock"
        )
    return float((certificate.not_valid_after_utc - now).total_seconds()) / 86400


def is_for(certificate_file: Path, host: str) -> bool:
    """Whether it is the certificate of this name or address."""
    extensions = x509.load_pem_x509_certificate(certificate_file.read_bytes()).extensions
    return _general_name(host) in extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def check_private(key_file: Path) -> None:
    """Raise ConfigError if anyone but the owner could read the key."""
    try:
        mode = key_file.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(f"cannot read the key '{key_file}': {error.strerror}; put it back") from error
    if os.name == "posix" and mode & 0o077:
        raise ConfigError(f"others can read the key '{key_file}' (mode {mode:o}); run `chmod 600 {key_file}`")
