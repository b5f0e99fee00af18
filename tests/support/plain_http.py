"""TLS settings of clients that use no TLS."""

from __future__ import annotations

import ssl

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""``verify=PLAIN`` for clients of http:// addresses: otherwise each loads the authorities of the web, 50 ms of CPU."""
