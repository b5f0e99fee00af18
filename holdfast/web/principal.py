"""Principal of a request, with its operations and queues."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from holdfast.web.responses import Refusal, join_words

Scope = Literal["submit", "read", "operate", "work", "admin"]
"""What a key may be allowed to do. An operation asks for one; ``admin`` stands for every one."""

SCOPES: tuple[Scope, ...] = ("submit", "read", "operate", "work", "admin")
EVERY_QUEUE = "*"


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Principal of a request. ``key``: the id of their key; None where no keys are asked for, and everything is
    allowed.

    ``queues``: names, or patterns in which ``*`` stands for any letters and ``?`` for one.
    """

    key: str | None = None
    scopes: frozenset[Scope] = frozenset(SCOPES)
    queues: tuple[str, ...] = (EVERY_QUEUE,)
    address: str = ""

    @property
    def name(self) -> str:
        """Returns the principal's name, for logs and records."""
        return "local" if self.key is None else self.key

    @property
    def limited(self) -> bool:
        """Returns True if there may be queues that are not theirs."""
        return EVERY_QUEUE not in self.queues

    def has_scope(self, scope: Scope) -> bool:
        """Returns True if they may use operations of this scope."""
        return scope in self.scopes or "admin" in self.scopes

    def allows_queue(self, queue: str) -> bool:
        """Returns True if they may see and touch jobs of this queue."""
        return any(fnmatchcase(queue, pattern) for pattern in self.queues)

    def check_queue(self, queue: str) -> None:
        """Refuse a request that names a queue which is not theirs."""
        if not self.allows_queue(queue):
            raise _forbidden(f"queue {queue} is not one of this key's: {self._theirs}", "name another queue")

    def check_unlimited(self) -> None:
        """Refuse an operation on every queue."""
        if self.limited:
            detail = f"this concerns every queue, and this key is limited to {self._theirs}"
            raise _forbidden(detail, "use a key for every queue")

    def own_queue(self, queue: str | None) -> str | None:
        """The queue a filter is limited to: the one it names, or the only one that is theirs; None: all of them.

        Whose key has several queues must name one.
        """
        if queue is not None:
            self.check_queue(queue)
            return queue
        if not self.limited:
            return None
        (only, *others) = self.queues
        if others or "*" in only or "?" in only:
            raise _forbidden(f"this key is limited to queues {self._theirs}", "say which with queue")
        return only

    @property
    def _theirs(self) -> str:
        return join_words(self.queues)


def unauthorized_refusal() -> Refusal:
    """The same for every key that is not good, for any reason."""
    header = (b"www-authenticate", b'Bearer realm="holdfast"')
    remedy = "send Authorization: Bearer hf_…; `holdfast keys create` makes keys"
    return Refusal(401, "unauthorized", "a key that is good is needed", remedy, header)


def _forbidden(detail: str, remedy: str) -> Refusal:
    return Refusal(403, "forbidden", detail, remedy)
