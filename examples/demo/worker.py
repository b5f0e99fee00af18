"""``python -m examples.demo.worker FILE``: one worker process of the demo, by the settings file FILE."""

import sys
from pathlib import Path

from examples.demo.jobs import make_app
from holdfast.worker import run_worker

if __name__ == "__main__":
    app = make_app(Path(sys.argv[1]))
    sys.exit(run_worker(app, app.settings))
