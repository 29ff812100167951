"""suite.py LANGUAGE DIRECTORY LOG [SCENARIO]...: the same scenarios for the example program of every language.

Prints one line per scenario, and last `LANGUAGE: N passed, M failed`.  Behind test/examples/run.
"""

import sys
import time
import traceback

import http_scenarios
import lease_scenarios
import readme_scenarios
import worker_scenarios
from harness import Db, Program, Server

MODULES = [http_scenarios, lease_scenarios, worker_scenarios, readme_scenarios]


class Language:
    """What a scenario gets: the program of the language, serving, and the database."""

    def __init__(self, directory, log):
        self.directory, self.log, self.db = directory, log, Db()
        self.server, self.workers = Server(directory, log), []

    def worker(self):
        worker = Program(self.directory, self.log, "work")
        self.workers.append(worker)
        return worker.start()

    def ready(self):
        """Before a scenario: the program serves, no worker runs and no job waits, whatever the last one has left."""
        self.db.wait_up()
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self.db.rows("SELECT idem_cancel(job_id) FROM idem.job_status WHERE state NOT IN ('done', 'dead', 'cancelled')")
        if self.server.process is None or self.server.process.poll() is not None:
            self.server.start()


def main(name, directory, log, *wanted):
    passed = failed = 0
    with open(log, "ab") as stream:
        lang = Language(directory, stream)
        try:
            for scenario in (s for module in MODULES for s in module.SCENARIOS):
                if wanted and scenario.__name__ not in wanted:
                    continue
                began = time.monotonic()
                stream.write(f"--- {scenario.__name__}\n".encode())
                stream.flush()
                try:
                    lang.ready()
                    scenario(lang)
                    passed, verdict = passed + 1, "ok"
                except Exception:
                    failed, verdict = failed + 1, "not ok"
                    traceback.print_exc(file=sys.stdout)
                print(f"{verdict} - {name}: {scenario.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
        finally:
            Program.kill_all()
    print(f"{name}: {passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
