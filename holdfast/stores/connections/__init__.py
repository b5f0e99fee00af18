"""Connections to servers that more than one room talks to.

redis.py      opening them, deadlines, backoff, scripts
redis_url.py  what a URL says of the server
wire.py       one connection
"""
