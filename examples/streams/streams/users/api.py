"""The HTTP API of the service: `uvicorn streams.users.api:site`."""

from streams.service import create_service
from streams.users.tasks import app

site = create_service(app)
