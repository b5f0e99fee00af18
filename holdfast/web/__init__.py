"""The HTTP API: the whole queue for any language, as an ASGI application on Starlette.

asgi.py               `create_app`: the stack of middlewares, the router, the call of an operation
middleware.py         requests and metrics, traces, problem documents, admission
routing.py            operations, the table of them, and the router over it
responses.py          a request, its answers and refusals
request_body.py       reading a body: within limits of size and time, and strictly
fields.py             fields of queries and bodies: schema, example and check in one
problems.py           errors as RFC 9457 problem documents
submissions.py jobs.py bulk.py queues.py claims.py health.py …   the operations
openapi.py            the table as an OpenAPI document
server.py             the program: uvicorn around it
connection_limits.py  the program's connections: how many, and how long they may take
principal.py          the caller of a request, with its scopes and queues
"""

from holdfast.web.asgi import create_app

__all__ = ["create_app"]
