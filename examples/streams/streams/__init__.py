"""Two services and a gateway that coordinate through Redis Streams, as applications of Holdfast.

gateway.py      the only address that clients use
service.py      the HTTP API of a service: health, jobs, dead letters
guard.py        the execution guard: a middleware over Redis SET NX
errors.py       which errors are retried
resources.py    what handlers need: connection pool, Redis, HTTP client
tables.py       creates the tables of a service
users/          creates users, in a workflow of four steps
notifications/  sends messages through an external API, behind a token bucket
provider.py     a stand-in for that external API
local/          runs all of it on this machine: `start`, `stop`, `story`
"""
