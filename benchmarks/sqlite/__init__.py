"""The SQLite store, with Huey as its peer: one row to a module, beside filling.py, peer.py and peer_worker.py."""
