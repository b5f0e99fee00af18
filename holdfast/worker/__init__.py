"""The worker.

worker.py      starts and stops the services     context.py    state they share, waits between failures
fetcher.py     claims jobs                        runner.py     runs handlers, each by invocation.py
settler.py     writes settlements                 heartbeat.py  renews leases, receives commands
log_writer.py  writes handlers' log lines         sweeper.py    maintains the store
policy.py      retries and deferrals of jobs     reporting.py  events of claims and settlements
reloader.py    follows the settings file          metrics_server.py  metrics and health on a port
process.py     one worker as a process            supervisor.py several of them
stop_signals.py  SIGTERM and SIGINT               ticker.py     submits the jobs of schedules
step_writer.py  stores steps of handlers          handler_limits.py  tokens and pauses for handlers
fault_injector.py  faults on purpose              executors/, sandbox/  how handlers and commands run
tx_completion.py  jobs that end in a handler's own transaction
"""

from holdfast.worker.process import run_worker
from holdfast.worker.supervisor import supervise
from holdfast.worker.worker import Worker

__all__ = ["Worker", "run_worker", "supervise"]
