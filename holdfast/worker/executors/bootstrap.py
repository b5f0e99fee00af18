"""The first lines of a child of the process executor: run as a script by a clean interpreter, never imported.

It sets the worker's import path before it imports anything outside the standard library, so a file in the working
directory cannot shadow a module.
"""

from __future__ import annotations

import json
import socket
import sys


def main() -> None:
    """Serves the worker at the other end of the socket, whose descriptor is the only argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
    sys.path[:] = json.loads(connection.recv(length, socket.MSG_WAITALL))

    from holdfast.worker.executors.child import serve

    serve(connection)


if __name__ == "__main__":
    main()
