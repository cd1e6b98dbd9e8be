"""train.py whose rank 1 dies before its eighth step, the first time it is run."""

import os
import signal
import sys
from pathlib import Path

import train
from lipsformer.engine import steps

if __name__ == "__main__":
    mark = Path(sys.argv[1])
    if os.environ["RANK"] == "1" and not mark.exists():
        train_step = steps.train_step

        def dying(state, batches, num_samples, step, transform):
            if step == 7:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(state, batches, num_samples, step, transform)

        steps.train_step = dying
    sys.exit(train.main(sys.argv[2:]))
