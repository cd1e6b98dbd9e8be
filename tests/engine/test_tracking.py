"""What a run prints on a terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

PROGRAM = """
import logging, sys
from accelerate import Accelerator
from lipsformer.engine.run_folder import RunFolder
from lipsformer.engine.tracking import Tracking

logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("lipsformer").setLevel(logging.INFO)
tracking = Tracking(
    Accelerator(cpu=True), RunFolder(sys.argv[1]),
    run_id="a", step=0, next_record=0, total_steps=3, metrics_bytes=0,
)
tracking.log("the only line")
tracking.close()
"""


def test_a_line_is_printed_once_beside_the_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 4096):
            printed += part
    except OSError:  # Linux reports the end of a terminal like this
        pass
    os.close(ours)
    assert process.wait() == 0, printed.decode()
    assert printed.count(b"the only line") == 1
    assert b"0/3" in printed  # the bar
