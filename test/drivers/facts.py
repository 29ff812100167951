"""For the Python scripts of test/drivers: state a fact, and compare it with what the driver does."""

import os
import sys

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


def end():
    sys.exit(1 if failed else 0)
