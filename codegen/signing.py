"""Signs and checks the bytes of a manifest with ed25519 (RFC 8032). Everything else in a bundle hangs on its hashes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treadle.ir.errors import BundleError, ConfigError

_MAKE_KEYS = (
    "make a pair with `openssl genpkey -algorithm ed25519 -out key.pem` and `openssl pkey -in key.pem -pubout -out pub.pem`"
)


def sign(data: bytes, key_file: Path) -> bytes:
    """One line of base64. Raises ConfigError unless `key_file` is an unencrypted ed25519 private key in PEM form."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _load(key_file, lambda pem: load_pem_private_key(pem, password=None), "private")
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{key_file} is not an ed25519 private key; {_MAKE_KEYS}")
    return base64.b64encode(key.sign(data)) + b"\n"


def check_signature(data: bytes, signature: bytes, key_file: Path, where: str) -> None:
    """Raises BundleError if `signature` was not made over `data` with the key that `key_file` (PEM, public) belongs to."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _load(key_file, load_pem_public_key, "public")
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{key_file} is not an ed25519 public key; {_MAKE_KEYS}")
    try:
        key.verify(base64.b64decode(signature.strip(), validate=True), data)
    except binascii.Error as error:
        raise BundleError(f"{where}: its signature is damaged; compile and sign it again") from error
    except InvalidSignature as error:
        raise BundleError(
            f"{where}: its signature was not made with the key of {key_file.name}, or the manifest was changed since; "
            "use the signer's public key or compile and sign it again"
        ) from error


def _load(path: Path, parse: Callable[[bytes], Any], kind: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return parse(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} key {path}: {error.strerror}; {_MAKE_KEYS}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not an unencrypted {kind} key in PEM form; {_MAKE_KEYS}") from error
