"""The HTTP API: the whole queue for any language, as an ASGI application.

asgi.py         the application: what every request passes through
routing.py      operations, the table of them, and which one a request means
messages.py     a request and its answer; what is refused before any operation sees it
bodies.py       reading a body: within limits of size and time, and strictly
fields.py       what may be said in queries and bodies: schema, example and check in one
problems.py     errors as RFC 9457 problem documents
submitting.py looking.py operating.py queues.py health.py  the operations
openapi.py      the table as an OpenAPI document
serve.py        the program: uvicorn around it
connections.py  the program's connections: how many, and how long they may take
callers.py      who asks, and which operations and queues are theirs
"""

from holdfast.web.asgi import asgi

__all__ = ["asgi"]
