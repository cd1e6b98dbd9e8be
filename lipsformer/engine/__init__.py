"""Training and evaluation of image models; the only part of the library that knows Accelerate.

`trainer` decides when to log, evaluate, save and stop; `steps` makes steps and `evaluation`
evaluates, on the objects of `train_state`; `build` makes them from a config, and `initial_weights`
loads the weights that the config names; `run_files` names the files of a run, `run_folder` says
which of its weights a command uses, and `weights` reads them. The engine counts optimizer steps;
`data`, files, settings and messages call one "update", with the same numbers.

The life of a checkpoint:

1. `resume.find_start` chooses the checkpoint from which a run starts, or none.
2. `Trainer` takes the `lock` of the folder, loads that checkpoint, and writes the first files of
   the run with `claim`.
3. `Trainer` saves after an evaluation that is the best so far, every `run.save_every_epochs` epochs
   and `run.save_every_updates` steps, and when a signal stops it. `writer` copies the tensors in a
   thread and hands them to `checkpoint`, which writes a folder and removes old ones.
4. `run_folder.find_weights` chooses the weights for `eval.py` and the other commands.
"""
