"""train.py whose rank 1 dies before its eighth update, the first time it is run."""

import os
import signal
import sys
from pathlib import Path

import train
from lipsformer.engine.steps import Learner

if __name__ == "__main__":
    mark = Path(sys.argv[1])
    if os.environ["RANK"] == "1" and not mark.exists():
        update = Learner.update

        def dying(self, batches, num_samples, number, transform):
            if number == 7:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, batches, num_samples, number, transform)

        Learner.update = dying
    sys.exit(train.main(sys.argv[2:]))
