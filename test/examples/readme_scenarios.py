"""The first program of examples/LANGUAGE/README.md, as the page says: save it beside the modules, start it, send twice."""

import glob
import os
import re
import shutil
import signal
import subprocess
import tempfile

from harness import Server, check, equal, free_port, unique, wait_for

PYTHON, RUBY = "/usr/bin/python3", "/usr/bin/ruby"  # they see Debian's packages

# The commands of the page: program, worker.
COMMANDS = {
    "node": (["node", "shop.mjs"], ["node", "worker.mjs"]),
    "python": ([PYTHON, "shop.py"], [PYTHON, "worker.py"]),
    "go": (["./program"], ["./program", "work"]),
    "ruby": ([RUBY, "-S", "puma", "-b", "tcp://127.0.0.1:3000"], [RUBY, "worker.rb"]),
}


class Readme(Server):
    """The programs of the page, in a directory of their own."""

    def __init__(self, lang, directory):
        self.language, self.directory, self.log = os.path.basename(lang.directory), directory, lang.log
        self.port, self.processes = free_port(), []
        for path in glob.glob(os.path.join(lang.directory, "idem*")) + glob.glob(os.path.join(lang.directory, "node_modules")):
            os.symlink(path, os.path.join(directory, os.path.basename(path)))
        with open(os.path.join(lang.directory, "README.md")) as page:
            blocks = re.findall(r"^```\w+\n(?://|#) (\S+)\n(.*?)^```$", page.read(), re.MULTILINE | re.DOTALL)
        check(blocks, "no program in the page")
        for name, text in blocks:
            with open(os.path.join(directory, name), "w") as file:
                file.write(text.replace("3000", str(self.port)))
        if self.language == "go":
            self._build_go(lang.directory)

    def _build_go(self, example):
        source = os.path.join(self.directory, "src", "shop")
        shutil.copytree(os.path.join(example, "idem"), os.path.join(source, "idem"))
        shutil.copy(os.path.join(self.directory, "main.go"), source)
        env = dict(os.environ, GO111MODULE="off", GOFLAGS="", GOPROXY="off", GOPATH=f"{self.directory}:/usr/share/gocode")
        subprocess.run(["go", "build", "-o", "program", "shop"], cwd=self.directory, env=env, stderr=self.log, check=True)

    def run(self, which):
        command = [word.replace("3000", str(self.port)) for word in COMMANDS[self.language][which]]
        process = subprocess.Popen(
            command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.processes.append(process)
        return process

    def is_up(self):
        try:
            return self.post("/charges", {}).status == 400  # no key
        except OSError:
            return False

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_program_of_the_readme(lang):
    """One charge and one mail for two requests; the worker ends when it is told to."""
    if os.path.basename(lang.directory) not in COMMANDS:
        return
    with tempfile.TemporaryDirectory() as directory:
        readme = Readme(lang, directory)
        try:
            readme.run(0)
            wait_for("the program of the page serves", readme.is_up)
            order = unique()
            body, key = {"order": order, "cents": 500}, f"readme-{order}"
            replies = [readme.post("/charges", body, key) for _ in range(2)]
            equal([r.status for r in replies], [201, 201], "status")
            equal(replies[0].body, replies[1].body, "body")
            equal(["idempotent-replayed" in r.headers for r in replies], [False, True], "replayed")
            equal(readme.post("/charges", dict(body, cents=999), key).status, 422, "another request")
            equal(readme.post("/charges", dict(body, cents=200000), f"{key}-refused").status, 402, "a refusal")
            equal(lang.db.count("charges", "order_id = %s", order), 1, "charges")
            waiting = "queue = 'mail' AND key = %s"
            equal(lang.db.count("idem.jobs", waiting, f"order:{order}"), 1, "jobs")
            worker = readme.run(1)
            wait_for("the mail is sent", lambda: lang.db.count("idem.jobs", waiting, f"order:{order}") == 0)
            worker.send_signal(signal.SIGTERM)
            equal(worker.wait(60), 0, "the end of the worker")
        finally:
            readme.kill()


SCENARIOS = [first_program_of_the_readme]
