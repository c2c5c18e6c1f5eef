"""TLS by a certificate and a key, read before a model is loaded."""

import ssl
from pathlib import Path

from twostroke.errors import InvalidRequest


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """What serves TLS; None where neither file is given.

    Args:
        certificate: PEM file with the certificate and those that lead to a root; it may hold the key too.
        key: PEM file with the key, without a passphrase.

    Raises InvalidRequest, one line that names the file: it is missing, no PEM, has a passphrase, or they do not match.
    """
    if certificate is None:
        if key is not None:
            raise InvalidRequest("--ssl-keyfile needs --ssl-certfile: give the certificate of the key too")
        return None
    for option, file in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if file is not None:
            _require_readable(option, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    paths = [str(Path(file).expanduser()) for file in (certificate, key) if file is not None]
    asked: list[bool] = []

    def no_passphrase() -> str:  # OpenSSL would ask at the terminal
        asked.append(True)
        return ""

    try:
        context.load_cert_chain(*paths, password=no_passphrase)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise InvalidRequest(_reason(error, certificate, key, has_passphrase=bool(asked))) from None
    return context


def _require_readable(option: str, file: str) -> None:
    try:
        Path(file).expanduser().open("rb").close()
    except OSError as error:
        raise InvalidRequest(f"{option}: {file} cannot be read ({error.strerror})") from None


def _reason(error: Exception, certificate: str, key: str | None, *, has_passphrase: bool) -> str:
    named = key or certificate
    if has_passphrase:
        return f"{named} has a passphrase: write the key without one (openssl pkey), readable by this user alone"
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"the key in {named} is not that of the certificate in {certificate}: give a pair"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(str(Path(certificate).expanduser()))
    except (ssl.SSLError, OSError):
        return f"--ssl-certfile: {certificate} has no certificate in PEM form"
    if key is None:
        return f"{certificate} has no key: give its file with --ssl-keyfile"
    return f"--ssl-keyfile: {key} has no private key in PEM form"
