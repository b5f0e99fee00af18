"""The worker.

worker.py      starts and stops the rest        shift.py    what they share
fetcher.py     claims                           runner.py   runs handlers      calls.py   how one is called
settler.py     writes outcomes                  keeper.py   renews leases
sweeper.py     maintains the store              reloader.py follows settings   patience.py waits between failures
process.py     one worker as a process          supervisor.py several of them
"""

from holdfast.worker.process import run_worker
from holdfast.worker.supervisor import supervise
from holdfast.worker.worker import Worker

__all__ = ["Worker", "run_worker", "supervise"]
