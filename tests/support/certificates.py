"""Certificates for tests: an authority of their own signs them, made anew each time."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

import trustme


class Authority:
    """Signs certificates; who trusts it is given its ``file``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._authority = trustme.CA()
        self.file = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def server(self, host: str = "127.0.0.1", *, clients: bool = False, expired: bool = False) -> ssl.SSLContext:
        """What a server presents that is called ``host``. ``clients``: they must present one of this authority, too."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        since, until = [datetime(year, 1, 1, tzinfo=UTC) if expired else None for year in (2020, 2021)]
        self._authority.issue_cert(host, not_before=since, not_after=until).configure_cert(context)
        if clients:
            self._authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, folder: Path) -> tuple[Path, Path]:
        """The files of a client's certificate and of its key."""
        certificate = self._authority.issue_cert("client.example")
        files = folder / "client.pem", folder / "client.key"
        certificate.cert_chain_pems[0].write_to_path(str(files[0]))
        certificate.private_key_pem.write_to_path(str(files[1]))
        return files
