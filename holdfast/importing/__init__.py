"""Moves queued and scheduled jobs of another queue into Holdfast.

importer.py        the order of its steps, and its summary
celery_broker.py   messages in Celery's Redis broker
rq_queues.py       jobs in RQ's Redis
plain_pickle.py    reads pickles of plain values, without an unpickler
"""

from holdfast.importing.importer import Importer, ImportSummary

__all__ = ["Importer", "ImportSummary"]
