"""Training and evaluation of image models; the only part of the library that knows Accelerate.

`trainer` decides when to log, evaluate, save and stop; `steps` makes one step and one evaluation on
the objects of `train_state`; `build` makes them from a config; `run_folder` knows the files of a
run and which weights it stands for. The code counts optimizer steps; files, settings and messages
call one "update", with the same numbers.
"""
