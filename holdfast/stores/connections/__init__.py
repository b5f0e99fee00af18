"""Connections to servers that several packages use.

redis.py           opening them, deadlines, backoff, scripts
redis_url.py       settings of a server in its URL
redis_protocol.py  one connection
"""
