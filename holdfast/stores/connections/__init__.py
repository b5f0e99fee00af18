"""Connections to servers that several packages use.

redis.py      opening them, deadlines, backoff, scripts
redis_url.py  what a URL says of the server
wire.py       one connection
"""
