"""Checks how long the TLS certificates that a config names are valid."""

import contextlib
import os
import time
from pathlib import Path

from understudy.core.errors import ConfigError
from understudy.core.location import parse_location
from understudy.platform.config import Config

_NOTICE_S = 14 * 24 * 3600.0
"""How long before its end a certificate is reported."""


def certificates(config: Config) -> list[Path]:
    """The files with the certificates of the gateway, and of this machine as a client."""
    names = [config.gateway.certificate]
    for url in (config.stream.url, config.store.url):
        with contextlib.suppress(ConfigError):  # in the data folder, or reported by others
            names.append(parse_location(url).options.get("certificate", ""))
    return [Path(os.path.expanduser(name)) for name in names if name]


def check_certificate(path: Path, *, now_s: float) -> tuple[bool, str]:
    """Whether a certificate is valid now; and what to do if it is not, or not for much longer."""
    # Imported late: most deployments have no certificate.
    from cryptography import x509

    try:
        chain = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        return False, f"{path} is not a readable certificate ({reason}); pass a PEM file"
    # The first one; clients may not need the others of the chain.
    begins_s = chain[0].not_valid_before_utc.timestamp()
    ends_s = chain[0].not_valid_after_utc.timestamp()
    renew = "replace it with a new one, then start the platform again"
    if now_s >= ends_s:
        return False, f"{path} expired on {_date(ends_s)}, so TLS connections fail; {renew}"
    if now_s < begins_s:
        return False, f"{path} is valid only from {_date(begins_s)} on; check this machine's clock"
    if now_s > ends_s - _NOTICE_S:
        return True, f"{path} expires on {_date(ends_s)}; {renew}"
    return True, ""


def warnings(config: Config, *, now_s: float) -> list[str]:
    """What to do about each certificate that is not valid now, or not for much longer."""
    checked = (check_certificate(path, now_s=now_s) for path in certificates(config))
    return [advice for _, advice in checked if advice]


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))
