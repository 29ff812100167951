"""For the Python scripts of test/drivers: state a fact, and compare it with what the driver does."""

import os
import sys
import threading

POOLED = os.environ["POOLED_URL"]
failed = 0


def fact(text, got, wanted):
    global failed
    driver = os.path.basename(sys.argv[0])[len("with_"):].rsplit(".", 1)[0]
    if got == wanted:
        print(f"ok - {driver}: {text}")
    else:
        failed += 1
        print(f"not ok - {driver}: {text}: got {got!r}, wanted {wanted!r}")


def outcome(fn, *args):
    """What fn returns, or the name of the class of its error."""
    try:
        return fn(*args)
    except Exception as error:
        return type(error).__name__


def cancelled(cancel, wait):
    """What wait() returns while cancel() is called again and again: the first one may come before the statement."""
    done = threading.Event()

    def run():
        while not done.wait(0.1):
            cancel()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return wait()
    finally:
        done.set()
        thread.join()


def end():
    sys.exit(1 if failed else 0)
